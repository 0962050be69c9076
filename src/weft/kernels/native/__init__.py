"""The CPU kernels in C++: compiled once for this machine where there is a compiler."""

from __future__ import annotations

import logging
import subprocess

import torch

from weft.errors import ConfigError
from weft.kernels.native.build import build
from weft.kernels.native.entries import NAMES
from weft.kernels.native.kernels import NativeKernels

__all__ = ["NAMES", "NativeKernels", "available", "build"]

logger = logging.getLogger("weft")

WIDEST_HEAD = 256  # as in attention.h: WIDEST
WIDEST_GROUP = 96  # as in attention.h: QUERIES


def available(dtype: torch.dtype, head_dim: int, group: int, *, required: bool = False) -> bool:
    """Whether these kernels can serve a model of this dtype, head_dim and query heads per KV head, and a
    compiler was found; with `required` the reason that they cannot is a ConfigError."""
    reason = None
    if dtype not in NAMES:
        reason = f"they know bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    elif head_dim > WIDEST_HEAD or group > WIDEST_GROUP:
        reason = f"head_dim {head_dim} with {group} query heads per KV head is beyond {WIDEST_HEAD} and {WIDEST_GROUP}"
    else:
        try:
            build(NAMES[dtype])
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
    if reason is None:
        return True
    if required:
        raise ConfigError(f"the compiled CPU kernels cannot be used: {reason}; --attention-backend torch always works")
    logger.warning("The compiled CPU kernels cannot be used: %s. The slower torch kernels take their place.", reason)
    return False
