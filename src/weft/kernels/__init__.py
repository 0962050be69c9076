"""Attention over paged KV, and other work that is worth its own code."""

from __future__ import annotations

import torch

from weft.kernels.base import Kernels
from weft.kernels.plain import PlainKernels
from weft.planner.plan import ATTENTION_BACKENDS


def choose(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> Kernels:
    """The kernels for a device, `backend` one of ATTENTION_BACKENDS: `auto` takes the fastest that runs there, and
    says so where it had to fall back. `group` is query heads per KV head."""
    assert backend in ATTENTION_BACKENDS, backend
    if backend in ("auto", "cpu") and device.type == "cpu":
        from weft.kernels.native import NativeKernels, available

        if available(dtype, head_dim, group, required=backend == "cpu"):
            return NativeKernels(dtype)
    if backend == "triton" or (backend == "auto" and device.type == "cuda"):
        from weft.kernels import triton

        if triton.available(device, required=backend == "triton"):
            return triton.made(device)
    return PlainKernels()
