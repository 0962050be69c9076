"""LayerWeights: the parameters of one layer, as its blocks take them."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import Experts, Norm
from weft.ranks.comm import Group
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.latents import LatentDims, LatentProducts
from weft.ranks.kernels.matrices import ExpertProducts, ExpertStack
from weft.ranks.layers.exchange import TokenExchange
from weft.ranks.layers.linear import Linear, create_linear
from weft.ranks.layers.norm import NormLayer
from weft.ranks.quant.quantised import QuantisedWeight

# Parameters by name. Each matrix is taken out when its layer is constructed: a matrix that is packed for its product is
# then held once, not twice until the whole model is built.
Tensors = MutableMapping[str, torch.Tensor | QuantisedWeight]


class LayerWeights:
    """Parameters of a rank whose names begin with `prefix`, such as "layers.3."."""

    def __init__(
        self,
        tensors: Tensors,
        prefix: str,
        norm: Norm,
        comm: Group,
        kernels: Kernels,
        exchange: TokenExchange | None = None,
    ) -> None:
        self._tensors, self._prefix, self._norm = tensors, prefix, norm
        self.comm, self.kernels, self.exchange = comm, kernels, exchange

    def vector(self, name: str) -> torch.Tensor:
        """Parameter that is never quantised: a norm's weight, a bias or the like."""
        tensor = self._tensors[self._prefix + name]
        assert isinstance(tensor, torch.Tensor), name
        return tensor

    def vector_or_none(self, name: str) -> torch.Tensor | None:
        return self.vector(name) if self._prefix + name in self._tensors else None

    def norm(self, name: str, *, eps: float | None = None) -> NormLayer:
        """A norm with the model's epsilon, unless it has another one."""
        bias = self.vector(name + ".bias") if self._norm.kind == "layer" else None
        return NormLayer(self._norm.kind, self.vector(name + ".weight"), bias, eps or self._norm.eps)

    def column_linear(self, name: str) -> Linear:
        """Product with a matrix of which this rank has some rows: every rank has its whole input."""
        return self._linear(name, self.vector_or_none(name + ".bias"))

    def row_linear(self, name: str) -> Linear:
        """Product with a matrix of which this rank has some columns: results are to be summed over the ranks."""
        return self._linear(name, self._bias_of_one_rank(name))

    def whole_linear(self, name: str) -> Linear:
        """Product with a matrix that every rank has."""
        return self._linear(name, None)

    def router(self, name: str) -> Linear:
        """Product with a router's matrix, which every rank has; its results are float32."""
        bias, name = self.vector_or_none(name + ".bias"), f"{self._prefix}{name}.weight"
        return Linear(name, self.kernels.matrices.router(self._tensors.pop(name), bias, name))

    def latent_products(self, name: str, dims: LatentDims) -> LatentProducts:
        """Products with the matrix that leads from latents to the keys and values of this rank's heads."""
        name = f"{self._prefix}{name}.weight"
        return self.kernels.matrices.latent_products(self._tensors.pop(name), dims, name)

    def experts(self, name: str, spec: Experts, place: Place) -> ExpertProducts:
        """The MLPs of the experts that this rank holds, some columns of each: results are to be summed over the
        ranks."""
        gate_up = self._stack(f"{name}.gate_up", self.vector_or_none(f"{name}.gate_up.bias"))
        # The first of the ranks that divide the columns of the same experts adds their biases.
        biases = self.vector_or_none(f"{name}.down.bias") if place.expert_ffn.start == 0 else None
        down = self._stack(f"{name}.down", biases)
        return self.kernels.matrices.experts(spec, gate_up, down, place.experts.start)

    def _stack(self, name: str, bias: torch.Tensor | None) -> ExpertStack:
        name = f"{self._prefix}{name}.weight"
        return ExpertStack(name, self._tensors.pop(name), bias)

    def _linear(self, name: str, bias: torch.Tensor | None) -> Linear:
        name = f"{self._prefix}{name}.weight"
        return create_linear(self.kernels.matrices, name, self._tensors.pop(name), bias)

    def _bias_of_one_rank(self, name: str) -> torch.Tensor | None:
        # Only rank 0 adds the bias: the sum would contain it once per rank.
        return self.vector_or_none(name + ".bias") if self.comm.rank == 0 else None
