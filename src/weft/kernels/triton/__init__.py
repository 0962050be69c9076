"""The kernels in Triton, for GPUs; TRITON_INTERPRET=1 runs them on a CPU, for tests.

Triton itself is imported when they are made.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from weft.kernels.base import Attention, Kernels
from weft.kernels.usable import off_gpu, processors, usable


def available(device: torch.device, *, required: bool = False) -> bool:
    """Whether they run on the device; with `required` the reason that they cannot is a ConfigError."""
    obstacle = None
    if find_spec("triton") is None:
        obstacle = "the package triton is not installed"
    elif os.environ.get("TRITON_INTERPRET") != "1" and (obstacle := off_gpu(device)):
        obstacle += " (TRITON_INTERPRET=1 interprets them, for tests)"
    instead = "The slower torch kernels take their place"
    return usable("the Triton kernels", obstacle, required=required, instead=instead)


def made(device: torch.device, attention: Attention | None = None) -> Kernels:
    """The kernels for a device, with `attention` in place of their own."""
    from weft.kernels.triton.kernels import TritonKernels

    return TritonKernels(processors(device), attention)
