"""RMS norm, SiLU and rotary embedding: the operations between products, each one pass over the tokens.

The norm may take the sum over ranks that read each other's memory in the same pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ranks.kernels.attention import HeadNorm, KVCache
from weft.ranks.kernels.batch import Batch

COLUMNS = 1024  # columns of the MLP that one program of silu_mul computes
# Heads that one program rotates. With one head each, starting programs takes longer than moving their bytes; with all
# heads of a token, a step of one row would use a single multiprocessor.
HEADS = 8
ALIGNMENT = tl.constexpr(16)  # bytes; a part begins at a multiple of it


@triton.jit
def rms_normed(value, weight, columns, inside, width, eps):
    """RMS norm of one row, rounded like the plain kernels'."""
    exact = value.to(tl.float32)
    scaled = exact * tl.rsqrt(tl.sum(exact * exact, 0) / width + eps)
    gain = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    return (scaled.to(value.dtype).to(tl.float32) * gain).to(value.dtype)


@triton.jit
def _rms_norm(x, residual, weight, out, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row * width + columns, inside, other=0.0)
    if ADD:
        held = tl.load(residual + row * width + columns, inside, other=0.0)
        # Rounded before the norm, which then sees the same residual as the next layer.
        value = (value.to(tl.float32) + held.to(tl.float32)).to(held.dtype)
        tl.store(residual + row * width + columns, value, inside)
    tl.store(out + row * width + columns, rms_normed(value, weight, columns, inside, width, eps), inside)


def norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of x [T, width], or of the residual, after x was added to it in place."""
    out, width = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(width)
    _rms_norm[(x.numel() // width,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        width,
        eps,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=norm_warps(block),
    )
    return out


def norm_warps(block: int) -> int:
    """Number of warps of a program that computes a row of `block` columns."""
    return 8 if block >= 4096 else 4


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + columns, inside, other=0.0)
    exact = gate.to(tl.float32)
    active = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype)
    tl.store(out + row * width + columns, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of the columns times the second half: [T, 2F] -> [T, F]."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    _silu_mul[(tokens, triton.cdiv(width, COLUMNS))](gate_up, out, width, BLOCK=COLUMNS)
    return out


@triton.jit
def _half_norm(a, b, first, second, half, eps):
    """RMS norm of heads whose halves are a and b [HEADS, BLOCK], with the weights `first` and `second` of the halves,
    rounded like the plain kernels'."""
    x, y = a.to(tl.float32), b.to(tl.float32)
    rate = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * half) + eps)[:, None]
    a = ((x * rate).to(a.dtype).to(tl.float32) * first).to(a.dtype)
    b = ((y * rate).to(b.dtype).to(tl.float32) * second).to(b.dtype)
    return a, b


@triton.jit
def _head_weights(q_norm, k_norm, is_query, columns, inside):
    """Weights of the norms of heads, of queries if `is_query` and else of keys: [HEADS, BLOCK] float32."""
    of_query = tl.load(q_norm + columns, inside, other=0.0).to(tl.float32)
    of_key = tl.load(k_norm + columns, inside, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], of_query[None, :], of_key[None, :])


@triton.jit
def _store_halves(start, target, a, b, columns, half, mask):
    tl.store(start + target[:, None] + columns[None, :], a.to(start.dtype.element_ty), mask)
    tl.store(start + target[:, None] + half + columns[None, :], b.to(start.dtype.element_ty), mask)


@triton.jit
def _rotate_and_store(
    qkv, q, keys, values, rope, angle_rows, slots, q_norm, k_norm, eps, q_heads, kv_heads, half,
    NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    inside, heads = columns < half, q_heads + 2 * kv_heads
    is_query, is_rotated = head < q_heads, head < q_heads + kv_heads
    exists = (head < heads)[:, None] & inside[None, :]
    source = qkv + (token * heads + head)[:, None] * 2 * half + columns[None, :]
    a, b = tl.load(source, exists, other=0.0), tl.load(source + half, exists, other=0.0)
    slot = tl.load(slots + token)
    angles = rope + tl.load(angle_rows + token).to(tl.int64) * 2 * half
    cos = tl.load(angles + columns, inside, other=0.0)[None, :]
    sin = tl.load(angles + half + columns, inside, other=0.0)[None, :]
    c, d = a, b
    if NORM:
        first = _head_weights(q_norm, k_norm, is_query, columns, inside)
        second = _head_weights(q_norm + half, k_norm + half, is_query, columns, inside)
        c, d = _half_norm(a, b, first, second, half, eps)
    x, y = c.to(tl.float32), d.to(tl.float32)
    a = tl.where(is_rotated[:, None], (x * cos - y * sin).to(a.dtype), a)
    b = tl.where(is_rotated[:, None], (y * cos + x * sin).to(b.dtype), b)
    _store_halves(q, (token * q_heads + head) * 2 * half, a, b, columns, half, exists & is_query[:, None])
    if keys.dtype.element_ty == tl.float8e4nv:
        # The greatest number of this type is 448; larger ones would become NaN.
        a, b = tl.clamp(a.to(tl.float32), -448.0, 448.0), tl.clamp(b.to(tl.float32), -448.0, 448.0)
    # A padding row of a captured batch has slot -1, so that its indices are negative.
    key, value = slot * kv_heads + head - q_heads, slot * kv_heads + head - q_heads - kv_heads
    written = (head >= q_heads) & (key >= 0) & is_rotated
    _store_halves(keys, key * 2 * half, a, b, columns, half, exists & written[:, None])
    written = (head >= q_heads + kv_heads) & (value >= 0)
    _store_halves(values, value * 2 * half, a, b, columns, half, exists & written[:, None])


def rotate_and_store(
    qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, head_norm: HeadNorm | None
) -> torch.Tensor:
    """`Kernels.rotate_and_store` in one launch. Nothing is stored for slots below 0."""
    tokens, (kv_heads, head_dim) = qkv.shape[0], cache.keys.shape[2:]
    q = qkv.new_empty(tokens, q_heads, head_dim)
    weights = (head_norm.query, head_norm.key) if head_norm else (qkv, qkv)
    _rotate_and_store[(tokens, triton.cdiv(q_heads + 2 * kv_heads, HEADS))](
        qkv,
        q,
        cache.keys,
        cache.values,
        rope,
        batch.angle_rows,
        batch.slots,
        *weights,
        head_norm.eps if head_norm else 0.0,
        q_heads,
        kv_heads,
        head_dim // 2,
        NORM=head_norm is not None,
        HEADS=HEADS,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
    )
    return q


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
