"""The kernels in Triton, for GPUs; TRITON_INTERPRET=1 runs them on a CPU, for tests.

Triton itself is imported when they are created.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.ranks.kernels.attention import AttentionShape, PagedAttention
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.usable import has_warp_groups, multiprocessor_count, shared_memory_bytes
from weft.ranks.quant.rounding import Rounding, round_into

if TYPE_CHECKING:
    from weft.ranks.kernels.triton.attention import TritonAttention


def create_attention(device: torch.device, shape: AttentionShape) -> TritonAttention:
    """Triton's attention, in the tile sizes that were measured on the device, if any were."""
    from weft.ranks.kernels.triton import saved_tunings
    from weft.ranks.kernels.triton.attention import TritonAttention

    return TritonAttention(
        multiprocessor_count(device), saved_tunings.load_tunings(device, shape), shared_memory_bytes(device)
    )


def create_rounding(device: torch.device, shape: AttentionShape) -> Rounding:
    """The rounding in Triton on a GPU; its interpreter would take minutes."""
    if device.type != "cuda":
        return round_into
    from weft.ranks.kernels.triton.rounding import round_on_gpu

    return round_on_gpu


def complete_kernels(attention: PagedAttention, device: torch.device, shape: AttentionShape) -> Kernels:
    """`attention` and all other parts in Triton."""
    from weft.ranks.kernels.triton.fp8 import has_fp8_units
    from weft.ranks.kernels.triton.kernels import TritonMatrices, TritonPointwise, TritonSampling
    from weft.ranks.kernels.triton.latents import TritonLatents

    return Kernels(
        attention=attention,
        pointwise=TritonPointwise(),
        matrices=TritonMatrices(multiprocessor_count(device), fp8_units=has_fp8_units(device)),
        sampling=TritonSampling(device),
        latents=TritonLatents(
            multiprocessor_count(device),
            shared_memory_bytes(device),
            warp_groups=has_warp_groups(device),
        ),
    )
