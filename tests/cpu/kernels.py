"""Kernels of each kind, for tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cpu.attention import shaped
from weft.machine.native.build import build_library, load_library
from weft.machine.native.entries import Entries
from weft.machine.native.prebuilt import WIDE_VECTORS, cpu_features
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.native import complete_kernels, create_attention
from weft.ranks.kernels.native.matrices import NativeMatrices

CPU = torch.device("cpu")


def built(dtype: str) -> Path:
    """The library of the CPU kernels; a test is skipped if there is no compiler."""
    try:
        return build_library(dtype)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def native(dtype: torch.dtype, *, fixed_order: bool = False, head_dim: int = 64) -> Kernels:
    """The compiled CPU kernels."""
    built(str(dtype).removeprefix("torch."))
    shape = shaped(dtype, head_dim, fixed_order=fixed_order)
    return complete_kernels(create_attention(CPU, shape), CPU, shape)


def narrow_matrices(dtype: torch.dtype) -> NativeMatrices:
    """Products of the compiled CPU kernels with vectors of at most 256 bits."""
    name = str(dtype).removeprefix("torch.")
    built(name)
    return NativeMatrices(Entries(load_library(name, WIDE_VECTORS in cpu_features()), name, torch.get_num_threads))


def triton_kernels(
    processors: int = 1,
    device: torch.device = CPU,
    *,
    fp8_units: bool = False,
    shared: int = 99 << 10,
    warp_groups: bool = False,
) -> Kernels:
    """The Triton kernels, as on a GPU with this number of multiprocessors, and bytes of shared memory for a program."""
    from weft.ranks.kernels.triton.attention import TritonAttention
    from weft.ranks.kernels.triton.kernels import TritonMatrices, TritonPointwise, TritonSampling
    from weft.ranks.kernels.triton.latents import TritonLatents

    return Kernels(
        attention=TritonAttention(processors, shared=shared),
        pointwise=TritonPointwise(),
        matrices=TritonMatrices(processors, fp8_units=fp8_units),
        sampling=TritonSampling(device),
        latents=TritonLatents(processors, shared, warp_groups=warp_groups),
    )
