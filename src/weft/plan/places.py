"""Places: a model cut into the contiguous ranges that each rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from weft.architectures.place import Place, Span
from weft.architectures.shape import Experts, ModelShape
from weft.errors import PlanError
from weft.formats.precision import scale_columns
from weft.plan.rules import check_pipeline_split, check_tensor_parallel_size
from weft.plan.split import split

FFN_UNIT = 32  # columns; the smallest block of the quantised formats, and a full vector of bf16 on every target


class ExpertSpans(NamedTuple):
    """One rank's experts, its columns of each of them, and its columns of the shared experts."""

    experts: Span
    columns: Span
    shared: Span


NO_EXPERTS = ExpertSpans(Span(0, 0), Span(0, 0), Span(0, 0))


def column_unit(shape: ModelShape, precision: str) -> int:
    """Number of MLP columns that stay together in this precision: those that share a scale, at least FFN_UNIT."""
    return max(FFN_UNIT, scale_columns(shape, precision))


def cut_heads(q_heads: int, kv_heads: int, weights: Sequence[float]) -> list[tuple[Span, Span]]:
    """Cut attention into each rank's query heads and KV heads, in whole KV groups while there are enough of them.

    With more ranks than KV heads, each KV group goes to one or more ranks. The ranks of one group divide its query
    heads, and each holds a copy of its KV head. Heads are never padded.

    Raises PlanError for more ranks than query heads.
    """
    ranks, group = len(weights), q_heads // kv_heads
    check_tensor_parallel_size(ranks, q_heads)
    if ranks <= kv_heads:
        kv = [Span(part.start, part.stop) for part in split(kv_heads, weights, minimum=1)]
        return [(span.scaled(group), span) for span in kv]
    heads = []
    for head, sharers in enumerate(split(ranks, [1.0] * kv_heads, minimum=1)):
        for part in split(group, [weights[rank] for rank in sharers], minimum=1):
            q = Span(head * group + part.start, head * group + part.stop)
            heads.append((q, Span(head, head + 1)))
    return heads


def cut_columns(total: int, weights: Sequence[float], unit: int = FFN_UNIT) -> list[Span]:
    """Cut columns into one span per rank, in multiples of `unit` while there are enough of them, else of FFN_UNIT.

    All spans are empty if the model has no such columns.
    """
    if not total:
        return [Span(0, 0)] * len(weights)
    unit = next((size for size in (unit, FFN_UNIT) if total >= size * len(weights)), 1)
    return [Span(part.start, part.stop) for part in split(total, weights, unit=unit, minimum=1)]


@lru_cache(maxsize=256)
def _cut_layer(
    q_heads: int, kv_heads: int, ffn: int, vocab: int, weights: tuple[float, ...], unit: int
) -> tuple[list[tuple[Span, Span]], list[Span], list[Span]]:
    """Each rank's heads, MLP columns and vocabulary rows."""
    # The head is a matrix product for every token that is sampled: cut like the MLP, never in whole heads.
    return cut_heads(q_heads, kv_heads, weights), cut_columns(ffn, weights, unit), cut_columns(vocab, weights)


def cut_experts(
    experts: Experts, weights: Sequence[float], group: tuple[int, int] | None, unit: int = FFN_UNIT
) -> list[ExpertSpans]:
    """Cut the experts for each rank of a stage; `group` as `expert_group` of `cut_places`."""
    ranks = len(weights)
    shared = cut_columns(experts.shared_width, weights, unit)
    if group is None:
        held, columns = [Span(0, experts.count)] * ranks, cut_columns(experts.width, weights, unit)
    else:
        replica, replicas = group
        if ranks * replicas > experts.count:
            raise PlanError(
                f"expert parallel size {ranks * replicas} is more than the {experts.count} experts of this model; "
                f"use 1 to {experts.count}",
                code="more-expert-ranks-than-experts",
            )
        dealt = deal_experts(experts.count, tuple(weights) * replicas)
        held, columns = dealt[replica * ranks : (replica + 1) * ranks], [Span(0, experts.width)] * ranks
    return [ExpertSpans(*spans) for spans in zip(held, columns, shared, strict=True)]


@lru_cache(maxsize=64)
def deal_experts(experts: int, weights: tuple[float, ...]) -> list[Span]:
    """Divide whole experts among the ranks of all replicas."""
    return [Span(part.start, part.stop) for part in split(experts, weights, minimum=1)]


def cut_places(
    shape: ModelShape,
    tensor_weights: Sequence[float],
    stage_layers: Sequence[int],
    expert_group: tuple[int, int] | None = None,
    ffn_unit: int = FFN_UNIT,
) -> tuple[Place, ...]:
    """Cut a model into the places of all ranks of one replica, stage by stage.

    - `tensor_weights`: each tensor-parallel rank's share of a layer.
    - `stage_layers`: number of layers of each stage.
    - `expert_group`: (replica, number of replicas) under expert parallelism: whole experts are divided among the ranks
      of all these data-parallel replicas, and the places are those of the given one. (0, 1) is expert parallelism
      without data parallelism; None cuts every expert by the tensor weights.
    - `ffn_unit`: MLP columns are cut in multiples of this number; `column_unit` computes it for a precision.

    Raises PlanError for a cut that the model cannot have.
    """
    check_pipeline_split(stage_layers, len(shape.layers))
    tp = len(tensor_weights)
    heads, ffn, vocab = _cut_layer(
        shape.q_heads, shape.kv_heads, shape.ffn, shape.vocab, tuple(tensor_weights), ffn_unit
    )
    if shape.experts:
        experts = cut_experts(shape.experts, tensor_weights, expert_group, ffn_unit)
    else:
        experts = [NO_EXPERTS] * tp
    places, start = [], 0
    for stage, count in enumerate(stage_layers):
        for t in range(tp):
            q_heads, kv_heads = heads[t]
            places.append(
                Place(
                    rank=stage * tp + t,
                    stage=stage,
                    stages=len(stage_layers),
                    tp_rank=t,
                    tp_size=tp,
                    layers=Span(start, start + count),
                    q_heads=q_heads,
                    kv_heads=kv_heads,
                    ffn=ffn[t],
                    vocab=vocab[t],
                    experts=experts[t].experts,
                    expert_ffn=experts[t].columns,
                    shared_ffn=experts[t].shared,
                )
            )
        start += count
    return tuple(places)
