"""Products with quantised weights by the library humming-kernels, where it is installed and right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.hardware.nvml import driver_version
from weft.kernels.base import AttentionShape
from weft.kernels.usable import multiprocessor_count

if TYPE_CHECKING:
    from weft.kernels.humming.matrices import HummingMatrices


def create_matrices(device: torch.device, shape: AttentionShape, *, races: bool) -> HummingMatrices:
    """Products beside the other Triton kernels. With `races`, the library multiplies the shapes for which it is the
    faster one."""
    from weft.kernels.humming.matrices import HummingMatrices
    from weft.kernels.humming.race import ProductRaces
    from weft.kernels.triton.fp8 import has_fp8_units

    return HummingMatrices(
        device,
        multiprocessor_count(device),
        shape.tokens,
        fp8_units=has_fp8_units(device),
        races=ProductRaces(device, driver_version()) if races else None,
    )
