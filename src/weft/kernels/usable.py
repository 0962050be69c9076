"""Whether kernels can be used, told to whoever asked for them."""

from __future__ import annotations

import logging

import torch

from weft.errors import ConfigError

logger = logging.getLogger("weft")

FLASH_CAPABILITY = (8, 0)  # of a GPU that FlashAttention's second version, in torch as in FlashInfer, is written for
FLASH_DTYPES = (torch.bfloat16, torch.float16)


def usable(what: str, obstacle: str | None, *, required: bool, instead: str) -> bool:
    """Whether there is no `obstacle`: one is a ConfigError for kernels that the user asked for, else a line of the log
    that says what is used `instead`."""
    if obstacle is None:
        return True
    if required:
        raise ConfigError(f"{what} cannot be used: {obstacle}; --attention-backend torch always works")
    logger.warning("%s cannot be used: %s. %s.", what[0].upper() + what[1:], obstacle, instead)
    return False


def off_gpu(device: torch.device) -> str | None:
    """Why kernels for GPUs do not run on a device."""
    return None if device.type == "cuda" else f"they run on GPUs, not on {device.type}"


def no_flash(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashAttention does not run there."""
    obstacle = off_gpu(device)
    if obstacle is None and dtype not in FLASH_DTYPES:
        obstacle = f"they compute in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    if obstacle is None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FLASH_CAPABILITY:
            obstacle = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, "
            obstacle += f"and they need {FLASH_CAPABILITY[0]}.{FLASH_CAPABILITY[1]}"
    return obstacle


def processors(device: torch.device) -> int:
    """A GPU's multiprocessors, which work is spread over."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
