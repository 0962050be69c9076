"""Products in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.ranks.kernels.held import HeldMatrices
from weft.ranks.kernels.matrices import EmbeddingTable, Product
from weft.ranks.kernels.warm import KernelLaunch
from weft.ranks.quant.dense import create_product
from weft.ranks.quant.dense_embedding import DenseEmbedding
from weft.ranks.quant.quantised import QuantisedWeight


class PlainMatrices(HeldMatrices):
    """The implementation of `Matrices` in plain torch."""

    multiplies_quantised = False

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> Product:
        return self._hold(name, create_product(weight, bias))

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight, name: str = "") -> EmbeddingTable:
        return self._hold(name, DenseEmbedding(weight))

    def launches(self, tokens: int) -> Sequence[Sequence[KernelLaunch]]:
        return ()
