"""Matrix products, born with their share of the rows or of the columns."""

from __future__ import annotations

import torch

from weft.comm import Comm
from weft.kernels.base import Kernels, Product
from weft.quant.quantised import QuantisedWeight


def column_linear(weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, kernels: Kernels) -> Product:
    """This rank's output rows of a product whose input every rank has: [T, in] -> [T, rows of this rank]."""
    return kernels.matrix(weight, bias)


def row_linear(
    weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, comm: Comm, kernels: Kernels
) -> Product:
    """This rank's input columns: [T, cols of this rank] -> [T, out], to be summed over the ranks."""
    # Once, not per rank.
    return kernels.matrix(weight, bias if comm.rank == 0 else None)
