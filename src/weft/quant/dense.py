"""Products in plain torch with weights in bf16, fp16 or fp32; on a CPU, bf16 weights are packed once for oneDNN."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from weft.quant.quantised import QuantisedWeight

Product = Callable[[torch.Tensor], torch.Tensor]


def create_product(weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None = None) -> Product:
    """Product x [T, in] -> x W^T + b [T, out] with a weight [out, in] that does not change any more. Quantised weights
    are dequantised once."""
    if isinstance(weight, QuantisedWeight):
        weight = weight.dequantise(weight.dtype)
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        linear = torch.ops.mkldnn._linear_pointwise
        return lambda x: linear(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)
