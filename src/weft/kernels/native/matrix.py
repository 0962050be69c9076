"""Products in C++ with weights that are packed once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.formats.schemes import UNIT
from weft.kernels.warm import KernelLaunch
from weft.native.entries import Entries
from weft.native.structures import LOWEST_KINDS, PANEL, MatrixDescriptor
from weft.quant.quantised import QuantisedWeight


@dataclass(frozen=True)
class NativeMatrix:
    """A packed weight W: x [T, cols] -> x W^T + bias [T, rows]. `dtype` is that of activations. `kept` are the tensors
    that the descriptor points into."""

    entries: Entries
    descriptor: MatrixDescriptor
    dtype: torch.dtype
    kept: tuple[torch.Tensor | None, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.descriptor.rows)
        self.entries.product(ctypes.byref(self.descriptor), x.data_ptr(), x.shape[0], out.data_ptr())
        return out

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows of W: [N] int64 -> [N, cols]."""
        out = torch.empty(len(numbers), self.descriptor.cols, dtype=self.dtype)
        self.entries.rows_of(ctypes.byref(self.descriptor), numbers.data_ptr(), len(numbers), out.data_ptr())
        return out


class NativeMatrices:
    """The C++ implementation of `Matrices`."""

    multiplies_quantised = True

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> NativeMatrix:
        if isinstance(weight, QuantisedWeight):
            return pack_quantised_matrix(self._entries, weight, bias)
        return pack_dense_matrix(self._entries, weight, bias)

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight, name: str = "") -> NativeMatrix:
        return self.matrix(weight, None)

    def launches(self, tokens: int) -> Sequence[Sequence[KernelLaunch]]:
        return ()


def pack_dense_matrix(entries: Entries, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeMatrix:
    """Pack a weight [rows, cols] of the entries' dtype."""
    rows, cols = weight.shape
    packed = torch.empty(-(-rows // PANEL) * entries.panel_size(cols), dtype=weight.dtype)
    entries.pack_dense(weight.data_ptr(), packed.data_ptr(), rows, cols)
    descriptor = MatrixDescriptor(rows=rows, cols=cols, data=packed.data_ptr())
    if bias is not None:
        descriptor.bias = bias.data_ptr()
    return NativeMatrix(entries, descriptor, getattr(torch, entries.dtype), (packed, bias))


def pack_quantised_matrix(entries: Entries, weight: QuantisedWeight, bias: torch.Tensor | None) -> NativeMatrix:
    """Pack a quantised weight [rows, cols]."""
    (rows, cols), groups = weight.shape, weight.scales.shape[1]
    padded = -(-rows // PANEL) * PANEL
    values = torch.empty(padded * weight.values.shape[1], dtype=torch.uint8)
    entries.pack_values(weight.values.data_ptr(), values.data_ptr(), rows, cols // UNIT, weight.scheme.bits)

    def pack_groups(part: torch.Tensor) -> torch.Tensor:
        packed = part.new_empty(padded * groups)
        entries.pack_groups(part.data_ptr(), packed.data_ptr(), rows, groups, part.itemsize)
        return packed

    scales, lowest = pack_groups(weight.scales), None if weight.lowest is None else pack_groups(weight.lowest)
    descriptor = MatrixDescriptor(
        bits=weight.scheme.bits,
        rows=rows,
        cols=cols,
        data=values.data_ptr(),
        scales=scales.data_ptr(),
        group=weight.scheme.group,
        lacking=weight.lacking,
        kind=LOWEST_KINDS[weight.scheme.lowest],
    )
    if lowest is not None:
        descriptor.lowest = lowest.data_ptr()
    if bias is not None:
        descriptor.bias = bias.data_ptr()
    return NativeMatrix(entries, descriptor, getattr(torch, entries.dtype), (values, scales, lowest, bias))
