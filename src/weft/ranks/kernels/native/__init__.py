"""The CPU kernels in C++: compiled once for this machine if it has a compiler."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import torch

from weft.machine.native.entries import Entries
from weft.ranks.comm import Group
from weft.ranks.kernels.attention import AttentionShape, PagedAttention
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.fused import FusedLayer, FusedStage
from weft.ranks.kernels.native.attention import NativeAttention
from weft.ranks.kernels.native.entries import load_entries
from weft.ranks.kernels.native.latents import NativeLatents
from weft.ranks.kernels.native.matrices import NativeMatrices
from weft.ranks.kernels.native.pointwise import NativePointwise
from weft.ranks.kernels.native.rounding import NativeRounding
from weft.ranks.kernels.native.sampling import NativeSampling
from weft.ranks.kernels.native.stage import NativeStage, can_fuse
from weft.ranks.kernels.usable import UnusableError
from weft.ranks.quant.rounding import Rounding


def create_attention(device: torch.device, shape: AttentionShape) -> NativeAttention:
    """Attention in C++. Raises UnusableError if the library cannot be built or loaded."""
    try:
        return NativeAttention(_entries_for(shape))
    except (OSError, subprocess.SubprocessError) as error:
        raise UnusableError(str(error)) from error


def create_rounding(device: torch.device, shape: AttentionShape) -> Rounding:
    """The rounding in C++."""
    return NativeRounding(shape.dtype)


def complete_kernels(attention: PagedAttention, device: torch.device, shape: AttentionShape) -> Kernels:
    """`attention` and all other parts in C++, for contiguous tensors on the CPU. Raises what `load_entries` raises."""
    entries = _entries_for(shape)

    def fuse_layers(layers: Sequence[FusedLayer], comm: Group) -> FusedStage | None:
        return NativeStage(entries, layers, comm) if can_fuse(layers, comm) else None

    return Kernels(
        attention=attention,
        pointwise=NativePointwise(entries),
        matrices=NativeMatrices(entries),
        sampling=NativeSampling(entries),
        latents=NativeLatents(entries, attention),
        fuse_layers=fuse_layers,
    )


def _entries_for(shape: AttentionShape) -> Entries:
    return load_entries(shape.dtype, fixed_order=shape.fixed_order, head_dim=shape.head_dim)
