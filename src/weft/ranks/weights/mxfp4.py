"""Experts in MXFP4 as gpt-oss publishes them, read bit for bit. Layout: `checkpoint.quantised.packed`."""

from __future__ import annotations

import torch

from weft.checkpoint.architectures.place import Span
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.packed import MXFP4_BLOCK, Packed
from weft.ranks.quant.quantised import QuantisedWeight, pack_nibbles
from weft.ranks.weights.blocks import MXFP4_NAN
from weft.ranks.weights.finite import check_finite
from weft.ranks.weights.stored import StoredWeights, map_bytes, rows_at_once


class Mxfp4Weights(StoredWeights):
    """A `WeightSource` of safetensors files with matrices of experts in MXFP4."""

    def read_range(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        info = self.tensors[source]
        if not isinstance(info, Packed):
            super().read_range(source, rows, cols, into)
            return
        cols, group = cols or Span(0, info.dims[1]), info.group
        whole = Span(cols.start // group * group, -(-cols.stop // group) * group)
        inside = slice(cols.start - whole.start, cols.stop - whole.start)
        step = rows_at_once(into.device, len(whole), 0)
        for row in range(0, len(rows), step):
            chunk = Span(rows.start + row, min(rows.start + row + step, rows.stop))
            held = QuantisedWeight.empty("MXFP4", len(chunk), whole, into.dtype, into.device)
            self.read_blocks(source, chunk, whole, held)
            into[row : row + len(chunk)].copy_(held.dequantise()[:, inside])

    def holds(self, source: str, scheme: str) -> bool:
        info = self.tensors[source]
        return info.type == scheme if isinstance(info, Packed) else super().holds(source, scheme)

    def read_blocks(self, source: str, rows: Span, cols: Span, into: QuantisedWeight) -> bool:
        info = self.tensors[source]
        if not isinstance(info, Packed):
            return super().read_blocks(source, rows, cols, into)
        if not self.holds(source, into.type):
            return False
        elements, nbytes = MXFP4_BLOCK
        groups = Span(cols.start // elements, cols.stop // elements)
        scales = _read_rows(info, info.scales, rows)[:, groups.start : groups.stop]
        check_finite(scales.float().masked_fill_(scales == MXFP4_NAN, torch.nan))
        into.scales.copy_(scales)
        packed = _read_rows(info, info.values, rows)[:, groups.start * nbytes : groups.stop * nbytes]
        step = rows_at_once(into.device, len(cols), 0)
        for row in range(0, len(rows), step):
            pairs = packed[row : row + step].to(into.device)
            numbers = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
            into.values[row : row + step].copy_(pack_nibbles(numbers))
        return True


def _read_rows(info: Packed, part: TensorInfo, rows: Span) -> torch.Tensor:
    """Bytes of some rows of a matrix in its tensor `part`: [rows, bytes] uint8."""
    width = part.nbytes // part.dims[0]
    first, last = rows.start * info.step, rows.stop * info.step
    data = map_bytes(part, first * width, (last - first) * width)
    return data.view(last - first, width)[info.first :: info.step]
