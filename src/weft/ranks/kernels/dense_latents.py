"""Projections of latents in torch, on any device: the reference for the fast ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.ranks.kernels.latents import AbsorbedQueries, LatentDims
from weft.ranks.quant.dense import dense_weight
from weft.ranks.quant.quantised import QuantisedWeight


class DenseLatentProducts:
    """`LatentProducts` in torch. The weight is held once: [heads, nope_dim + value_dim,
    rank]."""

    def __init__(self, weight: torch.Tensor | QuantisedWeight, dims: LatentDims) -> None:
        self.dims = dims
        self.weight = dense_weight(weight).view(dims.heads, dims.nope_dim + dims.value_dim, dims.rank)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.weight,)

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        self.weight.copy_(dense_weight(weight).view_as(self.weight))

    def absorb(self, q: torch.Tensor) -> AbsorbedQueries:
        nope = self.dims.nope_dim
        latent = q.new_empty(q.shape[0], self.dims.heads, self.dims.rank)
        torch.bmm(q[..., :nope].transpose(0, 1), self.weight[:, :nope], out=latent.transpose(0, 1))
        return AbsorbedQueries(latent, q[..., nope:])

    def values(self, mixed: torch.Tensor) -> torch.Tensor:
        projection = self.weight[:, self.dims.nope_dim :].transpose(1, 2)
        out = mixed.new_empty(mixed.shape[0], self.dims.heads, self.dims.value_dim)
        torch.bmm(mixed.transpose(0, 1), projection, out=out.transpose(0, 1))
        return out.flatten(1)

    def expand(self, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        some, rank = self.weight[heads], self.dims.rank
        both = F.linear(latents[:, :rank], some.flatten(0, 1)).view(len(latents), len(some), -1)
        keys, values = both.split((self.dims.nope_dim, self.dims.value_dim), dim=-1)
        return keys, values
