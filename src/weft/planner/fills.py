"""Fills: which piece of which checkpoint tensor goes where in one rank's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import msgspec

from weft.facts.parameters import EMBED, Axis, Parameter, axis_length, parameters
from weft.facts.shape import DTYPE_BYTES, ModelShape
from weft.planner.place import Place, Span


class Fill(msgspec.Struct, frozen=True):
    """Copy source[rows, cols] (cols None: one-dimensional) to parameter `param` from its row `at` on."""

    param: str
    source: str
    rows: Span
    cols: Span | None
    at: int


def owned(shape: ModelShape, place: Place, axis: Axis) -> Span:
    """The rank's range of an axis, in elements."""
    match axis:
        case Axis.Q | Axis.KV:
            span: Span = getattr(place, axis.value)
            return span.scaled(shape.head_dim)
        case Axis.FFN | Axis.VOCAB:
            return getattr(place, axis.value)  # type: ignore[no-any-return]
        case _:
            return Span(0, axis_length(shape, axis))


def rank_parameters(shape: ModelShape, place: Place) -> Iterator[tuple[str, Parameter, int | None]]:
    """(name, parameter, layer) of all that a rank holds. A tied head on the embedding's own stage is no
    parameter of its own: the model uses the embedding."""
    table = list(parameters(shape))
    for parameter in table:
        if parameter.where == "embed" and place.first:
            yield parameter.name, parameter, None
    for layer in range(place.layers.start, place.layers.stop):
        for parameter in table:
            if parameter.where == "layer":
                yield parameter.name.format(layer=layer), parameter, layer
    for parameter in table:
        if parameter.where == "head" and place.last and not (place.first and parameter.parts == (EMBED,)):
            yield parameter.name, parameter, None


def parameter_dims(shape: ModelShape, place: Place, parameter: Parameter) -> tuple[int, ...]:
    """The dims of a parameter on this rank: (rows,) or (rows, cols)."""
    rows = sum(len(owned(shape, place, part.rows)) for part in parameter.parts)
    cols = parameter.parts[0].cols
    return (rows,) if cols is None else (rows, len(owned(shape, place, cols)))


def fills(shape: ModelShape, place: Place) -> Iterator[Fill]:
    """Everything that a rank reads, and nothing else, in the order of its parameters."""
    for name, parameter, layer in rank_parameters(shape, place):
        at = 0
        for part in parameter.parts:
            rows = owned(shape, place, part.rows)
            cols = None if part.cols is None else owned(shape, place, part.cols)
            yield Fill(name, part.source.format(layer=layer), rows, cols, at)
            at += len(rows)


def weight_bytes(shape: ModelShape, place: Place, dtype: str) -> int:
    """Bytes of a rank's parameters in `dtype`."""
    return DTYPE_BYTES[dtype] * sum(prod(parameter_dims(shape, place, p)) for _, p, _ in rank_parameters(shape, place))
