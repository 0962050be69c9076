"""Whole layers over devices in order, by Transformers' strategies for `device_map`.

`balanced` makes the bytes of weights on the fullest device as few as possible. `balanced_low_0` does so without the
first device, which gets only the layers that the others have no room for. `sequential` fills one device after another.
`auto` is `balanced`, as in Transformers.

accelerate (1.15) differs: it counts weights only, while here a device's room is what the engine and one request leave.
It fills each device up to the mean and a quarter more than the largest block, so that the last device gets less. It
keeps room for the largest layer free on the first device. It may put a head alone on the last device, while a stage of
a pipeline has at least one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

import msgspec
from msgspec.structs import replace

from weft.checkpoint.architectures.kv import kv_specs
from weft.checkpoint.architectures.place import Span, whole
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.quantised.precision import weight_bytes
from weft.plan.device_map import Spread
from weft.planner.search.partition import StageBudget, partition_layers


class ModelBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a model by part.

    `weights` are the bytes of each layer's weights, `sizes` with the KV of one request added. `first` is the embedding
    of a first stage, `last` the norm and head of a last one. `both` is all of these if one stage is first and last (a
    tied head is then the embedding). `sampling` is what an engine holds in addition on the rank that samples.
    """

    weights: Sequence[float]
    sizes: Sequence[float]
    first: float
    last: float
    both: float
    sampling: float = 0.0


def model_bytes(shape: ModelShape, precision: str, kv_dtype: str, tokens: int, *, window_cache: bool) -> ModelBytes:
    """Bytes of a model with requests of `tokens` tokens.

    With `window_cache` a layer keeps at most its window. `precision` is a result of
    `checkpoint.quantised.precision.canonical`.
    """
    place, nothing = whole(shape), Span(0, 0)
    layers = [
        weight_bytes(shape, precision, replace(place, layers=Span(layer, layer + 1), stage=1, stages=3))
        for layer in range(len(shape.layers))
    ]
    sizes = [spec.bytes_per_token for spec in kv_specs(shape, kv_dtype).values()]
    kept = [min(tokens, (window_cache and shape.layers[layer].window) or tokens) for layer in range(len(shape.layers))]
    ends = [replace(place, layers=nothing, stage=stage, stages=2) for stage in range(2)]
    first, last = (weight_bytes(shape, precision, end) for end in ends)
    return ModelBytes(
        weights=layers,
        sizes=[held + size * count for held, size, count in zip(layers, sizes, kept, strict=True)],
        first=first,
        last=last,
        both=weight_bytes(shape, precision, replace(place, layers=nothing)),
    )


def balance_layers(model: ModelBytes, rooms: Sequence[float], strategy: Spread) -> tuple[int, ...]:
    """Layers on each device, 0 on one that is left out; `rooms` are the bytes that each can hold.

    If there is not enough room, the result is the closest one: the devices' footprint then says what is missing.
    """
    if strategy == "sequential":
        return sequential(model, rooms)
    if strategy == "balanced_low_0" and len(rooms) > 1:
        return balanced_low_0(model, rooms)
    return balanced(model, rooms)


def balanced(model: ModelBytes, rooms: Sequence[float]) -> tuple[int, ...]:
    """Layers as even as possible, on every device with room for a layer, as far as there are layers."""
    layers = _evenly(model, rooms, model.first) or _evenly(model, [inf] * len(rooms), model.first)
    assert layers is not None, "there is room for everything"
    return layers


def balanced_low_0(model: ModelBytes, rooms: Sequence[float]) -> tuple[int, ...]:
    """The fewest layers on the first device with which the others have room for all other layers."""
    others = rooms[1:]
    without_first = _evenly(model, others, model.first)
    if without_first:
        return (0, *without_first)
    sizes = [0.0, *accumulate(model.sizes)]
    for count in range(1, len(model.sizes)):
        if model.first + sizes[count] > rooms[0]:
            break
        remaining = replace(model, weights=model.weights[count:], sizes=model.sizes[count:])
        on_others = _evenly(remaining, others, 0.0)
        if on_others:
            return (count, *on_others)
    return balanced(model, rooms)


def sequential(model: ModelBytes, rooms: Sequence[float]) -> tuple[int, ...]:
    """The layers that each device has room for; a device without room for a layer is left out."""
    counts: list[int] = []
    start = 0
    for number, room in enumerate(rooms):
        counts.append(_sequential_count(model, start, room, last=number == len(rooms) - 1))
        start += counts[-1]
    return tuple(counts)


def _sequential_count(model: ModelBytes, start: int, room: float, *, last: bool) -> int:
    """Number of layers from layer `start` on for a device with this room; the last device takes all that are left."""
    layers = len(model.sizes)
    if start == layers:
        return 0
    sizes = [0.0, *accumulate(model.sizes)]
    ends = (model.last if start else model.both) + model.sampling
    if last or sizes[layers] - sizes[start] + ends <= room:
        return layers - start
    held = 0.0 if start else model.first
    # The head stays with the last layer.
    fitting = [end for end in range(start, layers) if held + sizes[end] - sizes[start] <= room]
    return fitting[-1] - start if fitting else 0


def _evenly(model: ModelBytes, rooms: Sequence[float], first: float) -> tuple[int, ...] | None:
    """Layers on each device, without the devices that have the least room, as many of them as necessary.

    `first` are the bytes of an embedding on the first device used. None if there is not enough room.
    """
    used = list(range(len(rooms)))
    while used:
        # None for more devices than layers, too.
        counts = _one_stage_each(model, [rooms[number] for number in used], first)
        if counts:
            layers = dict(zip(used, counts, strict=True))
            return tuple(layers.get(number, 0) for number in range(len(rooms)))
        used.remove(min(used, key=lambda number: (rooms[number], -number)))
    return None


def _one_stage_each(model: ModelBytes, rooms: Sequence[float], first: float) -> tuple[int, ...] | None:
    """Layers on each device, at least one on each, or None."""
    if len(rooms) == 1:
        ends = (model.both if first else model.last) + model.sampling
        return (len(model.sizes),) if sum(model.sizes) + ends <= rooms[0] else None
    stages = []
    for number, room in enumerate(rooms):
        end = number == len(rooms) - 1
        held = first * (number == 0) + model.last * end
        stages.append(StageBudget(speed=1.0, room=room, work=held, size=held + model.sampling * end))
    return partition_layers(model.weights, model.sizes, stages)
