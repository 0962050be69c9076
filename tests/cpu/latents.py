"""Random latent attention for tests, and its published form in float64."""

from __future__ import annotations

import torch

from tests.cpu.attention import ragged
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.batch import Batch, StepForms, divide_batch
from weft.ranks.kernels.latents import AbsorbedQueries, LatentDims

# heads, rank, rope_dim, nope_dim, value_dim
SMALL = LatentDims(3, 32, 8, 16, 12)
PUBLISHED = LatentDims(4, 512, 64, 128, 128)


def random_latents(
    dims: LatentDims, counts: list[int], contexts: list[int], dtype: torch.dtype, block_size: int = 16
) -> tuple[torch.Tensor, torch.Tensor, KVCache, Batch]:
    """Rotated queries, the projection of latents, a cache with the latents of all rows' contexts, and the batch, whose
    long rows are in the expanded form."""
    batch, blocks = ragged(counts, contexts, block_size, seed=len(counts))
    generator = torch.Generator().manual_seed(3)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    q = draw(sum(counts), dims.heads, dims.nope_dim + dims.rope_dim)
    weight = draw(dims.heads * (dims.nope_dim + dims.value_dim), dims.rank) * dims.rank**-0.5
    cache = KVCache.of_latents(draw(blocks, block_size, 1, dims.rank + dims.rope_dim), dims.rank)
    return q, weight, cache, in_forms(batch, dims)


def in_forms(batch: Batch, dims: LatentDims) -> Batch:
    """The batch with its long rows in the expanded form, as the worker stages it."""
    forms = StepForms.of(batch.lengths(), batch.decodes, dims.expands_from)
    if forms is None:
        return batch
    tensors = [torch.from_numpy(array).to(batch.context.device) for array in forms.absorbed]
    return divide_batch(batch, forms.with_tensors(tensors))


def attend_as_published(
    q: torch.Tensor, weight: torch.Tensor, dims: LatentDims, cache: KVCache, batch: Batch, scale: float
) -> torch.Tensor:
    """Latent attention of DeepSeek-V2 (arXiv 2405.04434, section 2.1.2), token by token: [T, heads * value_dim] in
    float64. Keys and values of each head are projected from the latents, nothing is absorbed."""
    projection = weight.double().view(dims.heads, -1, dims.rank)
    out = torch.empty(q.shape[0], dims.heads, dims.value_dim, dtype=torch.float64)
    for row in range(batch.rows):
        first, last = batch.row_starts[row : row + 2].tolist()
        context = int(batch.context[row])
        latents = row_latents(cache, batch, row).double()
        both = torch.einsum("hor,nr->hno", projection, latents[:, : dims.rank])
        rotated = latents[:, dims.rank :].expand(dims.heads, -1, -1)
        keys = torch.cat((both[..., : dims.nope_dim], rotated), dim=-1)
        values = both[..., dims.nope_dim :]
        for token in range(first, last):
            seen = context - last + token + 1
            scores = torch.einsum("hd,hnd->hn", q[token].double(), keys[:, :seen]) * scale
            out[token] = torch.einsum("hn,hnv->hv", scores.softmax(-1), values[:, :seen])
    return out.flatten(1)


def attend_absorbed_by_loop(
    absorbed: AbsorbedQueries, cache: KVCache, batch: Batch, scale: float, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`LatentKernels.attend` one token at a time, in float64: [T, heads, rank], and the logarithms of the sums."""
    q = torch.cat(absorbed, dim=-1)
    out = torch.empty(*q.shape[:2], rank, dtype=torch.float64)
    lse = torch.empty(q.shape[:2], dtype=torch.float64)
    for row in range(batch.rows):
        first, last = batch.row_starts[row : row + 2].tolist()
        latents = row_latents(cache, batch, row).double()
        for token in range(first, last):
            seen = latents[: int(batch.context[row]) - last + token + 1]
            scores = q[token].double() @ seen.T * scale
            out[token] = scores.softmax(-1) @ seen[:, :rank]
            lse[token] = scores.logsumexp(-1)
    return out, lse


def row_latents(cache: KVCache, batch: Batch, row: int) -> torch.Tensor:
    """Latents of a row's context: [context, rank + rope_dim]."""
    return torch.stack(
        [
            cache.keys[batch.tables[row, p // cache.block_size], p % cache.block_size, 0]
            for p in range(int(batch.context[row]))
        ]
    )
