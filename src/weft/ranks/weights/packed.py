"""Packed matrices of GPTQ, AWQ and compressed-tensors, read bit for bit. Layouts: `checkpoint.quantised.packed`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from weft.checkpoint.architectures.place import Span
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.packed import WORD, Packed
from weft.errors import ModelError
from weft.ranks.quant.quantised import QuantisedWeight, pack_nibbles
from weft.ranks.weights.finite import check_finite
from weft.ranks.weights.stored import DENSE, StoredWeights, map_bytes, rows_at_once, view_bytes

logger = logging.getLogger("weft")

DTYPES = DENSE | {"I32": torch.int32}
# Offsets of the rows whose numbers share an integer of AWQ, lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class PackedWeights(StoredWeights):
    """A `WeightSource` of safetensors files with packed matrices."""

    warned = False  # that scales are rounded to float16

    def read_range(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        info = self.tensors[source]
        if not isinstance(info, Packed):
            super().read_range(source, rows, cols, into)
            return
        cols = cols or Span(0, info.dims[1])
        for chunk, at in _row_chunks(info, rows, into.device):
            q, zeros = _numbers(info, chunk, cols, into.device).float(), _zeros(info, chunk, cols, into.device)
            scales, group = _scales(info, chunk, cols).to(into.device).float(), _group_of(info, cols, into.device)
            into[at : at + len(chunk)].copy_(q.sub_(zeros.float()[:, group]).mul_(scales[:, group]))

    def holds(self, source: str, scheme: str) -> bool:
        info = self.tensors[source]
        return info.type == scheme if isinstance(info, Packed) else super().holds(source, scheme)

    def read_blocks(self, source: str, rows: Span, cols: Span, into: QuantisedWeight) -> bool:
        info = self.tensors[source]
        if not isinstance(info, Packed):
            return super().read_blocks(source, rows, cols, into)
        if not self.holds(source, into.type):
            return False
        for chunk, at in _row_chunks(info, rows, into.device):
            part, q = into.narrow(0, at, len(chunk)), _numbers(info, chunk, cols, into.device)
            part.values.copy_(pack_nibbles(q) if info.bits == 4 else q)
            part.scales.copy_(self._round_scales(source, _scales(info, chunk, cols)))
            zeros = _zeros(info, chunk, cols, into.device)
            if part.lowest is not None:
                part.lowest.copy_(zeros)
            elif (zeros != 1 << info.bits - 1).any():
                raise ModelError(
                    f"{info.file}: the zero points of {source} are not all {1 << info.bits - 1}, as they are where "
                    "weights are quantised symmetrically, which config.json says; set sym to false there",
                    code="uneven-zero-points",
                )
        return True

    def _round_scales(self, source: str, scales: torch.Tensor) -> torch.Tensor:
        """Convert scales to float16, without loss for bfloat16 unless they are tiny.

        Logs one warning if some are rounded. Raises ModelError for a scale beyond the range of float16.
        """
        half = scales.half()
        if scales.dtype == torch.float16 or torch.equal(half.to(scales.dtype), scales):
            return half
        if not half.isfinite().all():
            raise ModelError(
                f"{self.tensors[source].file}: a scale of {source} is {scales.abs().max():g}, and Weft holds them in "
                "float16, up to 65,504; give --quantization none",
                code="scale-beyond-float16",
            )
        if not self.warned:
            self.warned = True
            exact = scales.float()
            error = ((half.float() - exact).abs() / exact.abs().clamp_(min=torch.finfo(torch.float32).tiny)).max()
            logger.warning(
                "Scales are held in float16, which some of %s are not in the file: they are rounded, there by up to "
                "%.2g %% of their size (--quantization none holds the weights in 16 bits instead)",
                source,
                100 * error,
            )
        return half


def _row_chunks(info: Packed, rows: Span, device: torch.device) -> Iterator[tuple[Span, int]]:
    """Cut `rows` into chunks of a good size for the device, each with the number of rows before it."""
    step = rows_at_once(device, info.dims[1], 0)
    for row in range(rows.start, rows.stop, step):
        yield Span(row, min(row + step, rows.stop)), row - rows.start


def _numbers(info: Packed, rows: Span, cols: Span, device: torch.device) -> torch.Tensor:
    """Unpack the quantised numbers: [rows, cols] uint8, unsigned."""
    if info.published.method == "awq":
        return _unpack_rows(info, _words(info.values, cols, _words_of(rows, info.bits)).to(device), rows)
    inside = _words_of(cols, info.bits)
    if info.published.method == "gptq":
        words = _words(info.values, inside, rows).to(device).t()
    else:
        words = _words(info.values, rows, inside).to(device)
    return _unpack_words(words, info.bits)[:, cols.start - inside.start * WORD // info.bits :][:, : len(cols)]


def _zeros(info: Packed, rows: Span, cols: Span, device: torch.device) -> torch.Tensor:
    """Unpack the zero points of the groups that hold these columns: [rows, groups] uint8."""
    groups = _groups(info, cols)
    if info.zeros is None:
        return torch.full((len(rows), len(groups)), 1 << info.bits - 1, dtype=torch.uint8, device=device)
    inside = _words_of(rows, info.bits)
    if info.published.method == "compressed-tensors":
        words = _words(info.zeros, inside, groups).t()
    else:
        words = _words(info.zeros, groups, inside)
    zeros = _unpack_rows(info, words.to(device), rows)
    return zeros.add_(info.published.zero_offset).bitwise_and_((1 << info.bits) - 1)


def _scales(info: Packed, rows: Span, cols: Span) -> torch.Tensor:
    """Scales of the groups that hold these columns: [rows, groups], in the stored dtype. Raises ModelError for NaN."""
    groups = _groups(info, cols)
    by_row = info.published.method == "compressed-tensors"
    scales = _words(info.scales, rows, groups) if by_row else _words(info.scales, groups, rows).t()
    return check_finite(scales)


def _groups(info: Packed, cols: Span) -> Span:
    """Groups that hold these columns; all groups if an act-order checkpoint scatters the columns."""
    if info.order is not None:
        return Span(0, -(-info.dims[1] // info.group))
    return Span(cols.start // info.group, -(-cols.stop // info.group))


def _group_of(info: Packed, cols: Span, device: torch.device) -> torch.Tensor:
    """Index of each column's group among `_groups`: [cols] int64."""
    if info.order is None:
        columns = torch.arange(cols.start, cols.stop, device=device)
        return columns // info.group - cols.start // info.group
    whole = view_bytes(map_bytes(info.order, 0, info.order.nbytes), torch.int32)
    return whole[cols.start : cols.stop].long().to(device)


