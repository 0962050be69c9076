"""Fills: the pieces of checkpoint tensors that make up one rank's parameters, and the bytes of those parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import msgspec

from weft.checkpoint.architectures.parameters import Parameter, Part, parameter_dims, rank_parameters
from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.architectures.shape import DTYPE_BYTES, ModelShape
from weft.checkpoint.quantised.schemes import ALL_SCHEMES


class Fill(msgspec.Struct, frozen=True):
    """One copy: source[rows, cols] to parameter `param`, from its row `at` on; cols None: one-dimensional.

    `expert` is the block to copy to of a parameter with several experts. `unit` is the number of rows that are read
    together: of a head, whose rows a file may interleave.
    """

    param: str
    source: str
    rows: Span
    cols: Span | None
    at: int
    expert: int | None = None
    unit: int = 1

    @property
    def weight(self) -> str:
        """Name of the parameter; of one expert's block of it, with the expert's index on this rank behind it."""
        return self.param if self.expert is None else f"{self.param}.{self.expert}"


def rank_fills(shape: ModelShape, place: Place) -> Iterator[Fill]:
    """Yield all that a rank reads of a checkpoint, and nothing else, in the order of its parameters."""
    for name, parameter, layer in rank_parameters(shape, place):
        experts = range(place.experts.start, place.experts.stop) if parameter.role == "expert" else (None,)
        for expert in experts:
            at = 0
            for part in parameter.parts:
                rows = part.rows.owned(place)
                fill = _part_fill(place, name, part, layer, expert, rows, at)
                yield from rotated_fills(fill, part.rows.size, part.rotated)
                at += len(rows)


def rotated_fills(fill: Fill, head_dim: int, rotated: float) -> Iterator[Fill]:
    """Yield a fill of whole heads, of whose rows a share is rotated, as the fills that order them as `Part` says.

    The rotated rows of a head lie together in the checkpoint, before the others: here half of both begins each half of
    the head.
    """
    if rotated == 1:
        yield fill
        return
    turned = int(head_dim * rotated) // 2
    kept = head_dim // 2 - turned
    # (first row in the checkpoint's head, first row in the engine's, number of rows)
    pieces = (
        (0, 0, turned),
        (turned, head_dim // 2, turned),
        (2 * turned, turned, kept),
        (2 * turned + kept, head_dim // 2 + turned, kept),
    )
    for head in range(0, len(fill.rows), head_dim):
        for begin, into, count in pieces:
            first = fill.rows.start + head + begin
            yield msgspec.structs.replace(fill, rows=Span(first, first + count), at=fill.at + head + into)


def _part_fill(place: Place, name: str, part: Part, layer: int | None, expert: int | None, rows: Span, at: int) -> Fill:
    before = sum(axis.length for axis in part.after)
    return Fill(
        name,
        part.source.format(layer=layer, expert=expert),
        rows.shifted(before),
        None if part.cols is None else part.cols.owned(place),
        at,
        expert=None if expert is None else expert - place.experts.start,
        unit=part.rows.size,
    )


def checkpoint_scheme(parameter: Parameter, layer: int | None, schemes: Mapping[str, str]) -> str | None:
    """Scheme of a parameter, given the schemes of the checkpoint's tensors; None if it is not quantised.

    All parts of a parameter have the same scheme, so its first tensor decides.
    """
    return schemes.get(parameter.parts[0].source.format(layer=layer, expert=0))


def rank_weight_bytes(shape: ModelShape, place: Place, dtype: str, schemes: Mapping[str, str] | None = None) -> int:
    """Bytes of a rank's parameters: tensors that `schemes` names in that scheme, all others in `dtype`."""
    total = 0
    for _, parameter, layer in rank_parameters(shape, place):
        dims, scheme, cols = parameter_dims(place, parameter), None, parameter.parts[0].cols
        if schemes and cols is not None:
            scheme = checkpoint_scheme(parameter, layer, schemes)
        if scheme is None or cols is None:
            total += DTYPE_BYTES[parameter.dtype or dtype] * prod(dims)
        else:
            total += ALL_SCHEMES[scheme].nbytes(prod(dims[:-1]), cols.owned(place))
    return total
