"""Operations on rows in C++."""

from __future__ import annotations

import ctypes

import torch

from weft.checkpoint.architectures.shape import Experts
from weft.machine.native.entries import Entries
from weft.ranks.comm import Group
from weft.ranks.kernels.attention import HeadNorm, KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.native.experts import describe_routing
from weft.ranks.kernels.staged import StagedStep, fill_batch


class NativePointwise:
    """The C++ implementation of `Pointwise`."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def fill_batch(self, staged: StagedStep, batch: Batch) -> None:
        fill_batch(staged, batch)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._entries.norm(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
        return out

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        self._entries.norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps)
        return out

    def sum_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: Group
    ) -> torch.Tensor:
        return self.add_norm(comm.sum(x), residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, width)
        self._entries.silu_mul(gate_up.data_ptr(), out.data_ptr(), tokens, width)
        return out

    def choose_experts(
        self,
        scores: torch.Tensor,
        spec: Experts,
        slots: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert slots is None, "a CPU has no CUDA graphs"
        tokens, count = scores.shape
        chosen = torch.empty(tokens, spec.top_k, dtype=torch.int64)
        shares = torch.empty(tokens, spec.top_k, dtype=torch.float32)
        self._entries.choose_experts(
            scores.data_ptr(),
            count,
            tokens,
            ctypes.byref(describe_routing(spec, correction)),
            chosen.data_ptr(),
            shares.data_ptr(),
        )
        return chosen, shares

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        tokens, (kv_heads, head_dim) = qkv.shape[0], cache.keys.shape[2:]
        q = qkv.new_empty(tokens, q_heads, head_dim)
        self._entries.rotate_and_store(
            qkv.data_ptr(),
            q.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            rope.data_ptr(),
            batch.angle_rows.data_ptr(),
            batch.slots.data_ptr(),
            norm.query.data_ptr() if norm else None,
            norm.key.data_ptr() if norm else None,
            norm.eps if norm else 0.0,
            tokens,
            q_heads,
            kv_heads,
            head_dim,
            cache.block_size,
        )
        return q
