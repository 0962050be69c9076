"""Whether kernels can be used, told to whoever asked for them."""

from __future__ import annotations

import logging

import torch

from weft.errors import ConfigError
from weft.plan import backends

logger = logging.getLogger("weft")

AMPERE_SHARED_BYTES = 99 << 10


def check_usable(what: str, obstacle: str | None, *, required: bool, instead: str) -> bool:
    """Whether there is no `obstacle`: one is a ConfigError for kernels that the user asked for, else a line of the log
    that says what is used `instead`."""
    if obstacle is None:
        return True
    if required:
        raise ConfigError(backends.refusal(what, obstacle))
    logger.warning("%s cannot be used: %s. %s.", what[0].upper() + what[1:], obstacle, instead)
    return False


def gpu_obstacle(device: torch.device) -> str | None:
    """Why kernels for GPUs do not run on a device."""
    return None if device.type == "cuda" else f"they run on GPUs, not on {device.type}"


def flash_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashAttention does not run there."""
    if obstacle := gpu_obstacle(device):
        return obstacle
    return backends.no_flash(str(dtype).removeprefix("torch."), gpu_cards(device))


def gpu_cards(device: torch.device) -> list[backends.Card]:
    """A GPU by its name and compute capability; none for any other device."""
    if device.type != "cuda":
        return []
    return [(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))]


def multiprocessor_count(device: torch.device) -> int:
    """A GPU's multiprocessors, which work is spread over."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that a program on a GPU may ask for; elsewhere the least that any since Ampere has."""
    if device.type != "cuda":
        return AMPERE_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    limit: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # lacks in its types
    return limit
