"""Spread: whole layers over devices in order, by Transformers' words for it.

`balanced` makes the bytes of weights on the fullest device as few as can be; `balanced_low_0` does so without the
first device, which gets only what the others have no room for; `sequential` fills one device after the other. `auto`
is `balanced`, as in Transformers.

Where accelerate (1.15) does otherwise: it counts weights only, and here a device's room is what the engine and one
request leave; it fills each device up to the mean and a quarter more than the largest block, so that the last one gets
less; it keeps the room of the largest layer free on the first device; and it may put a head alone on the last device,
where a stage of a pipeline has a layer at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

import msgspec
from msgspec.structs import replace

from weft.architectures.kv import layer_bytes_per_token
from weft.architectures.place import Span, whole
from weft.architectures.shape import ModelShape
from weft.formats.precision import weight_bytes
from weft.plan.device_map import Spread
from weft.planner.partition import StageBudget, partition_layers


class ModelBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a model: of each layer the weights, and with them the KV of one request (`sizes`); of the embedding on
    a first stage, of norm and head on a last one, and of all of these together where one stage is both (a tied head
    is then the embedding); of what an engine keeps beside them where it samples."""

    weights: Sequence[float]
    sizes: Sequence[float]
    first: float
    last: float
    both: float
    sampling: float = 0.0


def model_bytes(shape: ModelShape, precision: str, kv_dtype: str, tokens: int, *, window_cache: bool) -> ModelBytes:
    """What a model weighs, with requests of `tokens` tokens. With `window_cache` a layer keeps no more of one than its
    window. `precision` as `formats.precision.canonical` gives it."""
    place, nothing = whole(shape), Span(0, 0)
    layers = [
        weight_bytes(shape, precision, replace(place, layers=Span(layer, layer + 1), stage=1, stages=3))
        for layer in range(shape.layers)
    ]
    each = layer_bytes_per_token(shape, kv_dtype)
    kept = [min(tokens, (window_cache and shape.window(layer)) or tokens) for layer in range(shape.layers)]
    ends = [replace(place, layers=nothing, stage=stage, stages=2) for stage in range(2)]
    first, last = (weight_bytes(shape, precision, end) for end in ends)
    return ModelBytes(
        weights=layers,
        sizes=[weights + each * count for weights, count in zip(layers, kept, strict=True)],
        first=first,
        last=last,
        both=weight_bytes(shape, precision, replace(place, layers=nothing)),
    )


def balance_layers(load: ModelBytes, rooms: Sequence[float], mode: Spread) -> tuple[int, ...]:
    """Layers on each device, 0 on one that is left out; `rooms` are what each can hold, in bytes.

    Where there is not enough room it is what comes closest: the devices' footprint then says what is missing.
    """
    if mode == "sequential":
        return sequential(load, rooms)
    if mode == "balanced_low_0" and len(rooms) > 1:
        return balanced_low_0(load, rooms)
    return balanced(load, rooms)


def balanced(load: ModelBytes, rooms: Sequence[float]) -> tuple[int, ...]:
    """As even as whole layers allow, on every device that has the room for one, as far as there are layers."""
    found = _evenly(load, rooms, load.first) or _evenly(load, [inf] * len(rooms), load.first)
    assert found is not None, "there is room for everything"
    return found


def balanced_low_0(load: ModelBytes, rooms: Sequence[float]) -> tuple[int, ...]:
    """The fewest layers on the first device with which the others have room for the rest."""
    others = rooms[1:]
    found = _evenly(load, others, load.first)
    if found:
        return (0, *found)
    sizes = [0.0, *accumulate(load.sizes)]
    for count in range(1, len(load.sizes)):
        if load.first + sizes[count] > rooms[0]:
            break
        rest = _evenly(replace(load, weights=load.weights[count:], sizes=load.sizes[count:]), others, 0.0)
        if rest:
            return (count, *rest)
    return balanced(load, rooms)


def sequential(load: ModelBytes, rooms: Sequence[float]) -> tuple[int, ...]:
    """As much on each device as it has room for; a device without the room for a layer is left out."""
    sizes, layers = [0.0, *accumulate(load.sizes)], len(load.sizes)
    found: list[int] = []
    at = 0
    for number, room in enumerate(rooms):
        last = number == len(rooms) - 1
        ends = (load.last if at else load.both) + load.sampling
        if at < layers and (last or sizes[layers] - sizes[at] + ends <= room):
            found.append(layers - at)
        else:
            held = 0.0 if at else load.first
            # The head stays with the last layer.
            most = layers - 1
            fits = [end for end in range(at, most + 1) if held + sizes[end] - sizes[at] <= room]
            found.append((fits[-1] if fits else at) - at if at < layers else 0)
        at += found[-1]
    return tuple(found)


def _evenly(load: ModelBytes, rooms: Sequence[float], first: float) -> tuple[int, ...] | None:
    """Layers on each device, with those left out that have the least room, as many as have to be; None where there is
    not enough of it. `first` are the bytes of an embedding on the first of them."""
    used = list(range(len(rooms)))
    while used:
        # There are none for more devices than layers.
        found = _stages(load, [rooms[number] for number in used], first)
        if found:
            layers = dict(zip(used, found, strict=True))
            return tuple(layers.get(number, 0) for number in range(len(rooms)))
        used.remove(min(used, key=lambda number: (rooms[number], -number)))
    return None


def _stages(load: ModelBytes, rooms: Sequence[float], first: float) -> tuple[int, ...] | None:
    """The same with a layer on each of the devices."""
    if len(rooms) == 1:
        ends = (load.both if first else load.last) + load.sampling
        return (len(load.sizes),) if sum(load.sizes) + ends <= rooms[0] else None
    stages = []
    for number, room in enumerate(rooms):
        end = number == len(rooms) - 1
        held = first * (number == 0) + load.last * end
        stages.append(StageBudget(speed=1.0, room=room, work=held, size=held + load.sampling * end))
    return partition_layers(load.weights, load.sizes, stages)
