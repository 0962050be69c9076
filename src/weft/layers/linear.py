"""Matrix products, born with their share of the rows or of the columns."""

from __future__ import annotations

import torch

from weft.comm import Comm
from weft.quant.dense import product


class ColumnLinear:
    """This rank's output rows of a product whose input every rank has: [T, in] -> [T, rows of this rank]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.product = product(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


class RowLinear:
    """This rank's input columns: [T, cols of this rank] -> [T, out], summed over the ranks."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, comm: Comm) -> None:
        # With one rank the product can add the bias; with more it comes once, after the sum.
        self.product = product(weight, bias if comm.size == 1 else None)
        self.bias = None if comm.size == 1 else bias
        self.comm = comm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.comm.sum(self.product(x))
        return out if self.bias is None else out.add_(self.bias)
