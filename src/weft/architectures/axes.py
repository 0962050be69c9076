"""Axes: what each dimension of a parameter counts, how long it is, and which range of it a rank holds."""

from __future__ import annotations

from enum import Enum

from weft.architectures.place import Place, Span
from weft.architectures.shape import ModelShape


class Axis(Enum):
    """What an axis of a parameter counts, and so how it may be cut."""

    HIDDEN = "hidden"
    HEAD_DIM = "head_dim"
    Q = "q_heads"  # q_heads * head_dim, cut in whole heads
    KV = "kv_heads"  # kv_heads * head_dim, cut in whole heads
    HEADS = "sinks"  # one per query head
    FFN = "ffn"
    VOCAB = "vocab"
    POSITIONS = "positions"  # learned ones
    EXPERTS = "experts"  # the router's rows: every rank has them all
    EXPERT_FFN = "expert_ffn"  # of one expert
    EXPERT_PAIRS = "expert_pairs"  # gate and up of one expert, alternating
    SHARED_FFN = "shared_ffn"  # of the shared experts together
    Q_RANK = "q_rank"  # latent attention's, down to VALUE
    KV_RANK = "kv_rank"
    LATENT = "latent"  # what is cached: the compressed keys and values, and the rotary part
    KV_UP = "kv_up"  # per query head: its key without the rotary part, and its value
    VALUE = "value"  # per query head: its value


# The span of a Place that cuts an axis; an axis that is not here is whole on every rank.
CUT_BY = {
    Axis.Q: "q_heads",
    Axis.KV: "kv_heads",
    Axis.HEADS: "q_heads",
    Axis.KV_UP: "q_heads",
    Axis.VALUE: "q_heads",
    Axis.FFN: "ffn",
    Axis.VOCAB: "vocab",
    Axis.EXPERT_FFN: "expert_ffn",
    Axis.EXPERT_PAIRS: "expert_ffn",
    Axis.SHARED_FFN: "shared_ffn",
}
# Rows of OPT's table of positions before that of position 0.
POSITIONS_BEFORE = {"OPTForCausalLM": 2}


def per_unit(shape: ModelShape, axis: Axis) -> int:
    """Elements of an axis for each index of the span that cuts it."""
    match axis:
        case Axis.Q | Axis.KV:
            return shape.head_dim
        case Axis.KV_UP if shape.mla:
            return shape.mla.nope_dim + shape.mla.v_dim
        case Axis.VALUE if shape.mla:
            return shape.mla.v_dim
        case Axis.EXPERT_PAIRS:
            return 2
    return 1


def axis_length(shape: ModelShape, axis: Axis) -> int:
    """The whole length of an axis, in elements; 0 for one that the model does not have."""
    experts, mla = shape.experts, shape.mla
    match axis:
        case Axis.HIDDEN:
            return shape.hidden
        case Axis.HEAD_DIM:
            return shape.head_dim
        case Axis.FFN:
            return shape.ffn
        case Axis.VOCAB:
            return shape.vocab
        case Axis.KV:
            return shape.kv_heads * shape.head_dim
        case Axis.Q | Axis.HEADS | Axis.KV_UP | Axis.VALUE:
            return shape.q_heads * per_unit(shape, axis)
        case Axis.POSITIONS:
            return shape.max_positions + POSITIONS_BEFORE.get(shape.architecture, 0)
        case Axis.EXPERTS:
            return experts.count if experts else 0
        case Axis.EXPERT_FFN | Axis.EXPERT_PAIRS:
            return experts.ffn * per_unit(shape, axis) if experts else 0
        case Axis.SHARED_FFN:
            return experts.shared_ffn if experts else 0
        case Axis.Q_RANK:
            return (mla.q_lora_rank or 0) if mla else 0
        case Axis.KV_RANK:
            return mla.kv_lora_rank if mla else 0
        case Axis.LATENT:
            return mla.kv_lora_rank + mla.rope_dim if mla else 0


def owned(shape: ModelShape, place: Place, axis: Axis) -> Span:
    """The rank's range of an axis, in elements."""
    if axis not in CUT_BY:
        return Span(0, axis_length(shape, axis))
    span: Span = getattr(place, CUT_BY[axis])
    return span.scaled(per_unit(shape, axis))
