"""Matrices of signed 8-bit integers, read number by number. Layouts: `checkpoint.quantised.signed`."""

from __future__ import annotations

import torch

from weft.checkpoint.architectures.place import Span
from weft.checkpoint.quantised.packed import Packed
from weft.checkpoint.quantised.signed import LARGEST
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.weights.finite import check_finite
from weft.ranks.weights.stored import DENSE, StoredWeights, map_bytes, rows_at_once, view_bytes

SIGN = 128  # its bit: from -128 .. 127 to 0 .. 255


class SignedWeights(StoredWeights):
    """A `WeightSource` of safetensors files with matrices of signed integers."""

    def read_range(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        info = self.tensors[source]
        if not isinstance(info, Packed):
            super().read_range(source, rows, cols, into)
            return
        cols, scales = cols or Span(0, info.dims[1]), _scales(info, rows).to(into.device)
        step = rows_at_once(into.device, info.dims[1], 0)
        for at in range(0, len(rows), step):
            chunk = Span(rows.start + at, min(rows.start + at + step, rows.stop))
            numbers = _numbers(info, chunk, cols).view(torch.int8).to(into.device).float()
            into[at : at + len(chunk)].copy_(numbers.mul_(scales[at : at + len(chunk)]))

    def holds(self, source: str, scheme: str) -> bool:
        info = self.tensors[source]
        return info.type == scheme if isinstance(info, Packed) else super().holds(source, scheme)

    def read_blocks(self, source: str, rows: Span, cols: Span, into: QuantisedWeight) -> bool:
        info = self.tensors[source]
        if not isinstance(info, Packed):
            return super().read_blocks(source, rows, cols, into)
        if not self.holds(source, into.type):
            return False
        into.values.copy_(_numbers(info, rows, cols)).bitwise_xor_(SIGN)
        into.scales.copy_(_scales(info, rows))
        return True


def _numbers(info: Packed, rows: Span, cols: Span) -> torch.Tensor:
    """Bytes of the numbers: [rows, cols] uint8, on the CPU."""
    width = info.dims[1]
    data = map_bytes(info.values, rows.start * width, len(rows) * width)
    return data.view(len(rows), width)[:, cols.start : cols.stop]


def _scales(info: Packed, rows: Span) -> torch.Tensor:
    """Scale of each row: [rows, 1] float32."""
    stored = view_bytes(map_bytes(info.scales, 0, info.scales.nbytes), DENSE[info.scales.type]).float()
    check_finite(stored)
    scales = stored.expand(info.dims[0])[rows.start : rows.stop, None]
    return scales / LARGEST if info.published.method == "bitsandbytes" else scales
