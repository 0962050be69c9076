"""The kernels in plain torch: they run on every device, and are the reference for tests of the fast ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.ranks.kernels.attention import AttentionShape, PagedAttention
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.plain.attention import PlainAttention
from weft.ranks.kernels.plain.latents import PlainLatents
from weft.ranks.kernels.plain.matrices import PlainMatrices
from weft.ranks.kernels.plain.pointwise import PlainPointwise
from weft.ranks.kernels.plain.sampling import PlainSampling
from weft.ranks.quant.rounding import Rounding, round_into

__all__ = [
    "PlainAttention",
    "PlainMatrices",
    "PlainPointwise",
    "PlainSampling",
    "complete_kernels",
    "create_attention",
    "create_plain_kernels",
    "create_rounding",
]


def create_attention(device: torch.device, shape: AttentionShape) -> PlainAttention:
    """Attention in plain torch."""
    return PlainAttention()


def create_rounding(device: torch.device, shape: AttentionShape) -> Rounding:
    """The rounding in plain torch."""
    return round_into


def complete_kernels(attention: PagedAttention, device: torch.device, shape: AttentionShape) -> Kernels:
    """`attention` and all other parts in plain torch."""
    return replace(create_plain_kernels(), attention=attention)


def create_plain_kernels() -> Kernels:
    """All parts in plain torch."""
    return Kernels(
        attention=PlainAttention(),
        pointwise=PlainPointwise(),
        matrices=PlainMatrices(),
        sampling=PlainSampling(),
        latents=PlainLatents(),
    )
