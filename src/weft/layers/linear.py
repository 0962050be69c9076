"""Matrix products constructed with a rank's share of the rows or of the columns."""

from __future__ import annotations

import torch

from weft.comm import Group
from weft.kernels.base import Kernels, Product
from weft.quant.quantised import QuantisedWeight


def column_linear(weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, kernels: Kernels) -> Product:
    """Column-parallel product, whose input every rank has: [T, in] -> [T, output features of this rank]."""
    return kernels.matrix(weight, bias)


def row_linear(
    weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, comm: Group, kernels: Kernels
) -> Product:
    """Row-parallel product: [T, input features of this rank] -> [T, out], which the caller sums over the ranks."""
    # Only rank 0 adds the bias: the sum would contain it once per rank.
    return kernels.matrix(weight, bias if comm.rank == 0 else None)
