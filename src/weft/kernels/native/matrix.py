"""Products in C++ with weights that are packed once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.formats.schemes import UNIT
from weft.kernels.held import HeldMatrices
from weft.kernels.warm import KernelLaunch
from weft.native.entries import Entries
from weft.native.structures import LOWEST_KINDS, PANEL, MatrixDescriptor
from weft.quant.expanding import ExpandingProduct
from weft.quant.quantised import QuantisedWeight


@dataclass(frozen=True)
class NativeMatrix:
    """A packed weight W: x [T, cols] -> x W^T + bias [T, rows]. `dtype` is that of activations. The descriptor points
    into `tensors`, which hold W, and into `bias`."""

    entries: Entries
    descriptor: MatrixDescriptor
    dtype: torch.dtype
    tensors: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.descriptor.rows)
        self.entries.product(ctypes.byref(self.descriptor), x.data_ptr(), x.shape[0], out.data_ptr())
        return out

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows of W: [N] int64 -> [N, cols]."""
        out = torch.empty(len(numbers), self.descriptor.cols, dtype=self.dtype)
        self.entries.rows_of(ctypes.byref(self.descriptor), numbers.data_ptr(), len(numbers), out.data_ptr())
        return out

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        """Take the values of another weight, of the same dims and scheme."""
        if isinstance(weight, QuantisedWeight):
            pack_values(self.entries, weight, self.tensors)
        else:
            self.entries.pack_dense(weight.data_ptr(), self.tensors[0].data_ptr(), *weight.shape)


class NativeMatrices(HeldMatrices):
    """The C++ implementation of `Matrices`."""

    multiplies_quantised = True

    def __init__(self, entries: Entries) -> None:
        super().__init__()
        self._entries = entries

    def matrix(
        self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = ""
    ) -> NativeMatrix | ExpandingProduct:
        if isinstance(weight, QuantisedWeight) and weight.scheme.lowest not in LOWEST_KINDS:
            return self._hold(name, ExpandingProduct(weight, bias))
        return self._hold(name, pack_matrix(self._entries, weight, bias))

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight, name: str = "") -> NativeMatrix:
        return self._hold(name, pack_matrix(self._entries, weight, None))

    def launches(self, tokens: int) -> Sequence[Sequence[KernelLaunch]]:
        return ()


def pack_matrix(entries: Entries, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> NativeMatrix:
    """Pack a weight [rows, cols], quantised or of the entries' dtype."""
    rows, cols = weight.shape
    descriptor = MatrixDescriptor(rows=rows, cols=cols)
    if isinstance(weight, QuantisedWeight):
        tensors = allocate_quantised(weight)
        for name, tensor in zip(("data", "scales", "lowest"), tensors, strict=False):
            setattr(descriptor, name, tensor.data_ptr())
        scheme = weight.scheme
        descriptor.bits, descriptor.group, descriptor.kind = scheme.bits, scheme.group, LOWEST_KINDS[scheme.lowest]
        descriptor.lacking = weight.lacking
    else:
        tensors = (torch.empty(-(-rows // PANEL) * entries.panel_size(cols), dtype=weight.dtype),)
        descriptor.data = tensors[0].data_ptr()
    if bias is not None:
        descriptor.bias = bias.data_ptr()
    matrix = NativeMatrix(entries, descriptor, getattr(torch, entries.dtype), tensors, bias)
    matrix.replace(weight)
    return matrix


def allocate_quantised(weight: QuantisedWeight) -> tuple[torch.Tensor, ...]:
    """Memory for the packed numbers, scales and, if the scheme has them, minima or zero points of a weight."""
    padded = -(-weight.shape[0] // PANEL) * PANEL
    parts = [part for part in (weight.values, weight.scales, weight.lowest) if part is not None]
    return tuple(part.new_empty(padded * part.shape[1]) for part in parts)


def pack_values(entries: Entries, weight: QuantisedWeight, into: Sequence[torch.Tensor]) -> None:
    """Pack the numbers of a weight, and then its scales and minima, into memory of `allocate_quantised`."""
    rows, cols = weight.shape
    values, *groups = into
    entries.pack_values(weight.values.data_ptr(), values.data_ptr(), rows, cols // UNIT, weight.scheme.bits)
    for part, packed in zip((weight.scales, weight.lowest), groups, strict=False):
        assert part is not None
        entries.pack_groups(part.data_ptr(), packed.data_ptr(), rows, part.shape[1], part.itemsize)
