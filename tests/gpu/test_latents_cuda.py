"""Latent attention as compiled for the card, bfloat16 and CUDA graphs included, against the plain kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cpu.attention import ragged, shaped
from tests.cpu.latents import PUBLISHED, SMALL, in_forms, random_latents
from weft.ranks.kernels import create_kernels
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.latents import LatentDims, LatentNorm, attend_by_latents
from weft.ranks.kernels.plain import create_plain_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PLAIN = create_plain_kernels()
CASES = [
    (SMALL, [1, 1, 40, 7], [130, 9, 40, 90]),
    (PUBLISHED, [1] * 5, [3000, 1, 40, 700, 64]),
    (LatentDims(128, 512, 64, 128, 128), [1, 1, 5, 200], [500, 20, 90, 300]),
    (LatentDims(20, 512, 64, 128, 128), [1, 3], [77, 40]),
    # On a Hopper wide programs decode: in parts of a context, and in whole contexts.
    (LatentDims(128, 512, 64, 128, 128), [1] * 40, [100 + 7 * row for row in range(40)]),
    (LatentDims(128, 512, 64, 128, 128), [1] * 140, [3 + row for row in range(140)]),
    (LatentDims(16, 512, 64, 128, 128), [1, 400, 5, 190], [60, 900, 70, 190]),
    (LatentDims(8, 512, 64, 192, 256), [300], [512]),
]


def on_card(batch: Batch) -> Batch:
    names = ("tokens", "positions", "slots", "row_starts", "context", "tables", "order")
    return replace(batch, **{name: getattr(batch, name).to(CUDA) for name in names}, forms=None)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=[f"{dims.heads}x{dims.rank}" for dims, _, _ in CASES])
def test_latent_attention_is_that_of_torch(case: tuple, dtype: torch.dtype) -> None:
    dims, counts, contexts = case
    q, weight, cache, batch = random_latents(dims, counts, contexts, torch.float32)
    want = attend_by_latents(PLAIN.latents, PLAIN.matrices.latent_products(weight, dims), q, cache, batch, 0.07)
    kernels = create_kernels("triton", CUDA, shaped(dtype))
    products = kernels.matrices.latent_products(weight.to(CUDA, dtype), dims)
    there = KVCache.of_latents(cache.keys.to(CUDA, dtype), dims.rank)
    got = attend_by_latents(kernels.latents, products, q.to(CUDA, dtype), there, in_forms(on_card(batch), dims), 0.07)
    torch.testing.assert_close(got.cpu().float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_latents_are_stored_as_torch_stores_them(interleaved: bool, dtype: torch.dtype) -> None:
    heads, rank, rope_dim, nope_dim, tokens = 16, 512, 64, 128, 9
    batch, blocks = ragged([1, 8], [20, 12], 16, seed=1)
    torch.manual_seed(2)
    norm, rope = LatentNorm(torch.rand(rank).to(dtype) + 0.5, 1e-6), torch.randn(32, rope_dim)
    q, latents = (
        torch.randn(tokens, heads, nope_dim + rope_dim).to(dtype),
        torch.randn(tokens, rank + rope_dim).to(dtype),
    )
    turned, keys = q.to(CUDA), torch.zeros(blocks, 16, 1, rank + rope_dim, dtype=dtype)
    here, there = KVCache.of_latents(keys, rank), KVCache.of_latents(keys.to(CUDA), rank)
    moved = LatentNorm(norm.weight.to(CUDA), norm.eps)
    create_kernels("triton", CUDA, shaped(dtype)).latents.rotate_and_store(
        turned, latents.to(CUDA), rope.to(CUDA), there, on_card(batch), moved, interleaved=interleaved
    )
    PLAIN.latents.rotate_and_store(q, latents, rope, here, batch, norm, interleaved=interleaved)
    torch.testing.assert_close(turned.cpu(), q, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(there.keys.cpu(), here.keys, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_decode_step_is_captured() -> None:
    q, weight, cache, batch = random_latents(PUBLISHED, [1, 1, 1], [500, 40, 3], torch.bfloat16)
    kernels = create_kernels("triton", CUDA, shaped(torch.bfloat16))
    products = kernels.matrices.latent_products(weight.to(CUDA), PUBLISHED)
    there, filled = KVCache.of_latents(cache.keys.to(CUDA), PUBLISHED.rank), replace(on_card(batch), fixed=True)
    queries = q.to(CUDA)

    def attend() -> torch.Tensor:
        return attend_by_latents(kernels.latents, products, queries, there, filled, 0.07)

    want = attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, want)
