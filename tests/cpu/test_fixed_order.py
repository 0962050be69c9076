"""Kernels with a fixed order of sums: a token gets the same bits in any batch, and in any chunk of its prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cpu.attention import ragged
from tests.cpu.kernels import native
from tests.cpu.matrices import CPU, MXFP4, random
from tests.cpu.test_kernels import written
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.quantised.schemes import WIDE_SCHEMES
from weft.machine.hardware.cpu import probe_cpu
from weft.machine.native.prebuilt import BF16, TILES, V3, V4
from weft.plan.determinism import FEATURES
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.native import entries
from weft.ranks.quant.quantised import QuantisedWeight

pytestmark = pytest.mark.skipif(not set(FEATURES) <= set(probe_cpu().features), reason="shown for CPUs with AVX2 only")
BOTH = torch.float32, torch.bfloat16
ROWS, COLS = 96, 576


def random_numbers(type: str, dtype: torch.dtype) -> QuantisedWeight:
    """A matrix whose stored numbers and scales are random."""
    generator = torch.Generator().manual_seed(3)
    weight = QuantisedWeight.empty(type, ROWS, Span(0, COLS), dtype, CPU)
    weight.values.random_(0, 256, generator=generator)
    weight.scales.uniform_(0.5, 1.5, generator=generator)
    return weight


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("type", ["dense", "Q4_0", "Q4_1", "Q4_K", "Q8_0", "INT8", MXFP4, "FP8_128", *WIDE_SCHEMES])
def test_a_product_has_the_same_bits_for_any_number_of_rows(type: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    weight: torch.Tensor | QuantisedWeight
    if type == "dense":
        weight = torch.randn(ROWS, COLS, generator=generator).to(dtype)
    elif type in WIDE_SCHEMES:
        weight = random_numbers(type, dtype)
    else:
        weight = random(type, ROWS, Span(0, COLS), COLS, dtype=dtype)
    product = native(dtype, fixed_order=True).matrices.matrix(weight, None)
    x = torch.randn(64, COLS, generator=generator).to(dtype)
    alone = torch.cat([product(row[None]).clone() for row in x])
    for tokens in (2, 3, 4, 5, 7, 13, 25, 64):
        assert torch.equal(product(x[:tokens]), alone[:tokens]), tokens


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 24), (16, 1, 80)])
@pytest.mark.parametrize("window", [None, 50])
def test_attention_has_the_same_bits_in_any_chunk(
    q_heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    length, others, block_size = 150, [37, 90], 16
    batch, blocks = ragged([length, *others], [length, *others], block_size, seed=1)
    torch.manual_seed(2)
    kernels, scale = native(dtype, fixed_order=True, head_dim=head_dim), head_dim**-0.5
    cache = KVCache(*(torch.randn(blocks, block_size, kv_heads, head_dim).to(dtype) for _ in range(2)))
    stored, q = written(kernels, cache), torch.randn(length + sum(others), q_heads, head_dim).to(dtype)

    def attend(first: int, last: int) -> torch.Tensor:
        """Attention of a chunk of row 0, alone in its step."""
        chunk = replace(
            batch,
            row_starts=torch.tensor([0, last - first], dtype=torch.int32),
            context=torch.tensor([last], dtype=torch.int32),
            tables=batch.tables[:1],
        )
        return kernels.attention.attend(q[first:last], stored, chunk, scale, window)

    singly = torch.cat([attend(at, at + 1) for at in range(length)])
    for size in (2, 5, 16, 33, 64, length):
        chunks = [attend(at, min(at + size, length)) for at in range(0, length, size)]
        assert torch.equal(torch.cat(chunks), singly), size
    assert torch.equal(kernels.attention.attend(q, stored, batch, scale, window)[:length], singly)


def test_without_a_fixed_order_a_chunk_differs() -> None:
    """Else the tests above would show nothing."""
    batch, blocks = ragged([40], [40], 16, seed=1)
    torch.manual_seed(2)
    kernels = native(torch.float32)
    cache = KVCache(*(torch.randn(blocks, 16, 2, 64) for _ in range(2)))
    stored, q = written(kernels, cache), torch.randn(40, 6, 64)
    last = replace(batch, row_starts=torch.tensor([0, 1], dtype=torch.int32))
    together = kernels.attention.attend(q, stored, batch, 0.125, None)[-1:]
    assert not torch.equal(kernels.attention.attend(q[-1:], stored, last, 0.125, None), together)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("width", [48, 50, 576])
def test_rows_between_the_products_have_the_same_bits(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    rows = native(dtype, fixed_order=True).pointwise
    x, weight, wide = (
        torch.randn(13, width).to(dtype),
        torch.rand(width).to(dtype),
        torch.randn(13, 2 * width).to(dtype),
    )
    norms = torch.cat([rows.norm(row[None], weight, 1e-5) for row in x])
    activated = torch.cat([rows.silu_mul(row[None]) for row in wide])
    for tokens in (2, 5, 13):
        assert torch.equal(rows.norm(x[:tokens], weight, 1e-5), norms[:tokens])
        assert torch.equal(rows.silu_mul(wide[:tokens]), activated[:tokens])


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_scores_have_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    sampling = native(dtype, fixed_order=True).sampling
    logits, tokens = (torch.randn(9, 1003) * 4).to(dtype), torch.arange(9)
    alone = torch.cat([sampling.score(logits[i : i + 1], tokens[i : i + 1], 5) for i in range(9)])
    for rows in (2, 9):
        assert torch.equal(sampling.score(logits[:rows], tokens[:rows], 5), alone[:rows])


def test_the_cpus_that_keep_to_narrow_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    for features, needed in ((V3, False), (V4, True), (BF16, False), (BF16 | {TILES}, True)):
        monkeypatch.setattr(entries, "cpu_features", lambda features=features: features)
        assert entries.needs_narrow(64) == needed, features
        assert entries.needs_narrow(24) == (features is not V3), "heads of 24 dims leave some of a vector over"
