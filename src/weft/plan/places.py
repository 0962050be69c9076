"""Places: a model cut into the contiguous ranges that each rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from weft.architectures.place import Place, Span
from weft.architectures.shape import Experts, ModelShape
from weft.errors import PlanError
from weft.formats.precision import scale_columns
from weft.plan.split import split

FFN_UNIT = 32  # columns; the smallest block of the quantised formats, and a full vector of bf16 on every target


def column_unit(shape: ModelShape, precision: str) -> int:
    """Columns of an MLP that stay together in this precision: those that share a scale, and never below FFN_UNIT."""
    return max(FFN_UNIT, scale_columns(shape, precision))


def cut_heads(q_heads: int, kv_heads: int, weights: Sequence[float]) -> list[tuple[Span, Span]]:
    """Each rank's query heads and KV heads, in whole KV groups while there are enough of them.

    With more ranks than KV heads the groups are dealt out first, one or more ranks each, and the ranks of
    one group share its query heads and each hold its single KV head. Nothing is padded.
    """
    ranks, group = len(weights), q_heads // kv_heads
    if ranks > q_heads:
        raise PlanError(
            f"tensor parallel size {ranks} is more than the {q_heads} query heads of this model can feed; "
            f"use 1 to {q_heads}, and pipeline parallel for the rest"
        )
    if ranks <= kv_heads:
        kv = [Span(r.start, r.stop) for r in split(kv_heads, weights, minimum=1)]
        return [(span.scaled(group), span) for span in kv]
    crews = split(ranks, [1.0] * kv_heads, minimum=1)
    heads = []
    for head, crew in enumerate(crews):
        for part in split(group, [weights[r] for r in crew], minimum=1):
            q = Span(head * group + part.start, head * group + part.stop)
            heads.append((q, Span(head, head + 1)))
    return heads


def cut_columns(total: int, weights: Sequence[float], unit: int = FFN_UNIT) -> list[Span]:
    """Each rank's columns of a matrix, in multiples of `unit` while there are enough of them, else of FFN_UNIT."""
    unit = next((size for size in (unit, FFN_UNIT) if total >= size * len(weights)), 1)
    return [Span(part.start, part.stop) for part in split(total, weights, unit=unit, minimum=1)]


@lru_cache(maxsize=256)
def _shares(
    q_heads: int, kv_heads: int, ffn: int, vocab: int, weights: tuple[float, ...], unit: int
) -> tuple[list[tuple[Span, Span]], list[Span], list[Span]]:
    """Each rank's heads, columns of the MLP and rows of the vocabulary."""
    # The head is a matrix product for every token that is sampled: cut like the MLP, never in whole heads.
    return cut_heads(q_heads, kv_heads, weights), cut_columns(ffn, weights, unit), cut_columns(vocab, weights)


def cut_experts(
    experts: Experts, weights: Sequence[float], group: tuple[int, int] | None, unit: int = FFN_UNIT
) -> list[tuple[Span, Span, Span]]:
    """Each rank's experts, columns of each, and columns of the shared ones."""
    ranks = len(weights)
    nothing = [Span(0, 0)] * ranks
    shared = cut_columns(experts.shared_ffn, weights, unit) if experts.shared_ffn else nothing
    if group is None:
        held, columns = [Span(0, experts.count)] * ranks, cut_columns(experts.ffn, weights, unit)
    else:
        replica, replicas = group
        if ranks * replicas > experts.count:
            raise PlanError(
                f"expert parallel size {ranks * replicas} is more than the {experts.count} experts of this model; "
                f"use 1 to {experts.count}"
            )
        dealt = deal_experts(experts.count, tuple(weights) * replicas)
        held, columns = dealt[replica * ranks : (replica + 1) * ranks], [Span(0, experts.ffn)] * ranks
    return list(zip(held, columns, shared, strict=True))


@lru_cache(maxsize=64)
def deal_experts(experts: int, weights: tuple[float, ...]) -> list[Span]:
    """Whole experts, to the ranks of all replicas."""
    return [Span(part.start, part.stop) for part in split(experts, weights, minimum=1)]


def cut_places(
    shape: ModelShape,
    tensor_weights: Sequence[float],
    stage_layers: Sequence[int],
    expert_group: tuple[int, int] | None = None,
    ffn_unit: int = FFN_UNIT,
) -> tuple[Place, ...]:
    """All ranks of a layout, stage by stage: `stage_layers[s]` layers in stage s, cut by `tensor_weights`.

    `expert_group` (replica, replicas) deals whole experts out to the ranks of this many data-parallel replicas,
    and gives the places in that one of them; (0, 1) is expert parallelism without data parallelism. None cuts
    every expert by the tensor weights. The columns of MLPs are cut in multiples of `ffn_unit`, which `column_unit`
    gives for a precision.
    """
    if sum(stage_layers) != shape.layers or any(n < 1 for n in stage_layers):
        raise PlanError(
            f"pipeline split {','.join(map(str, stage_layers))} holds {sum(stage_layers)} layers; it must add up "
            f"to the model's {shape.layers}, with at least one layer per stage"
        )
    tp = len(tensor_weights)
    heads, ffn, vocab = _shares(shape.q_heads, shape.kv_heads, shape.ffn, shape.vocab, tuple(tensor_weights), ffn_unit)
    nothing = (Span(0, 0), Span(0, 0), Span(0, 0))
    experts = cut_experts(shape.experts, tensor_weights, expert_group, ffn_unit) if shape.experts else [nothing] * tp
    out, start = [], 0
    for stage, count in enumerate(stage_layers):
        for t in range(tp):
            out.append(
                Place(
                    rank=stage * tp + t,
                    stage=stage,
                    stages=len(stage_layers),
                    tp_rank=t,
                    tp_size=tp,
                    layers=Span(start, start + count),
                    q_heads=heads[t][0],
                    kv_heads=heads[t][1],
                    ffn=ffn[t],
                    vocab=vocab[t],
                    experts=experts[t][0],
                    expert_ffn=experts[t][1],
                    shared_ffn=experts[t][2],
                )
            )
        start += count
    return tuple(out)
