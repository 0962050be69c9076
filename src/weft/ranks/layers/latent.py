"""Multi-head latent attention, with a rank's share of the heads."""

from __future__ import annotations

import torch

from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import LatentAttention
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.latents import LatentDims, LatentNorm, attend_by_latents
from weft.ranks.layers.rope import RopeTable
from weft.ranks.layers.weights import LayerWeights


class LatentAttentionBlock:
    """Latent attention. Every rank computes the latents of all tokens, and attends to them with its own heads.

    `rope` is the table of angles that layers with the same rotary embedding share.
    """

    def __init__(self, spec: LatentAttention, place: Place, weights: LayerWeights, rope: RopeTable) -> None:
        self.spec, self.kernels, self.rope = spec, weights.kernels, rope
        self.q_heads = len(place.heads_of(spec.head_counts).q)
        if spec.q_lora_rank is None:
            self.q_down = self.q_norm = None
            self.q_up = weights.column_linear("attention.q")
        else:
            self.q_down = weights.column_linear("attention.q_down")
            self.q_norm = weights.norm("attention.q_norm", eps=spec.norm_eps)
            self.q_up = weights.column_linear("attention.q_up")
        self.kv_down = weights.column_linear("attention.kv_down")
        self.kv_norm = LatentNorm(weights.norm("attention.kv_norm").weight, spec.norm_eps)
        self.kv_up = weights.latent_products("attention.kv_up", LatentDims.of(spec, self.q_heads))
        self.out = weights.row_linear("attention.out")

    def __call__(self, x: torch.Tensor, cache: KVCache, batch: Batch) -> torch.Tensor:
        """Attend: [T, hidden] -> [T, hidden], to be summed over the ranks. Writes latents into `cache`."""
        spec, kernels = self.spec, self.kernels
        q = self._queries(x, batch).view(len(x), self.q_heads, spec.head_dim)
        latents = self.kv_down(x, batch)
        kernels.latents.rotate_and_store(
            q, latents, self.rope.angles, cache, batch, self.kv_norm, interleaved=spec.interleaved
        )
        return self.out(attend_by_latents(kernels.latents, self.kv_up, q, cache, batch, spec.scale), batch)

    def _queries(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Queries of the rank's heads: [T, hidden] -> [T, heads * head_dim]."""
        if self.q_down is not None and self.q_norm is not None:
            x = self.q_norm(self.q_down(x, batch), self.kernels)
        return self.q_up(x, batch)
