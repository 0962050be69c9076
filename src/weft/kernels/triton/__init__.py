"""The kernels in Triton, for GPUs; TRITON_INTERPRET=1 runs them on a CPU, for tests.

Triton itself is imported when they are made.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from weft.hardware.host import kernel_packages
from weft.kernels.base import Attention, AttentionShape, Kernels
from weft.kernels.usable import cards, off_gpu, processors, shared_bytes, usable
from weft.plan import backends

if TYPE_CHECKING:
    from weft.kernels.triton.attention import TritonAttention


def available(device: torch.device, head_dim: int, *, required: bool = False) -> bool:
    """Whether they run on the device; with `required` the reason that they cannot is a ConfigError."""
    instead = "The slower torch kernels take their place"
    return usable(backends.KERNELS["triton"], obstacle(device, head_dim), required=required, instead=instead)


def obstacle(device: torch.device, head_dim: int) -> str | None:
    """Why they do not run on the device, for a model with such heads."""
    if "triton" not in kernel_packages():
        return backends.NO_TRITON
    if os.environ.get("TRITON_INTERPRET") != "1" and (reason := off_gpu(device)):
        return f"{reason} (TRITON_INTERPRET=1 interprets them, for tests)"
    return backends.no_triton(head_dim, cards(device))


def own_attention(device: torch.device, shape: AttentionShape) -> TritonAttention:
    """Our own, in the sizes that were measured on the device, if any were."""
    from weft.kernels.triton import kept
    from weft.kernels.triton.attention import TritonAttention

    return TritonAttention(processors(device), kept.known(device, shape), shared_bytes(device))


def made(device: torch.device, attention: Attention | None = None) -> Kernels:
    """The kernels for a device, with `attention` in place of their own."""
    from weft.kernels.triton.attention import TritonAttention
    from weft.kernels.triton.kernels import TritonKernels

    own = attention or TritonAttention(processors(device), shared=shared_bytes(device))
    return TritonKernels(processors(device), own)
