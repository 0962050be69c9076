"""The sum over ranks that read each other's memory, fused with the residual and the RMS norm that follow it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ranks.kernels.triton.pointwise import norm_warps, rms_normed

ALIGNMENT = tl.constexpr(16)  # bytes; a part begins at a multiple of it


@triton.jit
def _sum_add_norm(parts, residual, weight, out, width, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    held = tl.load(residual + row * width + columns, inside, other=0.0)
    # All addresses first, so that their loads overlap.
    begins = ()
    for rank in tl.static_range(SIZE):
        begins += (tl.multiple_of(tl.load(parts + rank).to(residual.dtype), ALIGNMENT),)
    # In the order of ranks, so that every rank gets the same bits, and rounded once, like `add_up` in
    # ranks/comm/base.py.
    total = tl.load(begins[0] + row * width + columns, inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, SIZE):
        total += tl.load(begins[rank] + row * width + columns, inside, other=0.0).to(tl.float32)
    value = (total.to(held.dtype).to(tl.float32) + held.to(tl.float32)).to(held.dtype)
    tl.store(residual + row * width + columns, value, inside)
    tl.store(out + row * width + columns, rms_normed(value, weight, columns, inside, width, eps), inside)


def sum_add_norm(parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual [T, width] += the sum of the tensors at the addresses `parts` [ranks] int64, of the same dims and dtype,
    in place; return its RMS norm."""
    out, width = torch.empty_like(residual), residual.shape[-1]
    block = triton.next_power_of_2(width)
    _sum_add_norm[(residual.numel() // width,)](
        parts, residual, weight, out, width, eps, SIZE=len(parts), BLOCK=block, num_warps=norm_warps(block)
    )
    return out
