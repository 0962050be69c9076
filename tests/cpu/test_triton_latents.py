"""Latent attention in Triton's interpreter, against float64 and the plain kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cpu.attention import ragged, with_turns
from tests.cpu.kernels import triton_kernels
from tests.cpu.latents import PUBLISHED, SMALL, attend_absorbed_by_loop, attend_as_published, random_latents
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.batch import ExpandedRow
from weft.ranks.kernels.latents import LatentDims, LatentNorm, attend_by_latents, attend_expanded
from weft.ranks.kernels.plain import create_plain_kernels

pytest.importorskip("triton", reason="needs triton")

from weft.ranks.kernels.triton import latents
from weft.ranks.kernels.triton.latents import decode_tiles, latent_sizes

# Triton's interpreter multiplies bfloat16 matrices wrongly: tests/gpu has that.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
PLAIN = create_plain_kernels()
AMPERE, TURING, HOPPER = 99 << 10, 64 << 10, 227 << 10  # bytes of shared memory of a program

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


@pytest.mark.parametrize(
    ("processors", "counts", "contexts"),
    [(1, [1, 1, 30], [70, 5, 90]), (12, [1, 1, 1], [130, 9, 300])],
    ids=["whole", "split"],
)
def test_many_heads_are_attended_to_by_wide_programs(
    processors: int, counts: list[int], contexts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = LatentDims(70, 24, 6, 10, 7)
    kernels = triton_kernels(processors, shared=HOPPER, warp_groups=True)
    q, weight, cache, batch = random_latents(dims, counts, contexts, torch.float16)
    absorbed = PLAIN.matrices.latent_products(weight, dims).absorb(q)
    lse, launched = torch.full((len(q), dims.heads), torch.nan), list[tuple[int, int]]()
    decode = latents._decode_latents

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*given: Any, **constants: Any) -> None:
                launched.append((constants["ROWS"], grid[2]))
                decode[grid](*given, **constants)

            return launch

    monkeypatch.setattr(latents, "_decode_latents", Recorded())
    got = kernels.latents.attend(absorbed, cache, batch, 0.2, lse)
    want, want_lse = attend_absorbed_by_loop(absorbed, cache, batch, 0.2, dims.rank)
    torch.testing.assert_close(got.double(), want, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(lse.double(), want_lse, atol=4e-3, rtol=4e-3)
    assert launched == [(64, 1 if processors == 1 else 2)]


def test_programs_are_wide_where_they_fill_the_card() -> None:
    sizes = latent_sizes(512, 576, torch.bfloat16, HOPPER, warp_groups=True)
    chosen = {rows: decode_tiles(sizes, 132, rows, 128) for rows in (1, 16, 17, 32, 66, 256)}
    assert {rows: (tiles.queries, splits) for rows, (tiles, splits) in chosen.items()} == {
        1: (16, 32),
        16: (16, 3),
        17: (64, 4),
        32: (64, 3),
        66: (64, 1),
        256: (64, 1),
    }
    assert decode_tiles(sizes, 132, 256, 16)[0].queries == 16  # a rank's heads with tensor parallelism
    for other in (
        latent_sizes(512, 576, torch.bfloat16, HOPPER),
        latent_sizes(512, 576, torch.bfloat16, AMPERE, warp_groups=True),
        latent_sizes(512, 576, torch.float32, HOPPER, warp_groups=True),
    ):
        assert other.wide is None


@pytest.mark.parametrize(
    ("dtype", "shared"),
    [(torch.float32, AMPERE), (torch.float16, AMPERE), (torch.float16, HOPPER), (torch.float16, TURING)],
    ids=["float32", "float16", "hopper", "turing"],
)
@pytest.mark.parametrize(
    ("dims", "tokens", "positions"),
    [
        (SMALL, 40, 90),
        (SMALL, 90, 90),
        (LatentDims(20, 24, 6, 10, 7), 33, 150),  # no whole tiles, no whole vectors
        (LatentDims(2, 32, 8, 16, 30), 130, 200),  # values longer than keys, and more tokens than a program has
        (LatentDims(1, 128, 64, 128, 128), 3, 130),
    ],
    ids=str,
)
def test_a_row_in_the_expanded_form_is_the_published_one(
    dims: LatentDims, tokens: int, positions: int, dtype: torch.dtype, shared: int
) -> None:
    kernels = triton_kernels(shared=shared, warp_groups=shared == HOPPER)
    q, weight, cache, batch = random_latents(dims, [tokens], [positions], dtype)
    products = kernels.matrices.latent_products(weight, dims)
    row = ExpandedRow(slice(0, tokens), positions, batch.tables[0])
    got = q.new_full((tokens, dims.heads * dims.value_dim), torch.nan)
    attend_expanded(kernels.latents, products, q, cache, row, 0.2, got)
    want = attend_as_published(q, weight, dims, cache, batch, 0.2)
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_either_form_is_the_published_one() -> None:
    dims, kernels = SMALL, triton_kernels()
    q, weight, cache, batch = random_latents(dims, [1, 40, 5], [50, 90, 20], torch.float32)
    got = attend_by_latents(kernels.latents, kernels.matrices.latent_products(weight, dims), q, cache, batch, 0.2)
    want = attend_as_published(q, weight, dims, cache, batch, 0.2)
    torch.testing.assert_close(got.double(), want, atol=4e-5, rtol=4e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_latents_are_stored_as_the_plain_kernels_store_them(interleaved: bool, dtype: torch.dtype) -> None:
    """A padding row of a captured batch, of slot -1, stores nothing."""
    heads, rank, rope_dim, nope_dim, tokens = 11, 24, 8, 10, 9
    batch, blocks = ragged([1, 8], [20, 12], 4, seed=1)
    batch = with_turns(batch, 32) if interleaved else batch
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
