"""Checks of whether kernels run on a device, and properties of the device that they depend on."""

from __future__ import annotations

import logging

import torch

from weft.errors import ConfigError
from weft.plan import backends

logger = logging.getLogger("weft")

AMPERE_SHARED_BYTES = 99 << 10


def check_usable(what: str, obstacle: str | None, *, required: bool, instead: str) -> bool:
    """Return True if there is no `obstacle` to using the kernels `what`.

    An obstacle to `required` kernels, which the user asked for, is raised as a ConfigError. Any other is logged, with
    what is used `instead`.
    """
    if obstacle is None:
        return True
    if required:
        raise ConfigError(backends.refusal(what, obstacle), code="backend-unusable")
    logger.warning("%s cannot be used: %s. %s.", what[0].upper() + what[1:], obstacle, instead)
    return False


def gpu_obstacle(device: torch.device) -> str | None:
    """Reason that kernels for GPUs do not run on a device, or None."""
    return None if device.type == "cuda" else f"they run on GPUs, not on {device.type}"


def flash_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason that FlashAttention does not run on a device, or None."""
    if obstacle := gpu_obstacle(device):
        return obstacle
    return backends.no_flash(str(dtype).removeprefix("torch."), gpu_cards(device))


def gpu_cards(device: torch.device) -> list[backends.Card]:
    """Name and compute capability of a GPU; an empty list for any other device."""
    if device.type != "cuda":
        return []
    return [(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))]


def multiprocessor_count(device: torch.device) -> int:
    """Number of a GPU's multiprocessors, over which work is spread; 1 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def shared_memory_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program on a GPU may ask for; else the least that any GPU since Ampere has."""
    if device.type != "cuda":
        return AMPERE_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    limit: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in torch's stubs
    return limit
