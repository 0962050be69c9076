"""Weights rounded in C++ to the numbers of a quantisation scheme."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cached_property

import torch

from weft.checkpoint.quantised.schemes import UNIT, Scheme
from weft.machine.native.structures import LONGEST_GROUP, LOWEST_KINDS, WEIGHT_TYPES, RoundingDescriptor
from weft.ranks.kernels.native.entries import load_entries
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.quant.rounding import Rounding, column_error_weights, round_into

CPU = torch.device("cpu")


class NativeRounding:
    """The `Rounding` of the library for activations of `dtype`, for which the first call waits. torch rounds instead if
    there is no compiler, and for schemes that the library does not support."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, weight: torch.Tensor, into: QuantisedWeight, importance: torch.Tensor | None = None) -> None:
        rounding = self._native if supports_scheme(into.scheme) else round_into
        rounding(weight, into, importance)

    @cached_property
    def _native(self) -> Rounding:
        try:
            entries = load_entries(self._dtype)
        except (OSError, subprocess.SubprocessError):  # whose reason is reported when the kernels are created
            return round_into

        def rounding(weight: torch.Tensor, into: QuantisedWeight, importance: torch.Tensor | None) -> None:
            assert weight.is_contiguous() and into.values.is_contiguous()
            (rows, width), scheme = weight.shape, into.scheme
            descriptor = RoundingDescriptor(
                type=WEIGHT_TYPES[str(weight.dtype).removeprefix("torch.")],
                rows=rows,
                width=width,
                group=scheme.group,
                bits=scheme.bits,
                kind=LOWEST_KINDS[scheme.lowest],
                lacking=into.lacking,
                cols=into.shape[1],
            )
            error_weights = column_error_weights(importance, width, scheme.group, CPU)
            lowest = None if into.lowest is None else into.lowest.data_ptr()
            parts = into.values.data_ptr(), into.scales.data_ptr(), lowest
            entries.round_rows(ctypes.byref(descriptor), weight.data_ptr(), error_weights.data_ptr(), *parts)

        return rounding


def supports_scheme(scheme: Scheme) -> bool:
    """Return True if the library rounds to the numbers of `scheme`."""
    return (
        scheme.lowest in ("middle", "zero", "minimum", "nested")
        and scheme.bits in (4, 8)
        and scheme.group % UNIT == 0
        and scheme.group <= LONGEST_GROUP
    )
