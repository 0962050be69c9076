"""Quantised weights as humming-kernels takes them, before it repacks them for its kernels.

Numbers lie along a row in the order of their columns, the first in the lowest bits of a word. Zero points do so along a
column of the matrix. Scales have the dtype of activations, except MXFP4's.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.checkpoint.architectures.published import ROW
from weft.checkpoint.quantised.schemes import Scheme
from weft.plan.products import ProductSpec, against_weight, format_of
from weft.ranks.kernels.triton.weights import nibbles_in_order
from weft.ranks.kernels.usable import UnusableError
from weft.ranks.quant.quantised import QuantisedWeight

WORD_BITS = 32
HIGHEST_ZERO = 2.0**15  # of what float16 holds


def spec_of(weight: QuantisedWeight) -> ProductSpec:
    """The product with a weight, or with each matrix of a stack."""
    rows, cols = weight.shape
    dtype = str(weight.dtype).removeprefix("torch.")
    return ProductSpec(scheme=weight.scheme, dtype=dtype, rows=rows, cols=cols, lacking=weight.lacking)


def obstacle(weight: QuantisedWeight) -> str | None:
    """Reason that the library does not multiply a weight, or one of a stack; None if it does."""
    if reason := against_weight(spec_of(weight)):
        return reason
    if weight.scheme.lowest == "zero" and weight.lowest is not None and weight.scheme.bits == 4:
        highest = int(weight.lowest.max())  # waits for the GPU, once
        if highest >= 1 << weight.scheme.bits:
            return f"it holds zero points in 4 bits, and one of these is {highest}"
    return None


def schema_fields(scheme: Scheme) -> dict[str, Any]:
    """The fields of the library's weight schema for a scheme."""
    numbers = {"MXFP4": "float4e2m1", "FP8": "float8e4m3"}.get(format_of(scheme) or "", f"uint{scheme.bits}")
    fields: dict[str, Any] = {"b_dtype": numbers, "weight_scale_group_size": 0 if scheme.group == ROW else scheme.group}
    if scheme.lowest == "mxfp4":
        fields["bs_dtype"] = "float8e8m0"
    if scheme.lowest in ("zero", "minimum"):
        fields |= {"has_zero_point": True, "is_fp_zero_point": scheme.lowest == "minimum"}
    return fields


def standard_tensors(weight: QuantisedWeight, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tensors of one matrix [rows, cols] by the library's names, and its bias [rows].

    `weight` [rows, cols * bits / 32] int32, `weight_scale` [rows, groups]; `zero_point` [rows * bits / 32, groups]
    int32, or for minima [rows, groups] multiples of the scale, in the dtype of activations.

    Raises UnusableError for a weight that they cannot hold, see `obstacle`.
    """
    if reason := obstacle(weight):
        raise UnusableError(reason)
    values = nibbles_in_order(weight.values) if weight.scheme.bits == 4 else weight.values
    tensors = {"weight": values.contiguous().view(torch.int32)}
    if weight.scheme.lowest == "mxfp4":
        tensors["weight_scale"] = weight.scales.contiguous().view(torch.float8_e8m0fnu)
    else:
        tensors["weight_scale"] = weight.scales.to(weight.dtype)
    if weight.scheme.lowest == "zero":
        assert weight.lowest is not None
        tensors["zero_point"] = pack_along_rows(weight.lowest, weight.scheme.bits)
    elif weight.scheme.lowest == "minimum":
        hold_minima(tensors, weight)
    if bias is not None:
        tensors["bias"] = bias.to(weight.dtype)
    return tensors


def hold_minima(tensors: dict[str, torch.Tensor], weight: QuantisedWeight) -> None:
    """Write w = scale * q + minimum as scale * (q - zero), with zero = -minimum / scale.

    All columns of a group whose scale is 0, or negligible compared with the minimum, are the minimum: there the scale
    becomes the minimum, each q 0 and zero -1.
    """
    assert weight.lowest is not None
    scale, minimum = weight.scales.float(), weight.lowest.float()
    flat = scale.abs() * HIGHEST_ZERO <= minimum.abs()
    zero = torch.where(flat, -1.0, -minimum / torch.where(flat, 1.0, scale))
    tensors["weight_scale"] = torch.where(flat, minimum, scale).to(weight.dtype)
    tensors["zero_point"] = zero.to(weight.dtype)
    words = weight.scheme.group * weight.scheme.bits // WORD_BITS
    tensors["weight"] = tensors["weight"].masked_fill(flat.repeat_interleave(words, 1), 0)


def pack_along_rows(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack numbers [rows, groups] uint8 of 4 or 8 bits along the rows: [rows * bits / 32, groups] int32."""
    columns = numbers.t().contiguous()
    if bits == 4:
        even, odd = columns.unflatten(1, (-1, 2)).unbind(2)
        columns = even | odd << 4
    return columns.view(torch.int32).t().contiguous()
