"""Products by the names of their parameters, so that weights can be replaced, or moved to the host and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.experts import GroupedExperts
from weft.ranks.kernels.latents import AbsorbedQueries, LatentDims, LatentProducts
from weft.ranks.kernels.matrices import ExpertProducts, ExpertStack, FusedMLP, MixtureProducts, Product
from weft.ranks.quant.dense import RouterProduct, dense_weight
from weft.ranks.quant.quantised import QuantisedWeight, stack_size


class HeldProduct(Protocol):
    """A product with a weight, packed or not, in tensors that stay where they are."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that hold the weight. Empty if a CPU packs it in a form that only the product knows."""
        ...

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        """Take the values of another weight, of the same dims and scheme."""
        ...


P = TypeVar("P", bound=HeldProduct)


class HeldMatrices:
    """Base of the implementations of `Matrices`: it knows all their products by the names of their parameters.

    Unless an implementation has something faster, routers, experts and projections of latents are computed in torch,
    experts with its products.
    """

    def __init__(self) -> None:
        self._products: dict[str, HeldProduct] = {}

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> Product:
        raise NotImplementedError

    def router(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> Product:
        return self._hold(name, RouterProduct(weight, bias))

    def experts(self, spec: Experts, gate_up: ExpertStack, down: ExpertStack, first: int) -> ExpertProducts:
        return GroupedExperts(spec, self._matrices(gate_up), self._matrices(down), first)

    def mixture(self, experts: ExpertProducts, shared: FusedMLP) -> MixtureProducts | None:
        return None

    def latent_products(
        self, weight: torch.Tensor | QuantisedWeight, dims: LatentDims, name: str = ""
    ) -> LatentProducts:
        return self._hold(name, DenseLatentProducts(weight, dims))

    def replace(self, name: str, weight: torch.Tensor | QuantisedWeight) -> None:
        """Give a parameter other values, of the same dims and scheme, in the same memory."""
        if name in self._products:
            self._products[name].replace(weight)
            return
        for expert in range(stack_size(weight)):
            self._products[f"{name}.{expert}"].replace(weight.select(0, expert))

    def against_replacing(self, name: str, weight: torch.Tensor | QuantisedWeight) -> str | None:
        """Nothing is against it: these products take any values."""
        return None

    def refresh_biases(self) -> None:
        """Nothing to do: these products read the callers' biases."""

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold weights."""
        return [tensor for product in self._products.values() for tensor in product.tensors]

    def _matrices(self, stack: ExpertStack) -> list[Product]:
        """The product of each matrix of a stack."""
        return [
            self.matrix(
                stack.weight.select(0, expert),
                None if stack.bias is None else stack.bias[expert],
                f"{stack.name}.{expert}",
            )
            for expert in range(stack_size(stack.weight))
        ]

    def _hold(self, name: str, product: P) -> P:
        self._products[name] = product
        return product


class DenseLatentProducts:
    """`LatentProducts` in torch. The weight is held once: [heads, nope_dim + value_dim,
    rank]."""

    def __init__(self, weight: torch.Tensor | QuantisedWeight, dims: LatentDims) -> None:
        self.dims = dims
        self.weight = dense_weight(weight).view(dims.heads, dims.nope_dim + dims.value_dim, dims.rank)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.weight,)

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        self.weight.copy_(dense_weight(weight).view_as(self.weight))

    def absorb(self, q: torch.Tensor) -> AbsorbedQueries:
        nope = self.dims.nope_dim
        latent = q.new_empty(q.shape[0], self.dims.heads, self.dims.rank)
        torch.bmm(q[..., :nope].transpose(0, 1), self.weight[:, :nope], out=latent.transpose(0, 1))
        return AbsorbedQueries(latent, q[..., nope:])

    def values(self, mixed: torch.Tensor) -> torch.Tensor:
        projection = self.weight[:, self.dims.nope_dim :].transpose(1, 2)
        out = mixed.new_empty(mixed.shape[0], self.dims.heads, self.dims.value_dim)
        torch.bmm(mixed.transpose(0, 1), projection, out=out.transpose(0, 1))
        return out.flatten(1)

    def expand(self, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        some, rank = self.weight[heads], self.dims.rank
        both = F.linear(latents[:, :rank], some.flatten(0, 1)).view(len(latents), len(some), -1)
        keys, values = both.split((self.dims.nope_dim, self.dims.value_dim), dim=-1)
        return keys, values
