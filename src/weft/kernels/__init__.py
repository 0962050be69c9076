"""Attention over paged KV, and other work that is worth its own code."""

from __future__ import annotations

import torch

from weft.errors import ConfigError
from weft.kernels.base import Kernels
from weft.kernels.plain import PlainKernels

BACKENDS = ("auto", "torch", "cpu")


def choose(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> Kernels:
    """The kernels for a device: `auto` takes the fastest that runs there, and says so where it had to fall
    back. `group` is query heads per KV head."""
    if backend not in BACKENDS:
        raise ConfigError(f"attention backend {backend!r} is not known; known: {', '.join(BACKENDS)}")
    if backend != "torch" and device.type == "cpu":
        from weft.kernels.native import NativeKernels, available

        if available(dtype, head_dim, group, required=backend == "cpu"):
            return NativeKernels(dtype)
    return PlainKernels()
