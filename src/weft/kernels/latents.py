"""Multi-head latent attention (DeepSeek-V2, 2024): the protocols of its kernels, and the choice between its two forms.

A token's latent has `rank` + `rope_dim` values: a vector from which keys and values of all heads are projected, and a
rotated part that all keys share. A layer's cache has the latents alone: `KVCache.of_latents`.

The absorbed form works on latents: queries are projected to their space, and the mixed latents to values. The expanded
form projects the latents of a context to keys and values first. That costs as much for one query as for many, so the
expanded form is for rows of many tokens, the absorbed one for all others, decode rows above all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from weft.architectures.shape import LatentAttention
from weft.kernels.base import AttentionShape, KVCache
from weft.kernels.batch import Batch, Lengths
from weft.kernels.warm import KernelLaunch
from weft.plan import memory

if TYPE_CHECKING:
    from weft.kernels.base import Kernels

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

        For each key of the context and head, n tokens take n * (2 rank + rope_dim) multiply-adds in the absorbed form,
        and n * (nope_dim + rope_dim + value_dim) + rank * (nope_dim + value_dim) in the expanded one.
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

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Queries in the space of latents: [T, heads, nope_dim + rope_dim] -> [T, heads, rank + rope_dim]. The part of
        a head's query without rotation is multiplied by its keys' projection, the rotated part is copied."""
        ...

    def values(self, mixed: torch.Tensor) -> torch.Tensor:
        """Values of mixed latents: [T, heads, rank] -> [T, heads * value_dim]."""
        ...

    def expand(self, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [N, H, nope_dim + rope_dim] and values [N, H, value_dim] of some heads, from latents [N, rank +
        rope_dim] of the cache."""
        ...


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
        are those of padding and get nothing.

        `rope` are rows of angles, `rope_dim` long. The rotation turns the columns 2 i and 2 i + 1 if `interleaved`,
        else i and i + rope_dim / 2. Its result has the latter order: queries and keys are permuted alike.
        """
        ...

    def attend(
        self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Causal attention in the absorbed form, each row over its own context: [T, heads, rank + rope_dim] -> [T,
        heads, rank], float32 sums in q's dtype. `lse` [T, heads] float32 is that of `PagedAttention.attend`.

        A head's key is a whole latent, its value the latent's first `rank` values. `scale` is that of the expanded
        form, (nope_dim + rope_dim)^-0.5 unless the model says otherwise.
        """
        ...

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        """The same as `PagedAttention.launches`."""
        ...


def attend_by_latents(
    kernels: Kernels, products: LatentProducts, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float
) -> torch.Tensor:
    """Causal attention of all rows over their latents: rotated queries [T, heads, nope_dim + rope_dim] -> [T, heads *
    value_dim]. Rows of many tokens are computed in the expanded form, the others in the absorbed one."""
    expanded = [] if batch.fixed or batch.decodes == batch.rows else long_rows(batch, products.dims.expands_from)
    if not expanded:
        return attend_absorbed(kernels, products, q, cache, batch, scale)
    out = q.new_empty(q.shape[0], products.dims.heads * products.dims.value_dim)
    starts = batch.lengths().row_starts
    others = [row for row in range(batch.rows) if row not in expanded]
    if others:
        part, tokens = select_rows(batch, others)
        out[tokens] = attend_absorbed(kernels, products, q[tokens], cache, part, scale)
    for row in expanded:
        tokens_of_row = slice(int(starts[row]), int(starts[row + 1]))
        attend_expanded(kernels, products, q[tokens_of_row], cache, batch, row, scale, out[tokens_of_row])
    return out


def attend_absorbed(
    kernels: Kernels, products: LatentProducts, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float
) -> torch.Tensor:
    """`attend_by_latents` in the absorbed form."""
    return products.values(kernels.latents.attend(products.absorb(q), cache, batch, scale))


def attend_expanded(
    kernels: Kernels,
    products: LatentProducts,
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    row: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """`attend_by_latents` of one row's tokens in the expanded form, into `out`, some heads at a time."""
    dims, context = products.dims, int(batch.lengths().context[row])
    latents = gather_latents(cache, batch, row, context)
    part = contiguous_row(q.shape[0], context, q.device)
    step = dims.heads_at_once(context, q.dtype.itemsize)
    kernels.attention.prepare(part)
    for first in range(0, dims.heads, step):
        heads = slice(first, min(first + step, dims.heads))
        keys, values = products.expand(latents, heads)
        own = q[:, heads].contiguous()
        # Attention takes queries, keys and values of one length.
        width = max(keys.shape[2], values.shape[2])
        own, keys, values = (torch.nn.functional.pad(x, (0, width - x.shape[2])) for x in (own, keys, values))
        keys, values = (x.unflatten(0, (-1, EXPANDED_BLOCK)) for x in (keys, values))
        mixed = kernels.attention.attend(own, KVCache(keys, values), part, scale, None)
        mixed = mixed.view(len(out), heads.stop - first, -1)[..., : dims.value_dim]
        out.view(len(out), dims.heads, -1)[:, heads] = mixed
    kernels.attention.prepare(batch)


def gather_latents(cache: KVCache, batch: Batch, row: int, context: int) -> torch.Tensor:
    """Latents of the first `context` positions of a row: [N, rank + rope_dim], zeros after them up to whole blocks of
    EXPANDED_BLOCK."""
    blocks = batch.tables[row, : -(-context // cache.block_size)].long()
    latents = cache.keys[blocks].flatten(0, 2)[:context]
    return torch.nn.functional.pad(latents, (0, 0, 0, -context % EXPANDED_BLOCK))


def contiguous_row(tokens: int, context: int, device: torch.device) -> Batch:
    """A batch of one row with the last `tokens` of `context` positions, which lie one after the other in blocks of
    EXPANDED_BLOCK. Nothing is stored for it."""
    blocks = torch.arange(-(-context // EXPANDED_BLOCK), dtype=torch.int32, device=device)
    numbers = torch.tensor([0, tokens, context], dtype=torch.int32, device=device)
    none = blocks[:0]
    return Batch(
        tokens=none,
        positions=none,
        slots=none.long(),
        row_starts=numbers[:2],
        context=numbers[2:],
        tables=blocks[None],
        order=none,
        decodes=0,
    )


def long_rows(batch: Batch, least: int) -> list[int]:
    """Numbers of the rows with `least` tokens or more."""
    starts = batch.lengths().row_starts
    return [row for row in range(batch.decodes, batch.rows) if starts[row + 1] - starts[row] >= least]


def select_rows(batch: Batch, rows: Sequence[int]) -> tuple[Batch, torch.Tensor]:
    """The batch of some rows in their order, all decode rows among them, for attention alone; and the numbers of their
    tokens [T'] int64."""
    device, lengths = batch.context.device, batch.lengths()
    index, starts = np.asarray(rows), lengths.row_starts
    counts = np.diff(starts)[index]
    host = Lengths(np.concatenate(([0], counts.cumsum())), lengths.context[index])
    tokens = torch.from_numpy(np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])).to(device)
    here = torch.from_numpy(index).to(device)
    part = replace(
        batch,
        tokens=batch.tokens[:0],
        positions=batch.positions[tokens],
        slots=batch.slots[tokens],
        row_starts=torch.from_numpy(host.row_starts).int().to(device),
        context=batch.context[here],
        tables=batch.tables[here],
        host=host,
        others=(),
    )
    return part, tokens
