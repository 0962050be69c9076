"""Latent attention in plain torch: the reference for tests of the fast kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from weft.ranks.kernels.attention import AttentionShape, KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.latents import AbsorbedQueries, ExpandedContext, LatentNorm, attend_padded
from weft.ranks.kernels.plain.attention import PlainAttention
from weft.ranks.kernels.warm import KernelLaunch


class PlainLatents:
    """The implementation of `LatentKernels` in plain torch."""

    def rotate_and_store(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        rope: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        norm: LatentNorm,
        *,
        interleaved: bool,
    ) -> None:
        rank = len(norm.weight)
        angles = rope[batch.angle_rows]
        normed = F.rms_norm(latents[:, :rank].float(), (rank,), eps=norm.eps).to(latents.dtype) * norm.weight
        rotated = rotate(latents[:, rank:], angles, interleaved)
        slots = cache.keys.flatten(0, 2)
        slots.index_copy_(0, batch.slots, torch.cat((normed, rotated), dim=1).to(slots.dtype))
        turned = q[..., q.shape[-1] - angles.shape[-1] :]
        turned.copy_(rotate(turned, angles[:, None], interleaved))

    def attend(
        self, q: AbsorbedQueries, cache: KVCache, batch: Batch, scale: float, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        mixed = PlainAttention().attend(q.joined(), cache, batch, scale, None, lse)
        return mixed.view(q.latent.shape)

    def attend_expanded(self, q: torch.Tensor, context: ExpandedContext, scale: float, out: torch.Tensor) -> None:
        attend_padded(PlainAttention(), q, context, scale, out)

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        return ()


def rotate(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate x [..., rope_dim] by float32 cosines and sines [..., rope_dim], rounding once. See
    `LatentKernels.rotate_and_store`."""
    cosines, sines = angles.chunk(2, dim=-1)
    wide = x.float()
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1).to(x.dtype)
