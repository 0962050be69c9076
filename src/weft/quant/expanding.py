"""Products with quantised weights for which there is no kernel: the weights stay as they are, and each product expands
them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.quant.quantised import QuantisedWeight


class ExpandingProduct:
    """Product x [T, in] -> x W^T + b [T, out] with a quantised weight [out, in], expanded to the dtype of x."""

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> None:
        self.weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.dequantise(x.dtype), self._bias)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(part for part in (self.weight.values, self.weight.scales, self.weight.lowest) if part is not None)

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        """Take the values of another weight, of the same dims and scheme."""
        assert isinstance(weight, QuantisedWeight), self.weight.type
        for own, other in zip(self.tensors, ExpandingProduct(weight, None).tensors, strict=True):
            own.copy_(other)
