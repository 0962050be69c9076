"""Linear: a matrix product with a rank's share of a weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.matrices import Matrices, Product
from weft.ranks.quant.quantised import QuantisedWeight


@dataclass(frozen=True)
class Linear:
    """x W^T + b with this rank's share of W, the parameter `name`.

    `weight` is W as the kernels hold it, packed for their product; `scheme` its quantisation, None for none.
    """

    name: str
    weight: Product
    scheme: str | None = None

    def __call__(self, x: torch.Tensor, batch: Batch | None = None) -> torch.Tensor:
        """Multiply: [T, in] -> [T, out]. `batch` is the step that the rows belong to, for products that differ by
        row."""
        return self.weight(x)


def create_linear(
    matrices: Matrices, name: str, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None
) -> Linear:
    """The product with a weight [out, in], which may be repacked: the caller does not keep it."""
    return Linear(name, matrices.matrix(weight, bias, name), scheme_of(weight))


def scheme_of(weight: torch.Tensor | QuantisedWeight) -> str | None:
    return weight.type if isinstance(weight, QuantisedWeight) else None
