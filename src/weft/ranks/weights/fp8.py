"""FP8 matrices of a checkpoint, read number by number; scales are repeated for each row. Layouts:
`checkpoint.quantised.fp8`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.checkpoint.architectures.place import Span
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.packed import Packed
from weft.checkpoint.quantised.schemes import ALL_SCHEMES
from weft.errors import ModelError
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.weights.finite import check_finite
from weft.ranks.weights.stored import DENSE, StoredWeights, map_bytes, rows_at_once, view_bytes

NOT_A_NUMBER = 127  # the bits of E4M3's NaN, without its sign


class Fp8Weights(StoredWeights):
    """A `WeightSource` of safetensors files with FP8 matrices."""

    def read_range(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        info = self.tensors[source]
        if not isinstance(info, Packed):
            super().read_range(source, rows, cols, into)
            return
        cols = cols or Span(0, info.dims[1])
        for chunk, at in _row_chunks(info, rows, into.device):
            numbers = _read_numbers(info, source, chunk, cols).to(into.device)
            scales = _scales(info, chunk, cols, info.group).to(into.device)
            column = torch.arange(cols.start, cols.stop, device=into.device)
            group = column // info.group - cols.start // info.group
            weight = numbers.view(torch.float8_e4m3fn).float().mul_(scales[:, group])
            into[at : at + len(chunk)].copy_(weight)

    def holds(self, source: str, scheme: str) -> bool:
        info = self.tensors[source]
        if not isinstance(info, Packed):
            return super().holds(source, scheme)
        held = ALL_SCHEMES[scheme]
        return held.lowest == "fp8" and info.group % held.group == 0

    def read_blocks(self, source: str, rows: Span, cols: Span, into: QuantisedWeight) -> bool:
        info = self.tensors[source]
        if not isinstance(info, Packed):
            return super().read_blocks(source, rows, cols, into)
        if not self.holds(source, into.type):
            return False
        for chunk, at in _row_chunks(info, rows, into.device):
            part = into.narrow(0, at, len(chunk))
            part.values.copy_(_read_numbers(info, source, chunk, cols))
            part.scales.copy_(_scales(info, chunk, cols, into.scheme.group))
        return True


def _row_chunks(info: Packed, rows: Span, device: torch.device) -> Iterator[tuple[Span, int]]:
    """Cut `rows` into chunks of a good size for the device, each with the number of rows before it."""
    step = rows_at_once(device, info.dims[1], 0)
    for row in range(rows.start, rows.stop, step):
        yield Span(row, min(row + step, rows.stop)), row - rows.start


def _read_numbers(info: Packed, source: str, rows: Span, cols: Span) -> torch.Tensor:
    """Bits of the numbers: [rows, cols] uint8, on the CPU. Raises ModelError for a value that is no number."""
    width, (first, last) = info.dims[1], _file_rows(info, rows)
    data = map_bytes(info.values, first * width, (last - first) * width)
    numbers = data.view(last - first, width)[:: info.step, cols.start : cols.stop]
    if numbers.bitwise_and(NOT_A_NUMBER).eq(NOT_A_NUMBER).any():
        raise ModelError(f"{info.file}: tensor {source} has a NaN; fetch it again", code="weight-not-a-number")
    return numbers


def _file_rows(info: Packed, rows: Span) -> tuple[int, int]:
    """The first row of the file that some rows of a matrix are, and the one after the last."""
    return info.first + rows.start * info.step, info.first + (rows.stop - 1) * info.step + 1


def _scales(info: Packed, rows: Span, cols: Span, group: int) -> torch.Tensor:
    """Scales of the groups of `group` columns that hold these columns, row by row: [rows, groups] float32."""
    stored = _read_scales(info.scales)
    numbers = torch.arange(rows.start, rows.stop) * info.step + info.first
    first = torch.arange(cols.start // group, -(-cols.stop // group)) * group
    scales = stored[(numbers // info.rows)[:, None], (first // info.group)[None, :]]
    return check_finite(scales)


def _read_scales(info: TensorInfo) -> torch.Tensor:
    """All scales of a matrix: [blocks of rows, blocks of columns] float32."""
    data = map_bytes(info, 0, info.nbytes)
    if info.type == "F8_E8M0":
        numbers = torch.exp2(data.float() - 127)
    else:
        numbers = view_bytes(data, DENSE[info.type]).float()
    return numbers.view(info.dims[0], -1)
