"""Products with FP8 weights on GPUs that have FP8 units: many rows of x are rounded to FP8 as well.

Few rows of x are multiplied as they are (`products.py`): such a product takes as long as reading the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.checkpoint.architectures.published import ROW
from weft.checkpoint.quantised.schemes import Scheme
from weft.machine.hardware.gpus import FP8_CAPABILITY
from weft.ranks.kernels.triton.products import MANY, QuantisedMatrix
from weft.ranks.quant.rounding import LARGEST_FP8, TINIEST_FP32_SCALE

# torch._scaled_mm takes a scale for each row of both matrices if results are bfloat16 and dims are multiples of UNITS.
DTYPE, UNITS = torch.bfloat16, 16


@dataclass(frozen=True, kw_only=True)
class ScaledMatrix(QuantisedMatrix):
    """A `QuantisedMatrix` whose weight has FP8 numbers and a scale for each row.

    From MANY rows of x on, each of them is rounded to FP8 with a scale of its own (dynamic activations per token), and
    torch._scaled_mm multiplies.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) if x.shape[0] < MANY else self._multiply_scaled(x)

    def _multiply_scaled(self, x: torch.Tensor) -> torch.Tensor:
        scale = (x.abs().amax(dim=1, keepdim=True).float() / LARGEST_FP8).clamp_(min=TINIEST_FP32_SCALE)
        numbers = (x / scale).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
        return torch._scaled_mm(
            numbers,
            self.weight.words.view(torch.float8_e4m3fn).t(),
            scale_a=scale,
            scale_b=self.weight.scales.t(),
            bias=self.bias,
            out_dtype=DTYPE,
        )


def has_fp8_units(device: torch.device) -> bool:
    """Return True for a GPU that multiplies FP8 matrices: NVIDIA's, of compute capability 8.9 and later."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def takes_scaled_product(scheme: Scheme, rows: int, cols: int, dtype: torch.dtype) -> bool:
    """Return True if torch._scaled_mm multiplies weights [rows, cols] of this scheme with activations of `dtype`."""
    per_row = scheme.lowest == "fp8" and scheme.group == ROW
    return per_row and dtype == DTYPE and rows % UNITS == 0 and cols % UNITS == 0
