"""Products by the names of their parameters, so that weights can be replaced, or moved to the host and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from weft.quant.quantised import QuantisedWeight


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
    """Base of the implementations of `Matrices`: it knows all their products by the names of their parameters."""

    def __init__(self) -> None:
        self._products: dict[str, HeldProduct] = {}

    def replace(self, name: str, weight: torch.Tensor | QuantisedWeight) -> None:
        """Give a parameter other values, of the same dims and scheme, in the same memory."""
        self._products[name].replace(weight)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold weights."""
        return [tensor for product in self._products.values() for tensor in product.tensors]

    def _hold(self, name: str, product: P) -> P:
        self._products[name] = product
        return product
