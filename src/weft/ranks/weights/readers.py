"""Readers of quantised matrices, number by number, by the layout that published formats store a matrix in.

Layouts: the classes of `checkpoint.quantised.layouts`, `checkpoint.quantised.formats.mxfp4` and
`checkpoint.quantised.formats.bitsandbytes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from weft.checkpoint.architectures.place import Span
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.formats.bitsandbytes import PackedTable
from weft.checkpoint.quantised.formats.mxfp4 import BLOCK, PackedBlocks
from weft.checkpoint.quantised.layouts.byte_numbers import PackedBytes
from weft.checkpoint.quantised.layouts.words import WORD, PackedWords
from weft.checkpoint.quantised.packed import Packed
from weft.checkpoint.quantised.schemes import TABLES
from weft.errors import ModelError
from weft.ranks.weights.blocks import MXFP4_NAN
from weft.ranks.weights.finite import check_finite
from weft.ranks.weights.stored import DENSE, map_bytes, view_bytes

DTYPES = DENSE | {"I32": torch.int32}
TABLE_TOLERANCE = 1e-3  # absolute; some old files round bitsandbytes' tables to four digits
NOT_A_NUMBER = 127  # the bits of E4M3's NaN, without its sign


class Range(NamedTuple):
    """A range of the matrix `source` to be read to a device, with a scale for each `group` columns."""

    source: str
    rows: Span
    cols: Span
    group: int
    device: torch.device

    def group_starts(self) -> torch.Tensor:
        """The first column of each group that holds some of the columns."""
        return torch.arange(self.cols.start // self.group, -(-self.cols.stop // self.group)) * self.group

    def column_groups(self) -> torch.Tensor:
        """The group of each column, among the groups of the range: [cols] int64."""
        columns = torch.arange(self.cols.start, self.cols.stop, device=self.device)
        return columns // self.group - self.cols.start // self.group


class StoredRange(NamedTuple):
    """A range of a matrix as a scheme holds it, but for the sign of signed integers.

    `numbers` are [rows, cols] uint8 on the device, `scales` and `zeros` (None: in the middle of the range) [rows,
    groups]. `order` is the group of each column, if a group's columns lie apart.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None