def _words_of(numbers: Span, bits: int) -> Span:
    """Indices of the 32-bit integers that hold these numbers."""
    per_word = WORD // bits
    return Span(numbers.start // per_word, -(-numbers.stop // per_word))


def _words(info: TensorInfo, first: Span, second: Span) -> torch.Tensor:
    """Read the range [first, second] of a tensor of two dims, in its own dtype."""
    dtype, width = DTYPES[info.type], info.dims[1]
    row_bytes = width * dtype.itemsize
    data = map_bytes(info, first.start * row_bytes, len(first) * row_bytes)
    return view_bytes(data, dtype).view(len(first), width)[:, second.start : second.stop]


def _unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack [n, m] int32 to [n, m * 32 / bits] uint8, the lowest bits of each integer first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)


def _unpack_rows(info: Packed, words: torch.Tensor, rows: Span) -> torch.Tensor:
    """Unpack [n, m] int32 in which several rows share an integer to [rows, n] uint8.

    The first integer of each line of `words` holds the first of `rows`.
    """
    numbers, per_word = words.contiguous().view(torch.uint8).t().contiguous(), WORD // info.bits
    if info.bits == 4:
        octets, order = numbers.unflatten(0, (-1, 4)), AWQ_ORDER if info.published.method == "awq" else range(8)
        numbers = octets.new_empty(len(octets), per_word, words.shape[0])
        for at in range(4):
            torch.bitwise_and(octets[:, at], 15, out=numbers[:, order[2 * at]])
            torch.bitwise_right_shift(octets[:, at], 4, out=numbers[:, order[2 * at + 1]])
        numbers = numbers.flatten(0, 1)
    return numbers[rows.start % per_word :][: len(rows)]
