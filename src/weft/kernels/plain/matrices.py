"""Products in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.kernels.base import EmbeddingTable, Product
from weft.kernels.held import HeldMatrices
from weft.kernels.warm import KernelLaunch
from weft.quant.dense import create_product
from weft.quant.dense_embedding import DenseEmbedding
from weft.quant.quantised import QuantisedWeight


class PlainMatrices(HeldMatrices):
    """The implementation of `Matrices` in plain torch."""

    multiplies_quantised = False

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> Product:
        return self._hold(name, create_product(weight, bias))

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight, name: str = "") -> EmbeddingTable:
        return self._hold(name, DenseEmbedding(weight))

    def launches(self, tokens: int) -> Sequence[Sequence[KernelLaunch]]:
        return ()
