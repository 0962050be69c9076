"""The kernels in Triton, for GPUs; TRITON_INTERPRET=1 runs them on a CPU, for tests.

Triton itself is imported when they are created.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from weft.hardware.host import kernel_packages
from weft.kernels.base import Attention, AttentionShape, Kernels
from weft.kernels.usable import check_usable, gpu_cards, gpu_obstacle, multiprocessor_count, shared_memory_bytes
from weft.plan import backends

if TYPE_CHECKING:
    from weft.kernels.triton.attention import TritonAttention


def triton_available(device: torch.device, head_dim: int, *, required: bool = False) -> bool:
    """Return True if the Triton kernels run on the device. If not, the reason is logged, or with `required` raised as a
    ConfigError."""
    instead = "The slower torch kernels take their place"
    return check_usable(
        backends.KERNELS["triton"], triton_obstacle(device, head_dim), required=required, instead=instead
    )


def triton_obstacle(device: torch.device, head_dim: int) -> str | None:
    """Reason that the Triton kernels do not run on the device, for a model of this head_dim, or None."""
    if "triton" not in kernel_packages():
        return backends.NO_TRITON
    if os.environ.get("TRITON_INTERPRET") != "1" and (reason := gpu_obstacle(device)):
        return f"{reason} (TRITON_INTERPRET=1 interprets them, for tests)"
    return backends.no_triton(head_dim, gpu_cards(device))


def create_triton_attention(device: torch.device, shape: AttentionShape) -> TritonAttention:
    """Triton's attention, in the tile sizes that were measured on the device, if any were."""
    from weft.kernels.triton import saved_tunings
    from weft.kernels.triton.attention import TritonAttention

    return TritonAttention(
        multiprocessor_count(device), saved_tunings.load_tunings(device, shape), shared_memory_bytes(device)
    )


def create_triton_kernels(device: torch.device, attention: Attention | None = None) -> Kernels:
    """The Triton kernels for a device, with `attention` in place of their own if it is given."""
    from weft.kernels.triton.attention import TritonAttention
    from weft.kernels.triton.kernels import TritonMatrices, TritonPointwise, TritonSampling

    processors = multiprocessor_count(device)
    return Kernels(
        attention=attention or TritonAttention(processors, shared=shared_memory_bytes(device)),
        pointwise=TritonPointwise(),
        matrices=TritonMatrices(processors),
        sampling=TritonSampling(device),
    )
