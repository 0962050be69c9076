"""Attention over paged KV, with a rank's share of the heads."""

from __future__ import annotations

import math

import torch

from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import Attention
from weft.ranks.kernels.attention import HeadNorm, KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.layers.rope import RopeTable
from weft.ranks.layers.weights import LayerWeights


class AttentionBlock:
    """Grouped-query attention. `rope` is the table of angles that layers with the same rotary embedding share."""

    def __init__(self, spec: Attention, place: Place, weights: LayerWeights, rope: RopeTable) -> None:
        assert spec.qk_norm in ("none", "head"), f"not computed: {spec}"
        self.spec, self.kernels, self.rope = spec, weights.kernels, rope
        self.q_heads = len(place.heads_of(spec.head_counts).q)
        self.qkv = weights.column_linear("attention.qkv")
        self.head_norm: HeadNorm | None = None
        if spec.qk_norm == "head":
            query, key = weights.norm("attention.q_norm"), weights.norm("attention.k_norm")
            self.head_norm = HeadNorm(query.weight, key.weight, query.eps)
        self.sinks = weights.vector("attention.sinks") if spec.sinks else None
        self.out = weights.row_linear("attention.out")

    def __call__(self, x: torch.Tensor, cache: KVCache, batch: Batch) -> torch.Tensor:
        """Attend: [T, hidden] -> [T, hidden], to be summed over the ranks. Writes keys and values into `cache`."""
        attention, pointwise = self.kernels.attention, self.kernels.pointwise
        qkv = self.qkv(x, batch)
        q = pointwise.rotate_and_store(qkv, self.q_heads, self.rope.angles, cache, batch, self.head_norm)
        if self.spec.logn is not None:
            q = q * logn_factors(batch.positions, self.spec.logn).to(q.dtype)[:, None, None]
        mixed = attention.attend(q, cache, batch, self.spec.scale, self.spec.window, sinks=self.sinks)
        return self.out(mixed, batch)


def logn_factors(positions: torch.Tensor, base: int) -> torch.Tensor:
    """Factors on queries by `Attention.logn`: [T] positions, from 0 -> [T] float32, 1 or more."""
    return ((positions + 1).log() / math.log(base)).clamp(min=1)
