"""Weights rounded in C++ to the numbers of a scheme."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cached_property

import torch

from weft.formats.schemes import UNIT, Scheme
from weft.kernels.native.entries import Entries
from weft.native import build
from weft.native.library import LOWEST_KINDS, SIZE
from weft.quant.quantised import QuantisedWeight
from weft.quant.rounding import Rounding, column_weights, round_into

# As in rounding.h: Weights, LONGEST.
TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
LONGEST = 128
CPU = torch.device("cpu")


class Descriptor(ctypes.Structure):
    """struct Rounding of rounding.h."""

    _fields_ = (*((name, SIZE) for name in ("type", "rows", "width", "group", "bits", "kind", "lacking", "cols")),)


def create_native_rounding(dtype: torch.dtype, head_dim: int, group: int) -> Rounding:
    """What rounds the weights of a model of this dtype, head_dim and query heads per KV head."""
    if build.native_obstacle(str(dtype).removeprefix("torch."), head_dim, group) is None:
        return NativeRounding(dtype)
    return round_into


class NativeRounding:
    """The `Rounding` of the library for activations of `dtype`, which the first call waits for. Where there is no
    compiler, and for what the library does not know, that of torch."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, weight: torch.Tensor, into: QuantisedWeight, importance: torch.Tensor | None = None) -> None:
        rounding = self._native if supports_scheme(into.scheme) else round_into
        rounding(weight, into, importance)

    @cached_property
    def _native(self) -> Rounding:
        try:
            entries = Entries(self._dtype)
        except (OSError, subprocess.SubprocessError):  # whoever chooses the kernels says why
            return round_into

        def rounding(weight: torch.Tensor, into: QuantisedWeight, importance: torch.Tensor | None) -> None:
            assert weight.is_contiguous() and into.values.is_contiguous()
            (rows, width), scheme = weight.shape, into.scheme
            asked = Descriptor(
                type=TYPES[weight.dtype],
                rows=rows,
                width=width,
                group=scheme.group,
                bits=scheme.bits,
                kind=LOWEST_KINDS[scheme.lowest],
                lacking=into.lacking,
                cols=into.shape[1],
            )
            each = column_weights(importance, width, scheme.group, CPU)
            lowest = None if into.lowest is None else into.lowest.data_ptr()
            parts = into.values.data_ptr(), into.scales.data_ptr(), lowest
            entries.round_rows(ctypes.byref(asked), weight.data_ptr(), each.data_ptr(), *parts)

        return rounding


def supports_scheme(scheme: Scheme) -> bool:
    return scheme.bits in (4, 8) and scheme.group % UNIT == 0 and scheme.group <= LONGEST
