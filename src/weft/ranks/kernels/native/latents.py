"""Latent attention in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.machine.native.entries import Entries
from weft.machine.native.structures import LatentProjectionDescriptor
from weft.ranks.kernels.attention import AttentionShape, KVCache, PagedAttention
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.latents import AbsorbedQueries, ExpandedContext, LatentDims, LatentNorm, attend_padded
from weft.ranks.kernels.matrices import ExpertStack
from weft.ranks.kernels.native.experts import NativeStack, pack_stack
from weft.ranks.kernels.warm import KernelLaunch
from weft.ranks.quant.dense import dense_weight
from weft.ranks.quant.quantised import QuantisedWeight


class NativeLatents:
    """The C++ implementation of `LatentKernels`; `attention` is used in the expanded form."""

    def __init__(self, entries: Entries, attention: PagedAttention) -> None:
        self._entries, self._attention = entries, attention

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
        (tokens, heads, head_dim), rank = q.shape, len(norm.weight)
        rope_dim = latents.shape[1] - rank
        self._entries.store_latents(
            q.data_ptr(),
            latents.data_ptr(),
            cache.keys.data_ptr(),
            rope.data_ptr(),
            batch.angle_rows.data_ptr(),
            batch.slots.data_ptr(),
            norm.weight.data_ptr(),
            norm.eps,
            interleaved,
            tokens,
            heads,
            rank,
            rope_dim,
            head_dim - rope_dim,
        )

    def attend(
        self, q: AbsorbedQueries, cache: KVCache, batch: Batch, scale: float, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        joined = q.joined()
        (tokens, heads, width), rank = joined.shape, cache.values.shape[3]
        out = joined.new_empty(tokens, heads, rank)
        self._entries.attend_latents(
            joined.data_ptr(),
            cache.keys.data_ptr(),
            out.data_ptr(),
            batch.row_starts.data_ptr(),
            batch.context.data_ptr(),
            batch.tables.data_ptr(),
            batch.tables.shape[1],
            batch.rows,
            cache.block_size,
            heads,
            rank,
            width,
            scale,
            None if lse is None else lse.data_ptr(),
        )
        return out

    def attend_expanded(self, q: torch.Tensor, context: ExpandedContext, scale: float, out: torch.Tensor) -> None:
        attend_padded(self._attention, q, context, scale, out)

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        return ()


@dataclass(frozen=True)
class NativeLatentProducts:
    """`LatentProducts` in C++. The descriptor points into the stacks: `keys` are matrices [nope_dim, rank] of all
    heads, `projected` are those [value_dim, rank] of their values."""

    entries: Entries
    dims: LatentDims
    descriptor: LatentProjectionDescriptor
    keys: NativeStack
    projected: NativeStack

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self.keys.tensors, *self.projected.tensors)

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        for stack, part in zip((self.keys, self.projected), split_projection(weight, self.dims), strict=True):
            stack.replace(part)

    def absorb(self, q: torch.Tensor) -> AbsorbedQueries:
        q, tokens = q.contiguous(), q.shape[0]
        out = q.new_empty(tokens, self.dims.heads, self.dims.rank + self.dims.rope_dim)
        self.entries.absorb(ctypes.byref(self.descriptor), q.data_ptr(), tokens, out.data_ptr())
        return AbsorbedQueries.of(out, self.dims.rank)

    def values(self, mixed: torch.Tensor) -> torch.Tensor:
        out = mixed.new_empty(mixed.shape[0], self.dims.heads * self.dims.value_dim)
        self.entries.latent_values(ctypes.byref(self.descriptor), mixed.data_ptr(), mixed.shape[0], out.data_ptr())
        return out

    def expand(self, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        first, last, _ = heads.indices(self.dims.heads)
        keys = latents.new_empty(len(latents), last - first, self.dims.nope_dim + self.dims.rope_dim)
        values = latents.new_empty(len(latents), last - first, self.dims.value_dim)
        self.entries.expand_latents(
            ctypes.byref(self.descriptor),
            latents.data_ptr(),
            len(latents),
            first,
            last - first,
            keys.data_ptr(),
            values.data_ptr(),
        )
        return keys[..., : self.dims.nope_dim], values


def pack_latent_products(
    entries: Entries, weight: torch.Tensor | QuantisedWeight, dims: LatentDims
) -> NativeLatentProducts:
    """Pack the projection from latents to the keys and values of all heads."""
    keys, values = (pack_stack(entries, ExpertStack("", part, None)) for part in split_projection(weight, dims))
    descriptor = LatentProjectionDescriptor(keys.descriptor, values.descriptor, dims.heads, dims.rope_dim)
    return NativeLatentProducts(entries, dims, descriptor, keys, values)


def split_projection(weight: torch.Tensor | QuantisedWeight, dims: LatentDims) -> Sequence[torch.Tensor]:
    """The dense projection as [heads, nope_dim, rank] and [heads, value_dim, rank]."""
    heads = dense_weight(weight).view(dims.heads, dims.nope_dim + dims.value_dim, dims.rank)
    return heads.split((dims.nope_dim, dims.value_dim), dim=1)
