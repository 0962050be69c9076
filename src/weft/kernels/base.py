"""Kernels: the operations of a decoder between its matrix products, behind one protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from weft.kernels.batch import Batch


@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values: [num_blocks, block_size, kv_heads, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm over head_dim of each query and key head, before the rotation (Qwen3): two [head_dim] weights."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Kernels(Protocol):
    """Inputs are bf16, fp16 or fp32 and contiguous along their last dim; sums are fp32 inside."""

    name: str

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm of x [T, hidden]."""
        ...

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x in place; RMS norm of the sum."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2F] -> [T, F]: silu of the first half times the second."""
        ...

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        """Rotate q and k of qkv [T, (q + 2 kv heads) * head_dim] by the table rows of their positions, after
        `norm` where there is one; write k and v to the batch's slots; return q [T, q_heads, head_dim]."""
        ...

    def attend(self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
        """Causal attention of every row over its own context, all rows in one call: [T, q_heads * head_dim]."""
        ...
