"""Linear: a matrix product with a rank's share of a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.kernels.base import Matrices, Product
from weft.kernels.batch import Batch
from weft.quant.quantised import QuantisedWeight


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


@dataclass(frozen=True)
class GroupedLinear:
    """Products of groups of rows, each with the weight of its own expert, of the parameter `name`."""

    name: str
    weights: Sequence[Product]
    scheme: str | None = None

    def __call__(self, x: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
        """Multiply rows `offsets[e]` to `offsets[e + 1]` of x [N, in] with expert e's weight: [N, out]."""
        groups = [
            weight(x[start:stop])
            for weight, start, stop in zip(self.weights, offsets[:-1], offsets[1:], strict=True)
            if stop > start
        ]
        return torch.cat(groups)


def create_linear(
    matrices: Matrices, name: str, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None
) -> Linear:
    """The product with a weight [out, in], which may be repacked: the caller does not keep it."""
    return Linear(name, matrices.matrix(weight, bias, name), scheme_of(weight))


def create_grouped_linear(
    matrices: Matrices, name: str, stack: torch.Tensor | QuantisedWeight, biases: torch.Tensor | None, count: int
) -> GroupedLinear:
    """The products with the `count` weights of a stack [experts, out, in], and biases [experts, out]."""
    weights = [
        matrices.matrix(stack.select(0, expert), None if biases is None else biases[expert], f"{name}.{expert}")
        for expert in range(count)
    ]
    return GroupedLinear(name, weights, scheme_of(stack))


def scheme_of(weight: torch.Tensor | QuantisedWeight) -> str | None:
    return weight.type if isinstance(weight, QuantisedWeight) else None
