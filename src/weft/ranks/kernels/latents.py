"""Multi-head latent attention (DeepSeek-V2, 2024): the protocols of its kernels, and the choice between its two forms.

A token's latent has `rank` + `rope_dim` values: a vector from which keys and values of all heads are projected, and a
rotated part that all keys share. A layer's cache has the latents alone: `KVCache.of_latents`.

The absorbed form works on latents: queries are projected to their space, and the mixed latents to values. The expanded
form projects the latents of a context to keys and values first. That costs as much for one query as for many, so the
expanded form is for rows of many tokens, the absorbed one for all others, decode rows above all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from weft.checkpoint.architectures.shape import LatentAttention
from weft.plan import memory
from weft.ranks.kernels.attention import AttentionShape, KVCache, PagedAttention
from weft.ranks.kernels.batch import Batch, ExpandedRow
from weft.ranks.kernels.warm import KernelLaunch

EXPANDED_BLOCK = 8  # positions of a block of expanded keys and values


@dataclass(frozen=True)
class LatentNorm:
    """RMS norm over the first `rank` values of a latent, or over the compressed queries: its weight."""

    weight: torch.Tensor
    eps: float


class LatentDims(NamedTuple):
    """Dimensions of a rank's latent attention.

    A head's query and key are `nope_dim` + `rope_dim` long, its value `value_dim`.
    """

    heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    @classmethod
    def of(cls, spec: LatentAttention, heads: int) -> LatentDims:
        """Dimensions of a rank with these heads of a model."""
        return cls(heads, spec.kv_lora_rank, spec.rope_dim, spec.nope_dim, spec.v_dim)

    @property
    def expands_from(self) -> int:
        """Tokens of a row from which on its expanded form takes fewer multiply-adds.

        For each key of the context and head, n tokens take n * (2 rank + rope_dim) multiply-adds in the absorbed form.
        In the expanded form they take n * (nope_dim + rope_dim + value_dim) + rank * (nope_dim + value_dim).
        """
        once, saved = self.rank * (self.nope_dim + self.value_dim), 2 * self.rank - self.nope_dim - self.value_dim
        return once // saved + 1 if saved > 0 else 1 << 31

    def heads_at_once(self, context: int, itemsize: int) -> int:
        """Number of heads whose keys and values over a context are expanded at once, in EXPANDED_BYTES."""
        head_bytes = context * (self.nope_dim + self.rope_dim + self.value_dim) * itemsize
        return max(1, min(self.heads, memory.EXPANDED_BYTES // max(1, head_bytes)))


class LatentProducts(Protocol):
    """Products with the projection from latents to the keys and values of a rank's heads."""

    @property
    def dims(self) -> LatentDims: ...

    def absorb(self, q: torch.Tensor) -> AbsorbedQueries:
        """Queries in the space of latents, of q [T, heads, nope_dim + rope_dim]: the part of a head's query without
        rotation is multiplied by its keys' projection, the rotated part stays."""
        ...

    def values(self, mixed: torch.Tensor) -> torch.Tensor:
        """Values of mixed latents: [T, heads, rank] -> [T, heads * value_dim]."""
        ...

    def expand(self, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [N, H, nope_dim], without their rotated part, and values [N, H, value_dim] of some heads, from latents
        [N, rank + rope_dim] of the cache. Both may be views of one tensor; each head's columns are contiguous."""
        ...


class AbsorbedQueries(NamedTuple):
    """Queries in the space of latents, in two parts: `latent` [T, heads, rank] and `rotated` [T, heads, rope_dim].

    Either part may be columns of a wider tensor, whose heads lie one after the other.
    """

    latent: torch.Tensor
    rotated: torch.Tensor

    @staticmethod
    def of(joined: torch.Tensor, rank: int) -> AbsorbedQueries:
        """The parts of queries [T, heads, rank + rope_dim]."""
        return AbsorbedQueries(joined[..., :rank], joined[..., rank:])

    def joined(self) -> torch.Tensor:
        """Queries [T, heads, rank + rope_dim]: without a copy if the parts come from `of`."""
        latent, rotated = self
        (tokens, heads, rank), width = latent.shape, latent.shape[2] + rotated.shape[2]
        behind = rotated.data_ptr() == latent.data_ptr() + rank * latent.itemsize
        if behind and latent.stride() == rotated.stride() == (heads * width, width, 1):
            return latent.as_strided((tokens, heads, width), latent.stride())
        return torch.cat(self, dim=-1)


class ExpandedContext(NamedTuple):
    """Keys and values of some heads over a row's context of N positions.

    `keys` [N, H, nope_dim] and `values` [N, H, value_dim]: see `LatentProducts.expand`. `rotated` [N, rope_dim]: the
    part of a key that all heads share.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rotated: torch.Tensor


class LatentKernels(Protocol):
    """Latent attention over a paged cache of latents. All rows are alike: a decode row has one token."""

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
        """Rotate the last `rope_dim` columns of q [T, heads, nope_dim + rope_dim] in place. Write the latents [T, rank
        + rope_dim], their first `rank` values normalised and the others rotated, to the batch's slots. Negative slots
        are padding and get nothing.

        `rope` are rows of angles, `rope_dim` long. The rotation turns the columns 2 i and 2 i + 1 if `interleaved`,
        else i and i + rope_dim / 2. Its result has the latter order: queries and keys are permuted alike.
        """
        ...

    def attend(
        self, q: AbsorbedQueries, cache: KVCache, batch: Batch, scale: float, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Causal attention in the absorbed form, each row over its own context: queries of T tokens -> [T, heads,
        rank], float32 sums in q's dtype. `lse` [T, heads] float32 is as in `PagedAttention.attend`.

        A head's key is a whole latent, its value the latent's first `rank` values. `scale` is the expanded form's,
        (nope_dim + rope_dim)^-0.5 unless the model says otherwise.
        """
        ...

    def attend_expanded(self, q: torch.Tensor, context: ExpandedContext, scale: float, out: torch.Tensor) -> None:
        """Causal attention of some heads in the expanded form: of the last T of N positions, q [T, H, nope_dim +
        rope_dim], into `out` [T, H, value_dim]. Both may be columns of wider tensors."""
        ...

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        """The same as `PagedAttention.launches`."""
        ...


def attend_by_latents(
    kernels: LatentKernels, products: LatentProducts, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float
) -> torch.Tensor:
    """Causal attention of all rows over their latents: rotated queries [T, heads, nope_dim + rope_dim] -> [T, heads *
    value_dim]. The rows that the batch's `forms` name are computed in the expanded form, the others in the absorbed
    one."""
    forms = batch.forms
    if forms is None:
        return attend_absorbed(kernels, products, q, cache, batch, scale)
    out = q.new_empty(q.shape[0], products.dims.heads * products.dims.value_dim)
    if forms.absorbed:
        some = q.index_select(0, forms.tokens)
        out.index_copy_(0, forms.tokens, attend_absorbed(kernels, products, some, cache, forms.absorbed, scale))
    for row in forms.expanded:
        attend_expanded(kernels, products, q[row.tokens], cache, row, scale, out[row.tokens])
    return out


def attend_absorbed(
    kernels: LatentKernels, products: LatentProducts, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float
) -> torch.Tensor:
    """`attend_by_latents` in the absorbed form."""
    return products.values(kernels.attend(products.absorb(q), cache, batch, scale))


def attend_expanded(
    kernels: LatentKernels,
    products: LatentProducts,
    q: torch.Tensor,
    cache: KVCache,
    row: ExpandedRow,
    scale: float,
    out: torch.Tensor,
) -> None:
    """`attend_by_latents` of one row's tokens in the expanded form, into `out`, some heads at a time."""
    dims = products.dims
    blocks = row.table[: -(-row.context // cache.block_size)]
    latents = cache.keys.index_select(0, blocks).flatten(0, 2)[: row.context]
    step = dims.heads_at_once(row.context, q.dtype.itemsize)
    mixed = out.view(len(out), dims.heads, dims.value_dim)
    for first in range(0, dims.heads, step):
        heads = slice(first, min(first + step, dims.heads))
        keys, values = products.expand(latents, heads)
        context = ExpandedContext(keys, values, latents[:, dims.rank :])
        kernels.attend_expanded(q[:, heads], context, scale, mixed[:, heads])


def attend_padded(
    attention: PagedAttention, q: torch.Tensor, context: ExpandedContext, scale: float, out: torch.Tensor
) -> None:
    """`LatentKernels.attend_expanded` by attention that takes queries, keys and values of one length, in blocks."""
    keys, values, rotated = context
    positions, heads = keys.shape[:2]
    keys = torch.cat((keys, rotated[:, None].expand(-1, heads, -1)), dim=-1)
    width, missing = max(keys.shape[2], values.shape[2]), -positions % EXPANDED_BLOCK
    own = F.pad(q, (0, width - q.shape[2]))
    keys, values = (
        F.pad(x, (0, width - x.shape[2], 0, 0, 0, missing)).unflatten(0, (-1, EXPANDED_BLOCK)) for x in (keys, values)
    )
    part = contiguous_row(q.shape[0], positions, q.device)
    attention.prepare(part)
    mixed = attention.attend(own.contiguous(), KVCache(keys, values), part, scale, None)
    out.copy_(mixed.view(len(out), heads, width)[..., : out.shape[2]])


def contiguous_row(tokens: int, context: int, device: torch.device) -> Batch:
    """A batch of one row with the last `tokens` of `context` positions, which lie one after the other in blocks of
    EXPANDED_BLOCK. Nothing is stored for it."""
    blocks = torch.arange(-(-context // EXPANDED_BLOCK), dtype=torch.int32, device=device)
    none = blocks[:0]
    return Batch(
        tokens=none,
        positions=none,
        slots=none.long(),
        row_starts=torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=device),
        context=torch.full((1,), context, dtype=torch.int32, device=device),
        tables=blocks[None],
        order=none,
        decodes=0,
    )
