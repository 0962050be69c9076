"""Quantised parameters from a checkpoint: blocks of a GGUF file number by number, everything else rounded as it is
read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from weft.checkpoint.architectures.place import Span
from weft.checkpoint.files.tensor import ENCODINGS
from weft.checkpoint.quantised.schemes import NESTED_BYTES, NESTED_HALVES, UNIT
from weft.errors import ModelError
from weft.ranks.quant.quantised import QuantisedWeight, pack_nibbles
from weft.ranks.quant.rounding import Rounding, round_into
from weft.ranks.weights.blocks import MXFP4_NAN, block_numbers, zero_point
from weft.ranks.weights.finite import check_finite

# Elements that are read before they are rounded. A CPU takes as many as a core's cache has room for, a GPU as many as
# there is memory for in each thread that reads, since fewer launches are faster.
BAND, GPU_BAND = 1 << 19, 1 << 24

ReadRange = Callable[[Span, Span, torch.Tensor], None]  # copies rows and columns of a matrix into a tensor


def unpack_blocks(data: torch.Tensor, type: str, first: int, into: QuantisedWeight) -> None:
    """Convert GGUF blocks to `into`, whose scheme can represent their type.

    `data` [rows, bytes] uint8 has whole blocks of `type` in each row, of which the columns from `first` on are taken.
    Scales and minima that the blocks hold as products of two numbers are rounded to float16: by 1 / 4096 of their value
    at most, or 3e-8 below 6e-5. Raises ModelError for a number beyond float16.
    """
    q, scale, lowest = block_numbers(data, type)
    q = q.view(len(data), -1)[:, first : first + into.shape[1]]
    into.scales.copy_(_spread(scale, type, first, into))
    if into.lowest is None:
        q = q + (1 << into.scheme.bits - 1) - zero_point(type)
    elif lowest is None:
        into.lowest.copy_(into.scales.float() * -zero_point(type))
    else:
        into.lowest.copy_(_spread(lowest, type, first, into))
    if not all(part.isfinite().all() for part in (into.scales, into.lowest) if part is not None):
        raise ModelError(
            f"a scale of {type} blocks is beyond the 65,504 that 16 bits hold; give --quantization none",
            code="scale-beyond-float16",
        )
    into.values.copy_(pack_nibbles(q) if into.scheme.bits == 4 else q)


def _spread(part: torch.Tensor, type: str, first: int, into: QuantisedWeight) -> torch.Tensor:
    """Repeat the scales of GGUF's groups for the groups of `into`, which may be finer, from column `first` on.

    [blocks, groups of a block, 1] -> [rows, groups of `into`].
    """
    rows, groups = into.scales.shape
    group = ENCODINGS[type].elements // part.shape[1]
    repeated = part.view(rows, -1).repeat_interleave(group // into.scheme.group, dim=1)
    return repeated[:, first // into.scheme.group :][:, :groups]


def split_blocks(blocks: torch.Tensor, into: QuantisedWeight) -> None:
    """Copy blocks [rows, groups, bytes] uint8 whose type is the scheme of `into`.

    The result and the errors are as in `unpack_blocks`. Nothing has to be computed, which takes a twentieth of the
    time.
    """
    if into.scheme.lowest == "nested":
        _split_nested(blocks, into)
        return
    if into.scheme.lowest == "mxfp4":
        exponents = blocks[..., 0]
        check_finite(exponents.float().masked_fill_(exponents == MXFP4_NAN, torch.nan))
        into.scales.copy_(exponents)
        into.values.view(*into.scales.shape, -1).copy_(blocks[..., 1:])
        return
    head = 2 if into.lowest is None else 4
    into.scales.copy_(check_finite(_view_float16(blocks[..., :2])))
    if into.lowest is not None:
        into.lowest.copy_(check_finite(_view_float16(blocks[..., 2:4])))
    values = blocks[..., head:]
    into.values.view(values.shape).copy_(values)
    if into.scheme.bits == 8:
        into.values.bitwise_xor_(128)  # from -128 .. 127 to 0 .. 255


def _split_nested(blocks: torch.Tensor, into: QuantisedWeight) -> None:
    """Copy blocks [rows, groups, 144] uint8 of Q4_K, whose first and last groups may have more columns than `into`."""
    assert into.lowest is not None
    head = 2 * NESTED_HALVES + NESTED_BYTES
    halves = blocks[..., : 2 * NESTED_HALVES].contiguous().view(torch.float16)
    into.scales.copy_(check_finite(halves).flatten(1))
    into.lowest.copy_(blocks[..., 2 * NESTED_HALVES : head].flatten(1))
    # The nibbles of 32 bytes are one UNIT (low) and the next one (high); here the halves of a UNIT share bytes.
    first, second = blocks[..., head:].unflatten(2, (-1, 2, UNIT // 2)).unbind(3)
    units = torch.stack((first & 15 | second << 4, first >> 4 | second & 240), dim=3).flatten(1)
    start = into.lacking // 2
    into.values.copy_(units[:, start : start + into.values.shape[1]])


def quantise(
    read_range: ReadRange,
    rows: Span,
    cols: Span,
    width: int,
    unit: int,
    into: QuantisedWeight,
    dtype: torch.dtype = torch.float32,
    rounding: Rounding = round_into,
    importance: torch.Tensor | None = None,
) -> None:
    """Read rows and columns of a matrix and round them to the scheme of `into`.

    The matrix is `width` columns wide and is read in `dtype`; its rows may be interleaved heads of `unit` rows.
    Groups that are cut are read whole: every rank that has some of a group finds the same scale. `importance` of the
    columns is for schemes whose groups are never cut.
    """
    group = into.scheme.group
    whole = Span(cols.start - into.lacking, min(-(-cols.stop // group) * group, width))
    assert importance is None or len(importance) == len(whole)
    for band in row_bands(rows, len(whole), unit, into.device):
        weight = torch.empty(len(band), len(whole), dtype=dtype, device=into.device)
        read_range(band, whole, weight)
        rounding(weight, into.narrow(0, band.start - rows.start, len(band)), importance)


def row_bands(rows: Span, width: int, unit: int, device: torch.device) -> Iterator[Span]:
    """Cut rows of `width` elements into bands that are read and rounded at once on the device.

    A band holds whole heads of `unit` rows, which may be interleaved.
    """
    elements = BAND if device.type == "cpu" else GPU_BAND
    step = max(1, elements // width // unit) * unit
    for row in range(rows.start, rows.stop, step):
        yield Span(row, min(row + step, rows.stop))


def _view_float16(pairs: torch.Tensor) -> torch.Tensor:
    """View [..., 2] bytes as [...] float16."""
    return pairs.contiguous().view(torch.float16)[..., 0]
