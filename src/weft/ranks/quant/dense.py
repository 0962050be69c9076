"""Products in plain torch with weights in bf16, fp16 or fp32; on a CPU, bf16 weights are packed once for oneDNN."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.ranks.quant.quantised import QuantisedWeight


class DenseProduct:
    """Product x [T, in] -> x W^T + b [T, out] with a weight [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self._bias)

    @property
    def has_bias(self) -> bool:
        return self._bias is not None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.weight,)

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        self.weight.copy_(dense_weight(weight))


class PackedProduct:
    """A DenseProduct whose weight is packed for oneDNN."""

    tensors: tuple[torch.Tensor, ...] = ()  # oneDNN's packed form is opaque

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = bias
        self.replace(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(dense_weight(weight))


class RouterProduct(DenseProduct):
    """A DenseProduct in float32, whatever the dtype of x."""

    def __init__(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> None:
        super().__init__(dense_weight(weight).float(), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # The bias is the caller's own, whose values may be replaced.
        return F.linear(x.float(), self.weight, None if self._bias is None else self._bias.float())


def create_product(
    weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None = None
) -> DenseProduct | PackedProduct:
    """Create the product with a weight, which the caller does not keep: the product may hold a packed copy. Quantised
    weights are dequantised once."""
    weight = dense_weight(weight)
    packable = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return (PackedProduct if packable and onednn_packs_bfloat16() else DenseProduct)(weight, bias)


def onednn_packs_bfloat16() -> bool:
    """Return True if torch has oneDNN and the CPU has the instructions that its packed bf16 weights need.

    With AVX2 alone oneDNN refuses them.
    """
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def dense_weight(weight: torch.Tensor | QuantisedWeight) -> torch.Tensor:
    """The weight as a plain tensor: dequantised if quantised, else unchanged."""
    return weight.dequantise(weight.dtype) if isinstance(weight, QuantisedWeight) else weight
