"""Operations on rows in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.checkpoint.architectures.shape import Experts
from weft.ranks.comm import Group
from weft.ranks.kernels.attention import HeadNorm, KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.experts import choose_experts
from weft.ranks.kernels.staged import StagedStep, fill_batch


class PlainPointwise:
    """The implementation of `Pointwise` in plain torch."""

    def fill_batch(self, staged: StagedStep, batch: Batch) -> None:
        fill_batch(staged, batch)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * weight

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.norm(residual.add_(x), weight, eps)

    def sum_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: Group
    ) -> torch.Tensor:
        return self.add_norm(comm.sum(x), residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def choose_experts(
        self,
        scores: torch.Tensor,
        spec: Experts,
        slots: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return choose_experts(scores, spec, slots, correction)

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        kv_heads, head_dim = cache.keys.shape[2:]
        heads = qkv.view(qkv.shape[0], q_heads + 2 * kv_heads, head_dim)
        q, k, v = heads.split((q_heads, kv_heads, kv_heads), dim=1)
        if norm is not None:
            q, k = self.norm(q, norm.query, norm.eps), self.norm(k, norm.key, norm.eps)
        cos, sin = rope[batch.angle_rows].unsqueeze(1).chunk(2, dim=-1)
        # Both caches as rows of slots: [num_blocks * block_size, kv_heads, head_dim].
        cache.keys.flatten(0, 1).index_copy_(0, batch.slots, _rotate(k, cos, sin))
        cache.values.flatten(0, 1).index_copy_(0, batch.slots, v)
        return _rotate(q, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + head_dim/2) of x [T, heads, head_dim] by float32 angles, rounding once."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
