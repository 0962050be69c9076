"""LayerWeights: the parameters of one layer, as its blocks take them."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from weft.architectures.shape import Norm
from weft.comm import Comm
from weft.kernels.base import Kernels, Product
from weft.layers.linear import column_linear, row_linear
from weft.layers.norm import NormLayer
from weft.quant.quantised import QuantisedWeight

# Parameters by name. Each matrix is taken out when its layer is constructed: a matrix that is packed for its product is
# then held once, not twice until the whole model is built.
Tensors = MutableMapping[str, torch.Tensor | QuantisedWeight]


class LayerWeights:
    """Parameters of a rank whose names begin with `prefix`, such as "layers.3."."""

    def __init__(self, tensors: Tensors, prefix: str, norm: Norm, comm: Comm, kernels: Kernels) -> None:
        self._tensors, self._prefix, self._norm = tensors, prefix, norm
        self.comm, self.kernels = comm, kernels

    def vector(self, name: str) -> torch.Tensor:
        """Parameter that is never quantised: a norm's weight, a bias or the like."""
        tensor = self._tensors[self._prefix + name]
        assert isinstance(tensor, torch.Tensor), name
        return tensor

    def vector_or_none(self, name: str) -> torch.Tensor | None:
        return self.vector(name) if self._prefix + name in self._tensors else None

    def norm(self, name: str) -> NormLayer:
        return NormLayer(self.vector(name + ".weight"), self.vector_or_none(name + ".bias"), self._norm.eps)

    def norm_or_none(self, name: str) -> NormLayer | None:
        return self.norm(name) if f"{self._prefix}{name}.weight" in self._tensors else None

    def matrix(self, name: str) -> torch.Tensor | QuantisedWeight:
        """Take a matrix out of the tensors."""
        return self._tensors.pop(f"{self._prefix}{name}.weight")

    def column_linear(self, name: str) -> Product:
        """Product with a matrix of which this rank has some rows: every rank has its whole input."""
        return column_linear(self.matrix(name), self.vector_or_none(name + ".bias"), self.kernels)

    def row_linear(self, name: str) -> Product:
        """Product with a matrix of which this rank has some columns: results are to be summed over the ranks."""
        return row_linear(self.matrix(name), self.vector_or_none(name + ".bias"), self.comm, self.kernels)
