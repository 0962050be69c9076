"""A device as attention backends judge it, and properties of the device that kernels depend on."""

from __future__ import annotations

import os

import torch

from weft.machine.hardware.host import kernel_packages
from weft.plan.backends import Card, KernelDevice

AMPERE_SHARED_BYTES = 99 << 10


class UnusableError(Exception):
    """Kernels that cannot be used: the message is the reason."""


def kernel_device(device: torch.device) -> KernelDevice:
    """A device of this process."""
    return KernelDevice(
        cards=gpu_cards(device),
        packages=kernel_packages(),
        interpreted=os.environ.get("TRITON_INTERPRET") == "1",
    )


def gpu_cards(device: torch.device) -> list[Card]:
    """Name and compute capability of a GPU; an empty list for any other device."""
    if device.type != "cuda":
        return []
    return [(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))]


def multiprocessor_count(device: torch.device) -> int:
    """Number of a GPU's multiprocessors, over which work is spread; 1 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def has_warp_groups(device: torch.device) -> bool:
    """Return True if a GPU multiplies matrices by groups of four warps (wgmma), which Hopper alone does."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def shared_memory_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program on a GPU may ask for; else the least that any GPU since Ampere has."""
    if device.type != "cuda":
        return AMPERE_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    limit: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in torch's stubs
    return limit