def _read_words(info: PackedWords, part: Range) -> StoredRange:
    """Numbers, scales and zero points."""
    groups, order = Span(part.cols.start // info.group, -(-part.cols.stop // info.group)), None
    if info.order is not None:
        groups = Span(0, -(-info.dims[1] // info.group))
        whole = view_bytes(map_bytes(info.order, 0, info.order.nbytes), torch.int32)
        order = whole[part.cols.start : part.cols.stop].long().to(part.device)
    scales = check_finite(_read_tensor(info, info.scales, part.rows, groups))
    return StoredRange(_word_numbers(info, part), scales, _word_zeros(info, part, groups), order)


def _word_numbers(info: PackedWords, part: Range) -> torch.Tensor:
    """Unpack the quantised numbers: [rows, cols] uint8, unsigned."""
    if info.layout.packs_rows:
        words = _read_tensor(info, info.values, _words_of(part.rows, info.bits), part.cols)
        return _unpack_rows(info, words.to(part.device), part.rows)
    inside = _words_of(part.cols, info.bits)
    words = _read_tensor(info, info.values, part.rows, inside).to(part.device)
    return _unpack(words, info.bits)[:, part.cols.start - inside.start * WORD // info.bits :][:, : len(part.cols)]


def _word_zeros(info: PackedWords, part: Range, groups: Span) -> torch.Tensor | None:
    """Unpack the zero points of some groups: [rows, groups] uint8."""
    if info.zeros is None:
        return None
    words = _read_tensor(info, info.zeros, _words_of(part.rows, info.bits), groups)
    zeros = _unpack_rows(info, words.to(part.device), part.rows)
    return zeros.add_(info.zero_offset).bitwise_and_((1 << info.bits) - 1)


def _words_of(numbers: Span, bits: int) -> Span:
    """Indices of the 32-bit integers that hold these numbers."""
    per_word = WORD // bits
    return Span(numbers.start // per_word, -(-numbers.stop // per_word))


def _read_tensor(info: PackedWords, tensor: TensorInfo, rows: Span, cols: Span) -> torch.Tensor:
    """Read a range [rows, cols] of a matrix's tensor, in its own dtype."""
    first, second = (cols, rows) if info.layout.turned else (rows, cols)
    dtype, width = DTYPES[tensor.type], tensor.dims[1]
    row_bytes = width * dtype.itemsize
    data = map_bytes(tensor, first.start * row_bytes, len(first) * row_bytes)
    numbers = view_bytes(data, dtype).view(len(first), width)[:, second.start : second.stop]
    return numbers.t() if info.layout.turned else numbers


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack [n, m] int32 to [n, m * 32 / bits] uint8, the lowest bits of each integer first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)


def _unpack_rows(info: PackedWords, words: torch.Tensor, rows: Span) -> torch.Tensor:
    """Unpack [m, n] int32 in which several rows share an integer to [rows, n] uint8.

    The first line of `words` holds the first of `rows`.
    """
    numbers, per_word = words.t().contiguous().view(torch.uint8).t().contiguous(), WORD // info.bits
    if info.bits == 4:
        octets, order = numbers.unflatten(0, (-1, 4)), info.layout.nibbles
        numbers = octets.new_empty(len(octets), per_word, words.shape[1])
        for at in range(4):
            torch.bitwise_and(octets[:, at], 15, out=numbers[:, order[2 * at]])
            torch.bitwise_right_shift(octets[:, at], 4, out=numbers[:, order[2 * at + 1]])
        numbers = numbers.flatten(0, 1)
    return numbers[rows.start % per_word :][: len(rows)]


def _read_bytes(info: PackedBytes, part: Range) -> StoredRange:
    """FP8 numbers or signed integers, as they are. Raises ModelError for an FP8 value that is no number."""
    numbers = _read_rows(info, info.values, part.rows)[:, part.cols.start : part.cols.stop]
    if info.numbers == "fp8" and numbers.bitwise_and(NOT_A_NUMBER).eq(NOT_A_NUMBER).any():
        raise ModelError(f"{info.file}: tensor {part.source} has a NaN; fetch it again", code="weight-not-a-number")
    file_rows = torch.arange(part.rows.start, part.rows.stop) * info.step + info.first
    scales = _read_scales(info.scales)[(file_rows // info.rows)[:, None], part.group_starts()[None, :] // info.group]
    return StoredRange(numbers.to(part.device), check_finite(scales) / info.divisor)


def _read_scales(info: TensorInfo) -> torch.Tensor:
    """All scales of a matrix: [blocks of rows, blocks of columns] float32."""
    data = map_bytes(info, 0, info.nbytes)
    if info.type == "F8_E8M0":
        numbers = torch.exp2(data.float() - 127)
    else:
        numbers = view_bytes(data, DENSE[info.type]).float()
    return numbers.view(info.dims[0], -1)


def _read_blocks(info: PackedBlocks, part: Range) -> StoredRange:
    """Numbers and scale bytes of MXFP4."""
    _, nbytes = BLOCK
    groups = Span(part.cols.start // info.group, -(-part.cols.stop // info.group))
    scales = _read_rows(info, info.scales, part.rows)[:, groups.start : groups.stop]
    check_finite(scales.float().masked_fill_(scales == MXFP4_NAN, torch.nan))
    pairs = _read_rows(info, info.values, part.rows)[:, groups.start * nbytes : groups.stop * nbytes].to(part.device)
    numbers = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
    start = part.cols.start - groups.start * info.group
    return StoredRange(numbers[:, start : start + len(part.cols)], scales)


def _read_rows(info: Packed, part: TensorInfo, rows: Span) -> torch.Tensor:
    """Bytes of some rows of a matrix in its tensor `part`: [rows, bytes] uint8."""
    width = part.nbytes // part.dims[0]
    first, last = rows.start * info.step, rows.stop * info.step
    data = map_bytes(part, first * width, (last - first) * width)
    return data.view(last - first, width)[info.first :: info.step]


def _read_table(info: PackedTable, part: Range) -> StoredRange:
    """Indices of a table, and their scales."""
    _check_table(info, part.source)
    width, rows, cols = info.dims[1], part.rows, part.cols
    first, last = rows.start * width, rows.stop * width
    data = map_bytes(info.values, first // 2, -(-last // 2) - first // 2)
    if width % 2 == 0 and cols.start % 2 == 0 and cols.stop % 2 == 0:
        data = data.view(len(rows), width // 2)[:, cols.start // 2 : cols.stop // 2]
        numbers = torch.stack((data >> 4, data & 15), dim=2).flatten(1)
    else:
        numbers = torch.stack((data >> 4, data & 15), dim=1).flatten()[first % 2 :][: last - first]
        numbers = numbers.view(len(rows), width)[:, cols.start : cols.stop]
    return StoredRange(numbers.to(part.device), _table_scales(info, part))


def _table_scales(info: PackedTable, part: Range) -> torch.Tensor:
    """Scale of each group in some rows: [rows, groups] float32, on the CPU."""
    rows = torch.arange(part.rows.start, part.rows.stop)[:, None]
    block = (rows * info.dims[1] + part.group_starts()) // info.state.blocksize
    stored = map_bytes(info.scales, 0, info.scales.nbytes)
    if info.nested_map is None or info.nested_scales is None:
        return check_finite(view_bytes(stored, torch.float32)[block])
    # The whole map: a damaged entry that no scale of these rows uses shows that others may be.
    levels = check_finite(_floats(info.nested_map))
    outer = _floats(info.nested_scales)[block // info.state.nested_blocksize]
    return check_finite(levels[stored[block].long()] * outer + info.state.nested_offset)


def _floats(info: TensorInfo) -> torch.Tensor:
    return view_bytes(map_bytes(info, 0, info.nbytes), torch.float32)


def _check_table(info: PackedTable, source: str) -> None:
    """Raise ModelError if the file's table differs from the standard table of its quant_type."""
    table = torch.tensor(TABLES[info.state.quant_type])
    if not torch.allclose(_floats(info.table), table, atol=TABLE_TOLERANCE, rtol=0):
        raise ModelError(
            f"{info.table.file}: tensor {source}.quant_map is not the table of {info.state.quant_type}; fetch it again",
            code="other-table",
        )


# The reader of each layout: numbers as its scheme holds them, scales and zero points of a range of a matrix.
READERS: dict[type[Packed], Callable[[Any, Range], StoredRange]] = {
    PackedWords: _read_words,
    PackedBytes: _read_bytes,
    PackedBlocks: _read_blocks,
    PackedTable: _read_table,
}
