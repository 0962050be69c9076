"""Places: a model cut into the contiguous ranges that each rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from weft.checkpoint.architectures.place import HeadSpans, Place, Span
from weft.checkpoint.architectures.shape import Experts, HeadCounts, ModelShape
from weft.checkpoint.quantised.precision import scale_columns
from weft.plan.parallelism import Parallelism
from weft.plan.rules import (
    check_expert_parallel_size,
    check_library_cut,
    check_pipeline_split,
    check_tensor_parallel_size,
)
from weft.plan.split import split

FFN_UNIT = 32  # columns; the smallest block of the quantised formats, and a full vector of bf16 on every target


class ExpertSpans(NamedTuple):
    """One rank's experts, its columns of each of them, and its columns of the shared experts."""

    experts: Span
    columns: Span
    shared: Span


NO_EXPERTS = ExpertSpans(Span(0, 0), Span(0, 0), Span(0, 0))


def column_unit(shape: ModelShape, precision: str) -> int:
    """Number of MLP columns that stay together in this precision: the columns that share a scale, at least FFN_UNIT."""
    return max(FFN_UNIT, scale_columns(shape, precision))


def cut_heads(counts: HeadCounts, weights: Sequence[float]) -> list[HeadSpans]:
    """Cut attention into each rank's query heads and KV heads, in whole KV groups while there are enough of them.

    With more ranks than KV heads, each KV group goes to one or more ranks. The ranks of one group divide its query
    heads, and each holds a copy of its KV head. Heads are never padded.

    Raises PlanError for more ranks than query heads.
    """
    q_heads, kv_heads = counts
    ranks, group = len(weights), q_heads // kv_heads
    check_tensor_parallel_size(ranks, q_heads)
    if ranks <= kv_heads:
        kv = [Span(part.start, part.stop) for part in split(kv_heads, weights, minimum=1)]
        return [HeadSpans(span.scaled(group), span) for span in kv]
    heads = []
    for head, sharers in enumerate(split(ranks, [1.0] * kv_heads, minimum=1)):
        for part in split(group, [weights[rank] for rank in sharers], minimum=1):
            q = Span(head * group + part.start, head * group + part.stop)
            heads.append(HeadSpans(q, Span(head, head + 1)))
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
    counts: tuple[HeadCounts, ...], ffn: int, vocab: int, weights: tuple[float, ...], unit: int
) -> tuple[list[tuple[tuple[HeadCounts, HeadSpans], ...]], list[Span], list[Span]]:
    """Each rank's heads of each of the `counts`, MLP columns and vocabulary rows."""
    heads = [[(of, spans) for spans in cut_heads(of, weights)] for of in counts]
    # The head is a matrix product for every token that is sampled: cut like the MLP, never in whole heads.
    return list(zip(*heads, strict=True)), cut_columns(ffn, weights, unit), cut_columns(vocab, weights)


def cut_experts(
    experts: Experts, weights: Sequence[float], expert_parallel: int, unit: int = FFN_UNIT
) -> list[tuple[Span, Span]]:
    """Each rank's experts, and its columns of each of them.

    `weights` are the weights of all ranks that share the experts of a layer. They form `expert_parallel` crews of
    neighbours. Whole experts are dealt to the crews, and the ranks of a crew divide the columns of each.
    """
    check_expert_parallel_size(expert_parallel, len(weights), experts.count)
    size = len(weights) // expert_parallel
    crews = [weights[first : first + size] for first in range(0, len(weights), size)]
    dealt = split(experts.count, [sum(crew) for crew in crews], minimum=1)
    return [
        (Span(held.start, held.stop), columns)
        for held, crew in zip(dealt, crews, strict=True)
        for columns in cut_columns(experts.width, crew, unit)
    ]


@lru_cache(maxsize=64)
def _cut_mixture(
    experts: Experts | None, weights: tuple[float, ...], data_parallel: int, expert_parallel: int, unit: int
) -> list[ExpertSpans]:
    """The experts of each rank of a stage, attention group by attention group."""
    if experts is None:
        return [NO_EXPERTS] * len(weights) * data_parallel
    routed = cut_experts(experts, weights * data_parallel, expert_parallel, unit)
    shared = cut_columns(experts.shared_width, weights, unit) * data_parallel
    return [ExpertSpans(*spans, own) for spans, own in zip(routed, shared, strict=True)]


def cut_places(
    shape: ModelShape,
    tensor_weights: Sequence[float],
    stage_layers: Sequence[int],
    *,
    data_parallel: int = 1,
    expert_parallel: int = 1,
    ffn_unit: int = FFN_UNIT,
) -> tuple[Place, ...]:
    """Cut a model into the places of all ranks of one engine: attention group by attention group, stage by stage.

    - `tensor_weights`: each tensor-parallel rank's share of a layer, the same in every group.
    - `stage_layers`: number of layers of each stage.
    - `data_parallel`: number of attention groups, which share one set of experts.
    - `expert_parallel`: number of parts into which the experts are dealt over the ranks of a stage of all groups; the
      ranks with the same experts divide their columns. 1 cuts every expert by the tensor weights.
    - `ffn_unit`: MLP columns are cut in multiples of this number; `column_unit` computes it for a precision.

    Raises PlanError for a cut that the model cannot have.
    """
    check_pipeline_split(stage_layers, len(shape.layers))
    check_library_cut(shape, tensor_weights, len(stage_layers))
    weights, tp = tuple(tensor_weights), len(tensor_weights)
    heads, ffn, vocab = _cut_layer(shape.head_counts, shape.ffn, shape.vocab, weights, ffn_unit)
    experts = _cut_mixture(shape.experts, weights, data_parallel, expert_parallel, ffn_unit)
    first_layers = list(accumulate(stage_layers, initial=0))
    return tuple(
        Place(
            rank=(group * len(stage_layers) + stage) * tp + t,
            stage=stage,
            stages=len(stage_layers),
            tp_rank=t,
            tp_size=tp,
            dp_rank=group,
            dp_size=data_parallel,
            layers=Span(first_layers[stage], first_layers[stage + 1]),
            q_heads=heads[t][0][1].q,
            kv_heads=heads[t][0][1].kv,
            other_heads=heads[t][1:],
            ffn=ffn[t],
            vocab=vocab[t],
            experts=experts[group * tp + t].experts,
            expert_ffn=experts[group * tp + t].columns,
            shared_ffn=experts[group * tp + t].shared,
        )
        for group in range(data_parallel)
        for stage in range(len(stage_layers))
        for t in range(tp)
    )


def engine_places(shape: ModelShape, cut: Parallelism, precision: str) -> tuple[Place, ...]:
    """The places of all ranks of one engine, with weights in this precision. Raises as `cut_places`."""
    experts = {"data_parallel": cut.groups, "expert_parallel": cut.expert_parallel}
    return _places(shape, cut.weights, cut.pipeline_split, ffn_unit=column_unit(shape, precision), **experts)


# A search tries the same cuts many times.
_places = lru_cache(maxsize=1024)(cut_places)
