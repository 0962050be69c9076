"""Layers per pipeline stage on given GPUs, by their memory or their bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from weft.checkpoint.architectures.kv import kv_bytes
from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.quantised.precision import WeightBytes, similar_layers, sum_by_kind
from weft.plan.places import column_unit, cut_places
from weft.planner.search.partition import StageBudget, partition_layers


class RankCapacity(msgspec.Struct, frozen=True):
    """One rank's GPU: bytes that weights and KV may take, and bytes read per second."""

    usable: float
    bandwidth: float


def weight_bytes_per_token(shape: ModelShape, weights: WeightBytes) -> float:
    """Bytes of weights that one token reads: all but the embedding table and the experts that its router does not
    choose. A tied head reads the table."""
    chosen = shape.experts.top_k / shape.experts.count if shape.experts else 0.0
    head = weights.embedding if shape.tied and not weights.head else weights.head
    return weights.linear + weights.others + weights.expert * chosen + head


def layers_by_capacity(
    shape: ModelShape,
    precision: str,
    kv_dtype: str,
    tokens: int,
    tensor_weights: Sequence[float],
    stages: Sequence[Sequence[RankCapacity]],
    *,
    data_parallel: int = 1,
    expert_parallel: int = 1,
    by_room: bool = False,
) -> tuple[int, ...] | None:
    """Layers per stage so that every rank has room for its weights and the KV of `tokens` tokens.

    The slowest stage takes as little time per token as possible; with `by_room` the fullest stage is as little full as
    possible. None if there is not enough room, or if there are fewer layers than stages. `precision` is a result of
    `canonical` or `held_precision` of `checkpoint.quantised.precision`; `data_parallel` and `expert_parallel` are as in
    `cut_places`.
    """
    places = cut_places(
        shape,
        tensor_weights,
        [len(shape.layers)],
        data_parallel=data_parallel,
        expert_parallel=expert_parallel,
        ffn_unit=column_unit(shape, precision),
    )
    ranks = places[: len(tensor_weights)]
    by_rank = [_layers(shape, precision, kv_dtype, tokens, rank) for rank in ranks]
    sizes, work = by_rank[0]
    # A stage is limited by its tightest and its slowest rank. `scale` converts each rank's capacity to the first
    # rank's bytes.
    scale = [sum(sizes) / sum(other) for other, _ in by_rank]
    embedding, head = _ends(shape, precision, ranks[0])
    budgets = []
    for number, capacities in enumerate(stages):
        last = number == len(stages) - 1
        held = embedding * (number == 0) + head * last
        room = min(capacity.usable * by for capacity, by in zip(capacities, scale, strict=True))
        speed = min(capacity.bandwidth * by for capacity, by in zip(capacities, scale, strict=True))
        if by_room:
            budgets.append(StageBudget(speed=max(room, 1.0), room=room, work=held, size=held))
        else:
            budgets.append(StageBudget(speed=speed, room=room, work=head if last else 0.0, size=held))
    return partition_layers(sizes if by_room else work, sizes, budgets)


@lru_cache(maxsize=1024)
def _layers(
    shape: ModelShape, precision: str, kv_dtype: str, tokens: int, rank: Place
) -> tuple[list[float], list[float]]:
    """Per layer on a rank: the bytes that it takes, and the bytes of its weights that a token reads."""
    sizes, work = [], []
    known: dict[object, tuple[float, float]] = {}
    for layer in range(len(shape.layers)):
        kind = similar_layers(shape, precision)[layer], shape.layers[layer].window
        if kind not in known:
            place = msgspec.structs.replace(rank, layers=Span(layer, layer + 1), stage=1, stages=3)
            weights = sum_by_kind(shape, precision, place)
            known[kind] = (
                weights.total + kv_bytes(shape, tokens, kv_dtype, place),
                weight_bytes_per_token(shape, weights),
            )
        size, read = known[kind]
        sizes.append(size)
        work.append(read)
    return sizes, work


@lru_cache(maxsize=1024)
def _ends(shape: ModelShape, precision: str, rank: Place) -> tuple[float, float]:
    """Bytes of a rank's embedding on a first stage, and of its head and norm on a last one."""
    nothing = Span(0, 0)
    first = msgspec.structs.replace(rank, layers=nothing, stage=0, stages=2)
    last = msgspec.structs.replace(rank, layers=nothing, stage=1, stages=2)
    return sum_by_kind(shape, precision, first).total, sum_by_kind(shape, precision, last).total
