"""DenseTable: an embedding, and the product with it where it is a model's head as well."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F

from weft.quant.dense import Product, product
from weft.quant.quantised import QuantisedWeight


class DenseTable:
    """Rows of a weight [rows, cols], which is held in the dtype that is computed in."""

    def __init__(self, weight: torch.Tensor | QuantisedWeight) -> None:
        self.weight = weight.dequantise(weight.dtype) if isinstance(weight, QuantisedWeight) else weight

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """[N] -> [N, cols]."""
        return F.embedding(numbers, self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T: [T, cols] -> [T, rows]."""
        return self._product(x)

    @cached_property
    def _product(self) -> Product:
        return product(self.weight)
