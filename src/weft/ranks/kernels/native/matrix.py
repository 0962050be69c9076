"""Products in C++ with weights that are packed once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from weft.checkpoint.quantised.schemes import UNIT
from weft.machine.native.entries import Entries
from weft.machine.native.pages import PagePool
from weft.machine.native.structures import LOWEST_KINDS, PANEL, MatrixDescriptor
from weft.ranks.quant.quantised import QuantisedWeight

_pages = PagePool()  # of the packed weights of this process


@dataclass(frozen=True)
class NativeMatrix:
    """A packed weight W: x [T, cols] -> x W^T + bias [T, rows]. `dtype` is the activations'; if `wide`, results are
    float32. The descriptor points into `tensors`, which hold W, and into `bias`."""

    entries: Entries
    descriptor: MatrixDescriptor
    dtype: torch.dtype
    tensors: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None
    wide: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], self.descriptor.rows, dtype=torch.float32 if self.wide else x.dtype)
        product = self.entries.wide_product if self.wide else self.entries.product
        product(ctypes.byref(self.descriptor), x.data_ptr(), x.shape[0], out.data_ptr())
        return out

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows of W: [N] int64 -> [N, cols]."""
        out = torch.empty(len(numbers), self.descriptor.cols, dtype=self.dtype)
        self.entries.rows_of(ctypes.byref(self.descriptor), numbers.data_ptr(), len(numbers), out.data_ptr())
        return out

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        """Take the values of another weight, of the same dims and scheme."""
        pack_weight(self.entries, weight, self.tensors)


def pack_matrix(entries: Entries, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> NativeMatrix:
    """Pack a weight [rows, cols], quantised or of the entries' dtype."""
    tensors = allocate_packed(entries, weight)
    descriptor = describe_matrix(entries, weight, weight.shape[0], tensors, bias)
    matrix = NativeMatrix(entries, descriptor, getattr(torch, entries.dtype), tensors, bias)
    matrix.replace(weight)
    return matrix


def describe_matrix(
    entries: Entries,
    weight: torch.Tensor | QuantisedWeight,
    rows: int,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> MatrixDescriptor:
    """A weight of `rows` rows, packed in `tensors`, as C++ reads it."""
    descriptor = MatrixDescriptor(rows=rows, cols=weight.shape[-1], fixed_order=entries.fixed_order)
    for name, tensor in zip(("data", "scales", "lowest"), tensors, strict=False):
        setattr(descriptor, name, tensor.data_ptr())
    if isinstance(weight, QuantisedWeight):
        scheme = weight.scheme
        descriptor.bits, descriptor.group, descriptor.kind = scheme.bits, scheme.group, LOWEST_KINDS[scheme.lowest]
        descriptor.lacking = weight.lacking
    if bias is not None:
        descriptor.bias = bias.data_ptr()
    return descriptor


def allocate_packed(
    entries: Entries, weight: torch.Tensor | QuantisedWeight, stacked: Sequence[int] = ()
) -> tuple[torch.Tensor, ...]:
    """Memory for a packed weight [rows, cols], or for as many as the dims `stacked` say: its numbers and, if it is
    quantised, its scales. If the scheme has minima or zero points, they are included."""
    panels = -(-weight.shape[0] // PANEL)
    if isinstance(weight, torch.Tensor):
        return (_allocate((*stacked, panels * entries.panel_size(weight.shape[1])), weight.dtype),)
    parts = [part for part in (weight.values, weight.scales, weight.lowest) if part is not None]
    return tuple(_allocate((*stacked, panels * PANEL * part.shape[1]), part.dtype) for part in parts)


def _allocate(dims: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor in huge pages, side by side with the last one: a step reads all weights in order."""
    if not prod(dims):
        return torch.empty(dims, dtype=dtype)
    pages, offset = _pages.take(prod(dims) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=prod(dims), offset=offset).view(dims)


def pack_weight(entries: Entries, weight: torch.Tensor | QuantisedWeight, into: Sequence[torch.Tensor]) -> None:
    """Pack a weight into memory of `allocate_packed`."""
    rows, cols = weight.shape
    values, *groups = into
    if isinstance(weight, torch.Tensor):
        entries.pack_dense(weight.data_ptr(), values.data_ptr(), rows, cols)
        return
    entries.pack_values(weight.values.data_ptr(), values.data_ptr(), rows, cols // UNIT, weight.scheme.bits)
    for part, packed in zip((weight.scales, weight.lowest), groups, strict=False):
        assert part is not None
        entries.pack_groups(part.data_ptr(), packed.data_ptr(), rows, part.shape[1], part.itemsize)
