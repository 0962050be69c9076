"""An embedding in plain torch, and the product with it if it is the model's head as well."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F

from weft.ranks.quant.dense import DenseProduct, PackedProduct, create_product, dense_weight
from weft.ranks.quant.quantised import QuantisedWeight


class DenseEmbedding:
    """An embedding [rows, cols], held in the dtype of activations: an `EmbeddingTable` of ranks/kernels/matrices.py."""

    def __init__(self, weight: torch.Tensor | QuantisedWeight) -> None:
        self.weight = dense_weight(weight)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.weight,)

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        self.weight.copy_(dense_weight(weight))
        vars(self).pop("_product", None)  # which may hold the weight packed

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding: [N] int64 -> [N, cols]."""
        return F.embedding(numbers, self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T: [T, cols] -> [T, rows]."""
        return self._product(x)

    @cached_property
    def _product(self) -> DenseProduct | PackedProduct:
        return create_product(self.weight)
