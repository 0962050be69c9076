"""Reader of bitsandbytes' 4-bit (nf4, fp4) matrices: 4-bit codes into a table of 16 values, times a scale per block.

Layout: `checkpoint.quantised.bitsandbytes`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.checkpoint.architectures.place import Span
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.bitsandbytes import TablePacked
from weft.checkpoint.quantised.schemes import TABLES
from weft.errors import ModelError
from weft.ranks.quant.quantised import QuantisedWeight, pack_nibbles
from weft.ranks.weights.finite import check_finite
from weft.ranks.weights.stored import StoredWeights, map_bytes, rows_at_once, view_bytes

TABLE_TOLERANCE = 1e-3  # absolute; some old files round the table to four digits


class BitsAndBytesWeights(StoredWeights):
    """A `WeightSource` of safetensors files with 4-bit matrices of bitsandbytes."""

    def read_range(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        info = self.tensors[source]
        if not isinstance(info, TablePacked):
            super().read_range(source, rows, cols, into)
            return
        _check_table(info, source)
        cols = cols or Span(0, info.dims[1])
        table = torch.tensor(TABLES[info.state.quant_type], device=into.device)
        for row_span, offset in _row_chunks(info, rows, into.device):
            codes = _codes(info, row_span, cols).to(into.device)
            scales = _scales(info, row_span, torch.arange(cols.start, cols.stop)).to(into.device)
            into[offset : offset + len(row_span)].copy_(table.take(codes.long()).mul_(scales))

    def holds(self, source: str, scheme: str) -> bool:
        info = self.tensors[source]
        return info.type == scheme if isinstance(info, TablePacked) else super().holds(source, scheme)

    def read_blocks(self, source: str, rows: Span, cols: Span, into: QuantisedWeight) -> bool:
        info = self.tensors[source]
        if not isinstance(info, TablePacked):
            return super().read_blocks(source, rows, cols, into)
        if not self.holds(source, into.type):
            return False
        _check_table(info, source)
        group_starts = torch.arange(cols.start // info.group, -(-cols.stop // info.group)) * info.group
        for row_span, offset in _row_chunks(info, rows, into.device):
            part = into.narrow(0, offset, len(row_span))
            part.values.copy_(pack_nibbles(_codes(info, row_span, cols).to(into.device)))
            part.scales.copy_(_scales(info, row_span, group_starts))
        return True


def _row_chunks(info: TablePacked, rows: Span, device: torch.device) -> Iterator[tuple[Span, int]]:
    """Cut `rows` into chunks of a good size for the device; yield (rows, their offset within `rows`)."""
    step = rows_at_once(device, info.dims[1], 0)
    for row in range(rows.start, rows.stop, step):
        yield Span(row, min(row + step, rows.stop)), row - rows.start


def _codes(info: TablePacked, rows: Span, cols: Span) -> torch.Tensor:
    """Indices of the table: [rows, cols] uint8, on the CPU."""
    width = info.dims[1]
    first, last = rows.start * width, rows.stop * width
    data = map_bytes(info.values, first // 2, -(-last // 2) - first // 2)
    if width % 2 == 0 and cols.start % 2 == 0 and cols.stop % 2 == 0:
        data = data.view(len(rows), width // 2)[:, cols.start // 2 : cols.stop // 2]
        return torch.stack((data >> 4, data & 15), dim=2).flatten(1)
    codes = torch.stack((data >> 4, data & 15), dim=1).flatten()[first % 2 :][: last - first]
    return codes.view(len(rows), width)[:, cols.start : cols.stop]


def _scales(info: TablePacked, rows: Span, cols: torch.Tensor) -> torch.Tensor:
    """Scale of each of some columns, in some rows: [rows, columns] float32, on the CPU."""
    block = (torch.arange(rows.start, rows.stop)[:, None] * info.dims[1] + cols) // info.state.blocksize
    stored = map_bytes(info.scales, 0, info.scales.nbytes)
    if info.nested_map is None or info.nested_scales is None:
        return check_finite(view_bytes(stored, torch.float32)[block])
    # The whole map: a damaged entry that no scale of these rows uses shows that others may be.
    levels = check_finite(_floats(info.nested_map))
    outer = _floats(info.nested_scales)[block // info.state.nested_blocksize]
    scales = levels[stored[block].long()] * outer + info.state.nested_offset
    return check_finite(scales)


def _floats(info: TensorInfo) -> torch.Tensor:
    return view_bytes(map_bytes(info, 0, info.nbytes), torch.float32)


def _check_table(info: TablePacked, source: str) -> None:
    """Raise ModelError if the file's table differs from the standard table of its quant_type."""
    table = torch.tensor(TABLES[info.state.quant_type])
    if not torch.allclose(_floats(info.table), table, atol=TABLE_TOLERANCE, rtol=0):
        raise ModelError(
            f"{info.table.file}: tensor {source}.quant_map is not the table of {info.state.quant_type}; fetch it again",
            code="other-table",
        )
