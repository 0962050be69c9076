"""The CPU kernels in C++: compiled once for this machine if it has a compiler."""

from __future__ import annotations

import subprocess

import torch

from weft.kernels.native.kernels import NativeKernels
from weft.kernels.usable import check_usable
from weft.native import build
from weft.plan import backends

__all__ = ["NativeKernels", "native_available"]


def native_available(dtype: torch.dtype, head_dim: int, group: int, *, required: bool = False) -> bool:
    """Return True if these kernels can serve a model of this dtype, head_dim and query heads per KV head, and their
    library could be built and loaded. If not, the reason is logged, or with `required` raised as a ConfigError."""
    name = str(dtype).removeprefix("torch.")
    reason = build.native_obstacle(name, head_dim, group)
    if reason is None:
        try:
            build.load_library(name)
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
    instead = "The slower torch kernels take their place"
    return check_usable(backends.KERNELS["cpu"], reason, required=required, instead=instead)
