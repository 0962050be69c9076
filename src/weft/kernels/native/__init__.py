"""The CPU kernels in C++: compiled once for this machine if it has a compiler."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import torch

from weft.comm import Comm
from weft.kernels.base import DenseLayer, FusedStage, Kernels
from weft.kernels.native.attention import NativeAttention
from weft.kernels.native.entries import load_entries
from weft.kernels.native.matrix import NativeMatrices
from weft.kernels.native.pointwise import NativePointwise
from weft.kernels.native.sampling import NativeSampling
from weft.kernels.native.stage import NativeStage
from weft.kernels.usable import check_usable
from weft.native import build
from weft.plan import backends


def create_native_kernels(dtype: torch.dtype) -> Kernels:
    """All parts in C++, for contiguous tensors on the CPU in `dtype`, which is bf16 or fp32. Raises what `load_entries`
    raises."""
    entries = load_entries(dtype)

    def fuse_layers(layers: Sequence[DenseLayer], comm: Comm) -> FusedStage | None:
        return NativeStage(entries, layers, comm)

    return Kernels(
        attention=NativeAttention(entries),
        pointwise=NativePointwise(entries),
        matrices=NativeMatrices(entries),
        sampling=NativeSampling(entries),
        fuse_layers=fuse_layers,
    )


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
