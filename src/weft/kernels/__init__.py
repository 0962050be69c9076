"""Kernels: implementations of a decoder's operations for CPUs and GPUs, and the choice among them."""

from __future__ import annotations

import torch

from weft.kernels.base import Attention, AttentionShape, Kernels
from weft.kernels.plain import create_plain_kernels
from weft.plan.backends import ATTENTION_BACKENDS, GPU_BACKENDS
from weft.quant.rounding import Rounding, round_into


def create_kernels(backend: str, device: torch.device, shape: AttentionShape) -> Kernels:
    """Create the kernels for a device. `backend` is one of ATTENTION_BACKENDS.

    `auto` takes the fastest that runs there, and logs a fallback. Raises ConfigError if another one cannot be used.
    """
    assert backend in ATTENTION_BACKENDS, backend
    if backend in ("auto", "cpu") and device.type == "cpu":
        from weft.kernels.native import create_native_kernels, native_available

        if native_available(shape.dtype, shape.head_dim, shape.group, required=backend == "cpu"):
            return create_native_kernels(shape.dtype)
    if backend in GPU_BACKENDS or (backend == "auto" and device.type == "cuda"):
        from weft.kernels import triton

        if triton.triton_available(device, shape.head_dim, required=backend != "auto"):
            return _on_gpu(backend, device, shape)
    return create_plain_kernels()


def create_rounding(backend: str, device: torch.device, shape: AttentionShape) -> Rounding:
    """The function that rounds weights for these kernels, which need not be compiled yet."""
    if backend in ("auto", "cpu") and device.type == "cpu":
        from weft.kernels.native.rounding import create_native_rounding

        return create_native_rounding(shape.dtype, shape.head_dim, shape.group)
    if device.type == "cuda" and backend != "torch":
        from weft.kernels import triton

        if triton.triton_obstacle(device, shape.head_dim) is None:
            from weft.kernels.triton.rounding import round_on_gpu

            return round_on_gpu
    return round_into


def _on_gpu(backend: str, device: torch.device, shape: AttentionShape) -> Kernels:
    """Triton's kernels, with attention by another library if the user asked for it or it is faster."""
    from weft.kernels import flashinfer, triton, varlen

    attention: Attention | None
    if backend == "auto":
        attention = _fastest(device, shape)
    elif backend == "varlen":
        attention = varlen.create_varlen_attention(device, shape)
    elif backend == "flashinfer":
        attention = flashinfer.create_flashinfer_attention(device, shape, required=True)
    else:
        attention = triton.create_triton_attention(device, shape)
    return triton.create_triton_kernels(device, attention)


def _fastest(device: torch.device, shape: AttentionShape) -> Attention:
    """Triton's attention, or FlashInfer's if that is installed and faster, now or when it was measured."""
    from weft.kernels import contest, flashinfer, triton

    ours, version = triton.create_triton_attention(device, shape), flashinfer.installed_version()
    if version is None:
        return ours
    path = contest.winner_path(device, shape, version, ours.tunings)
    best = contest.load_winner(path)
    if best == ours.name:
        return ours
    theirs = flashinfer.create_flashinfer_attention(device, shape, required=False)
    if theirs is None:
        return ours
    if best is None:
        best = contest.measure_fastest((theirs, ours), device, shape)
        contest.save_winner(path, best)
    return theirs if best == theirs.name else ours
