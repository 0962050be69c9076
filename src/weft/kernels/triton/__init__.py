"""The kernels in Triton, for GPUs; TRITON_INTERPRET=1 runs them on a CPU, for tests.

Triton itself is imported when they are made.
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec

import torch

from weft.errors import ConfigError
from weft.kernels.base import Kernels

logger = logging.getLogger("weft")


def available(device: torch.device, *, required: bool = False) -> bool:
    """Whether they run on the device; with `required` the reason that they cannot is a ConfigError."""
    reason = None
    if find_spec("triton") is None:
        reason = "the package triton is not installed"
    elif device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        reason = f"they run on GPUs, not on {device.type} (TRITON_INTERPRET=1 interprets them, for tests)"
    if reason is None:
        return True
    if required:
        raise ConfigError(f"the Triton kernels cannot be used: {reason}; --attention-backend torch always works")
    logger.warning("The Triton kernels cannot be used: %s. The slower torch kernels take their place.", reason)
    return False


def made(device: torch.device) -> Kernels:
    """The kernels for a device."""
    from weft.kernels.triton.kernels import TritonKernels

    cuda = device.type == "cuda"
    return TritonKernels(torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1)
