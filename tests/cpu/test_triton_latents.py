"""Latent attention in Triton's interpreter, against float64 and the plain kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cpu.attention import ragged
from tests.cpu.kernels import triton_kernels
from tests.cpu.latents import PUBLISHED, SMALL, attend_absorbed_by_loop, attend_as_published, random_latents
from weft.kernels.base import KVCache
from weft.kernels.latents import LatentDims, LatentNorm, attend_by_latents
from weft.kernels.plain import create_plain_kernels

pytest.importorskip("triton", reason="needs triton")

# Triton's interpreter multiplies bfloat16 matrices wrongly: tests/gpu has that.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
PLAIN = create_plain_kernels()
AMPERE, TURING = 99 << 10, 64 << 10  # bytes of shared memory of a program

CASES = [
    # dims, counts, contexts, block_size
    (SMALL, [1, 1, 1], [5, 70, 300], 4),
    (SMALL, [1, 1, 40, 7], [130, 9, 40, 90], 16),
    (LatentDims(20, 24, 6, 10, 7), [1, 1, 30], [33, 2, 64], 16),  # heads and columns in no whole blocks
    (PUBLISHED, [1, 3], [90, 40], 16),
]
CASE_NAMES = [f"{dims.heads}x{dims.rank}-{counts}" for dims, counts, _, _ in CASES]


@pytest.mark.parametrize(
    ("processors", "dtype", "shared"),
    [(1, torch.float32, AMPERE), (24, torch.float32, AMPERE), (24, torch.float16, AMPERE), (24, torch.float16, TURING)],
    ids=["whole", "split", "split-float16", "split-float16-turing"],
)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_absorbed_attention_is_exact(case: tuple, processors: int, dtype: torch.dtype, shared: int) -> None:
    dims, counts, contexts, block_size = case
    kernels = triton_kernels(processors, shared=shared)
    q, weight, cache, batch = random_latents(dims, counts, contexts, dtype, block_size)
    absorbed = PLAIN.matrices.latent_products(weight, dims).absorb(q)
    lse = torch.full((len(q), dims.heads), torch.nan)
    got = kernels.latents.attend(absorbed, cache, batch, 0.2, lse)
    want, want_lse = attend_absorbed_by_loop(absorbed, cache, batch, 0.2, dims.rank)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), want_lse, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(kernels.latents.attend(absorbed, cache, batch, 0.2), got)


def test_either_form_is_the_published_one() -> None:
    dims, kernels = SMALL, triton_kernels()
    q, weight, cache, batch = random_latents(dims, [1, 40, 5], [50, 90, 20], torch.float32)
    got = attend_by_latents(kernels, kernels.matrices.latent_products(weight, dims), q, cache, batch, 0.2)
    want = attend_as_published(q, weight, dims, cache, batch, 0.2)
    torch.testing.assert_close(got.double(), want, atol=4e-5, rtol=4e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_latents_are_stored_as_the_plain_kernels_store_them(interleaved: bool, dtype: torch.dtype) -> None:
    """A padding row of a captured batch, of slot -1, stores nothing."""
    heads, rank, rope_dim, nope_dim, tokens = 11, 24, 8, 10, 9
    batch, blocks = ragged([1, 8], [20, 12], 4, seed=1)
    torch.manual_seed(2)
    norm, rope = LatentNorm(torch.rand(rank).to(dtype) + 0.5, 1e-6), torch.randn(32, rope_dim)
    q, latents = torch.randn(tokens, heads, nope_dim + rope_dim).to(dtype), torch.randn(tokens, rank + rope_dim)
    want_q, latents = q.clone(), latents.to(dtype)
    caches = [KVCache.of_latents(torch.zeros(blocks, 4, 1, rank + rope_dim, dtype=dtype), rank) for _ in range(2)]
    last = batch.slots[-1]
    padded = replace(batch, slots=torch.cat((batch.slots[:-1], torch.tensor([-1]))))
    triton_kernels().latents.rotate_and_store(q, latents, rope, caches[0], padded, norm, interleaved=interleaved)
    PLAIN.latents.rotate_and_store(want_q, latents, rope, caches[1], batch, norm, interleaved=interleaved)
    caches[1].keys.flatten(0, 2)[last] = 0
    torch.testing.assert_close(q, want_q, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(caches[0].keys, caches[1].keys, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("processors", [1, 24])
def test_a_row_without_context_reads_nothing_and_gets_zeros(processors: int) -> None:
    q, weight, cache, batch = random_latents(SMALL, [1, 1, 1], [40, 3, 50], torch.float32)
    q = PLAIN.matrices.latent_products(weight, SMALL).absorb(q)
    tables, context = batch.tables.clone(), batch.context.clone()
    tables[1], context[1] = 10**6, 0
    kernels, lse = triton_kernels(processors), torch.zeros(3, SMALL.heads)
    got = kernels.latents.attend(q, cache, replace(batch, tables=tables, context=context), 0.2, lse)
    want = PLAIN.latents.attend(q, cache, batch, 0.2)
    torch.testing.assert_close(got[[0, 2]], want[[0, 2]])
    assert not got[1].any() and lse[1].eq(-torch.inf).all()
