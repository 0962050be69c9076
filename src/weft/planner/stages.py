"""Stages: how many layers each stage of a pipeline takes, on the GPUs that it is to run on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from weft.architectures.kv import kv_bytes
from weft.architectures.place import Place, Span
from weft.architectures.shape import ModelShape
from weft.formats.precision import WeightBytes, similar_layers, sum_by_kind
from weft.plan.places import column_unit, cut_places
from weft.planner.partition import Stage, partition


class Seat(msgspec.Struct, frozen=True):
    """One rank's GPU, as far as it matters here: bytes that weights and KV may take, and bytes read per second."""

    usable: float
    bandwidth: float


def read_bytes(shape: ModelShape, held: WeightBytes) -> float:
    """Bytes of weights that one token goes through: all but the table that it is looked up in, and of the experts
    those that its router chooses. A tied head reads the table."""
    chosen = shape.experts.top_k / shape.experts.count if shape.experts else 0.0
    head = held.embedding if shape.tied and not held.head else held.head
    return held.linear + held.others + held.expert * chosen + head


def stage_layers(
    shape: ModelShape,
    precision: str,
    kv_dtype: str,
    tokens: int,
    tensor_weights: Sequence[float],
    stages: Sequence[Sequence[Seat]],
    *,
    expert_group: tuple[int, int] | None = None,
    by_room: bool = False,
) -> tuple[int, ...] | None:
    """Layers per stage so that every rank has the room for its weights and the KV of `tokens` tokens, and the
    stage that takes longest for a token takes as little as can be; with `by_room` the stage that is fullest is
    as little full as can be. None where there is not enough room, or fewer layers than stages. `precision` as
    `canonical` or `as_held` of `formats.precision` gives it; `expert_group` is that of `plan.places`.
    """
    ranks = tuple(cut_places(shape, tensor_weights, [shape.layers], expert_group, column_unit(shape, precision)))
    by_rank = [_layers(shape, precision, kv_dtype, tokens, rank) for rank in ranks]
    sizes, work = by_rank[0]
    # Of a stage its tightest and its slowest rank count. All are told in terms of the first rank's bytes.
    scale = [sum(sizes) / sum(other) for other, _ in by_rank]
    ends = [_ends(shape, precision, rank) for rank in ranks]
    found = []
    for number, seats in enumerate(stages):
        held = ends[0][0] * (number == 0) + ends[0][1] * (number == len(stages) - 1)
        room = min(seat.usable * by for seat, by in zip(seats, scale, strict=True))
        speed = min(seat.bandwidth * by for seat, by in zip(seats, scale, strict=True))
        if by_room:
            found.append(Stage(speed=max(room, 1.0), room=room, work=held, size=held))
        else:
            read = ends[0][1] if number == len(stages) - 1 else 0.0
            found.append(Stage(speed=speed, room=room, work=read, size=held))
    return partition(sizes if by_room else work, sizes, found)


@lru_cache(maxsize=1024)
def _layers(
    shape: ModelShape, precision: str, kv_dtype: str, tokens: int, rank: Place
) -> tuple[list[float], list[float]]:
    """Of each layer on a rank: the bytes that it takes, and those of its weights that a token goes through."""
    sizes, work = [], []
    known: dict[object, tuple[float, float]] = {}
    for layer in range(shape.layers):
        kind = similar_layers(shape, precision)[layer], shape.window(layer)
        if kind not in known:
            place = msgspec.structs.replace(rank, layers=Span(layer, layer + 1), stage=1, stages=3)
            held = sum_by_kind(shape, precision, place)
            known[kind] = held.total + kv_bytes(shape, tokens, kv_dtype, place), read_bytes(shape, held)
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
