"""The kernels in plain torch: they run on every device, and are the reference for tests of the fast ones."""

from __future__ import annotations

from weft.kernels.base import Kernels
from weft.kernels.plain.attention import PlainAttention
from weft.kernels.plain.matrices import PlainMatrices
from weft.kernels.plain.pointwise import PlainPointwise
from weft.kernels.plain.sampling import PlainSampling

__all__ = ["PlainAttention", "PlainMatrices", "PlainPointwise", "PlainSampling", "create_plain_kernels"]


def create_plain_kernels() -> Kernels:
    """All parts in plain torch."""
    return Kernels(
        attention=PlainAttention(),
        pointwise=PlainPointwise(),
        matrices=PlainMatrices(),
        sampling=PlainSampling(),
    )
