"""Axes: what each dimension of a parameter counts, its length, and the range of it that a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec

from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import ModelShape


class Axis(Enum):
    """Meaning of one dimension of a parameter, which decides how tensor parallelism may cut it."""

    HIDDEN = "hidden"
    EMBEDDING = "embedding"  # length of the embedding's rows, if it is not the hidden size
    HEAD_DIM = "head_dim"
    Q = "q_heads"  # q_heads * head_dim, cut in whole heads
    KV = "kv_heads"  # kv_heads * head_dim, cut in whole heads
    HEADS = "sinks"  # one per query head
    FFN = "ffn"
    VOCAB = "vocab"
    POSITIONS = "positions"  # learned position embeddings
    EXPERTS = "experts"  # the router's rows: every rank has all of them
    EXPERT_FFN = "expert_ffn"  # of one expert
    SHARED_FFN = "shared_ffn"  # of the shared experts together
    SHARED_GATE = "shared_gate"  # the weight of their result: one row
    Q_RANK = "q_rank"  # this and all below: multi-head latent attention
    KV_RANK = "kv_rank"
    LATENT = "latent"  # the cached vector: compressed keys and values, and the rotary part
    KV_UP = "kv_up"  # per query head: its key without the rotary part, and its value
    VALUE = "value"  # per query head: its value


class Extent(msgspec.Struct, frozen=True, cache_hash=True):
    """A dimension of `length` elements of a model that no table describes; `cut`: the ranks divide it evenly."""

    length: int
    cut: bool = False


# The span of a Place that cuts an axis. An axis that is missing here is whole on every rank.
CUT_BY = {
    Axis.Q: "q_heads",
    Axis.KV: "kv_heads",
    Axis.HEADS: "q_heads",
    Axis.KV_UP: "q_heads",
    Axis.VALUE: "q_heads",
    Axis.FFN: "ffn",
    Axis.VOCAB: "vocab",
    Axis.EXPERT_FFN: "expert_ffn",
    Axis.SHARED_FFN: "shared_ffn",
}
# Length of each span of CUT_BY in the whole model, in indices.
_SPAN_LENGTHS: dict[str, Callable[[ModelShape], int]] = {
    "q_heads": lambda shape: shape.q_heads,
    "kv_heads": lambda shape: shape.kv_heads,
    "ffn": lambda shape: shape.ffn,
    "vocab": lambda shape: shape.vocab,
    "expert_ffn": lambda shape: shape.experts.width if shape.experts else 0,
    "shared_ffn": lambda shape: shape.experts.shared_width if shape.experts else 0,
}
# Length of each axis that is never cut, in elements.
_WHOLE_LENGTHS: dict[Axis, Callable[[ModelShape], int]] = {
    Axis.HIDDEN: lambda shape: shape.hidden,
    Axis.EMBEDDING: lambda shape: shape.embedding_dim or shape.hidden,
    Axis.HEAD_DIM: lambda shape: shape.head_dim,
    Axis.POSITIONS: lambda shape: shape.max_positions + find_architecture(shape.architecture).positions_before,
    Axis.EXPERTS: lambda shape: shape.experts.count if shape.experts else 0,
    Axis.SHARED_GATE: lambda shape: 1,
    Axis.Q_RANK: lambda shape: (shape.latent.q_lora_rank or 0) if shape.latent else 0,
    Axis.KV_RANK: lambda shape: shape.latent.kv_lora_rank if shape.latent else 0,
    Axis.LATENT: lambda shape: shape.latent.latent_dim if shape.latent else 0,
}


def per_unit(shape: ModelShape, axis: Axis) -> int:
    """Number of elements of an axis for each index of the span that cuts it."""
    match axis:
        case Axis.Q | Axis.KV:
            return shape.head_dim
        case Axis.KV_UP if shape.latent:
            return shape.latent.nope_dim + shape.latent.v_dim
        case Axis.VALUE if shape.latent:
            return shape.latent.v_dim
    return 1


def axis_length(shape: ModelShape, axis: Axis | Extent) -> int:
    """Length of an axis in the whole model, in elements; 0 if the model has no experts or latent attention for it."""
    if isinstance(axis, Extent):
        return axis.length
    cut = CUT_BY.get(axis)
    return _WHOLE_LENGTHS[axis](shape) if cut is None else _SPAN_LENGTHS[cut](shape) * per_unit(shape, axis)


def owned(shape: ModelShape, place: Place, axis: Axis | Extent) -> Span:
    """Range of an axis that the rank holds, in elements."""
    if isinstance(axis, Extent):
        rank, size = (place.tp_rank, place.tp_size) if axis.cut else (0, 1)
        return Span(axis.length * rank // size, axis.length * (rank + 1) // size)
    cut = CUT_BY.get(axis)
    if cut is None:
        return Span(0, axis_length(shape, axis))
    span: Span = getattr(place, cut)
    return span.scaled(per_unit(shape, axis))
