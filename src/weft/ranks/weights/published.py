"""Weights of checkpoints whose matrices are quantised: in the numbers that are stored, or as what these stand for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from weft.checkpoint.architectures.place import Span
from weft.checkpoint.quantised.packed import Packed
from weft.checkpoint.quantised.schemes import FP8_SCHEMES, MXFP4_VALUES, TABLES
from weft.errors import ModelError
from weft.ranks.quant.quantised import QuantisedWeight, pack_nibbles
from weft.ranks.weights.readers import READERS, Range, StoredRange
from weft.ranks.weights.stored import StoredWeights, rows_at_once

logger = logging.getLogger("weft")

SIGN = 128  # a bit: from -128 .. 127 to 0 .. 255
LOOKUP = TABLES | {"mxfp4": MXFP4_VALUES}  # values of 4-bit numbers


class PublishedWeights(StoredWeights):
    """A `WeightSource` of safetensors files with quantised matrices."""

    warned = False  # that scales are rounded to float16

    def read_range(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        info = self.tensors[source]
        if not isinstance(info, Packed):
            super().read_range(source, rows, cols, into)
            return
        for chunk, at in _row_chunks(info, rows, into.device):
            part = Range(source, chunk, cols or Span(0, info.dims[1]), info.group, into.device)
            into[at : at + len(chunk)].copy_(_values(info, part, READERS[type(info)](info, part)))

    def holds(self, source: str, scheme: str) -> bool:
        info = self.tensors[source]
        if not isinstance(info, Packed):
            return super().holds(source, scheme)
        # A row's scale of FP8 may be repeated for each group.
        repeats = info.type in FP8_SCHEMES and scheme in FP8_SCHEMES and info.group % FP8_SCHEMES[scheme].group == 0
        return info.type == scheme or repeats

    def read_blocks(self, source: str, rows: Span, cols: Span, into: QuantisedWeight) -> bool:
        info = self.tensors[source]
        if not isinstance(info, Packed):
            return super().read_blocks(source, rows, cols, into)
        if not self.holds(source, into.type):
            return False
        for chunk, at in _row_chunks(info, rows, into.device, bits=8):
            stored = READERS[type(info)](info, Range(source, chunk, cols, into.scheme.group, into.device))
            part = into.narrow(0, at, len(chunk))
            part.values.copy_(pack_nibbles(stored.numbers) if info.bits == 4 else stored.numbers)
            if info.numbers == "signed":
                part.values.bitwise_xor_(SIGN)
            is_rounded = part.scales.dtype == torch.float16
            part.scales.copy_(self._round_scales(source, stored.scales) if is_rounded else stored.scales)
            self._fill_zeros(source, info, stored.zeros, part)
        return True

    def _fill_zeros(self, source: str, info: Packed, zeros: torch.Tensor | None, into: QuantisedWeight) -> None:
        """Copy zero points, or check that they are where a scheme without them has zero."""
        if zeros is None:
            return
        if into.lowest is not None:
            into.lowest.copy_(zeros)
        elif (zeros != 1 << info.bits - 1).any():
            raise ModelError(
                f"{info.file}: the zero points of {source} are not all {1 << info.bits - 1}, as they are where "
                "weights are quantised symmetrically, which config.json says; set sym to false there",
                code="uneven-zero-points",
            )

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


def _row_chunks(info: Packed, rows: Span, device: torch.device, bits: int = 32) -> Iterator[tuple[Span, int]]:
    """Cut `rows` into chunks of a good size for the device, each with the number of rows before it. A number takes
    `bits` bits there."""
    step = rows_at_once(device, info.dims[1], 0) * 32 // bits
    for row in range(rows.start, rows.stop, step):
        yield Span(row, min(row + step, rows.stop)), row - rows.start


def _values(info: Packed, part: Range, stored: StoredRange) -> torch.Tensor:
    """The weights that numbers stand for: [rows, cols] float32."""
    numbers, scales = stored.numbers, stored.scales.to(part.device)
    groups = part.column_groups() if stored.order is None else stored.order
    if info.numbers == "fp8":
        values = numbers.view(torch.float8_e4m3fn).float()
    elif info.numbers == "signed":
        values = numbers.view(torch.int8).float()
    elif info.numbers in LOOKUP:
        values = torch.tensor(LOOKUP[info.numbers], device=part.device).take(numbers.long())
    elif stored.zeros is None:
        values = numbers.float().sub_(1 << info.bits - 1)
    else:
        values = numbers.float().sub_(stored.zeros.float()[:, groups])
    scales = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    return values.mul_(scales if scales.shape[1] == 1 else scales[:, groups])
