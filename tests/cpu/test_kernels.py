"""The compiled CPU kernels against the plain ones, and those against a loop that is obviously right."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cpu.attention import ragged, shaped, spoil_behind, with_turns
from tests.cpu.kernels import native
from tests.cpu.programs import has_no_warnings, passes
from weft.machine.native.build import build_library, load_library
from weft.machine.native.library import CPP_TYPES
from weft.ranks.kernels import create_kernels
from weft.ranks.kernels.attention import HeadNorm, KVCache, apply_sinks
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.plain import PlainPointwise, create_plain_kernels

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def written(kernels: Kernels, cache: KVCache) -> KVCache:
    """Content of `cache` row by row, as these kernels read it: through an angle of zero."""
    blocks, block_size, kv_heads, head_dim = cache.keys.shape
    slots = blocks * block_size
    row = [x.reshape(slots, -1) for x in (cache.keys, cache.keys, cache.values)]
    index = torch.arange(slots, dtype=torch.int32)
    batch = Batch(index, index * 0, index.long(), index, index, index[None], index[:0], 0)
    angles = torch.cat((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), 1)
    out = KVCache(*(torch.zeros_like(cache.keys) for _ in range(2)))
    kernels.pointwise.rotate_and_store(torch.cat(row, 1), kv_heads, angles, out, batch, None)
    return out


def attend_by_loop(
    q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, window: int | None, lse: torch.Tensor | None = None
) -> torch.Tensor:
    """One query and one head at a time, in float64."""
    group = q.shape[1] // cache.keys.shape[2]
    out = torch.empty(q.shape, dtype=torch.float64)
    for row in range(batch.rows):
        first, last = batch.row_starts[row : row + 2].tolist()
        for token in range(first, last):
            position = int(batch.positions[token])
            begin = max(0, position - window + 1) if window else 0
            places = torch.arange(begin, position + 1)
            blocks, offsets = batch.tables[row, places // cache.block_size].long(), places % cache.block_size
            for head in range(q.shape[1]):
                keys, values = (part[blocks, offsets, head // group].double() for part in (cache.keys, cache.values))
                scores = keys @ q[token, head].double() * scale
                out[token, head] = scores.softmax(0) @ values
                if lse is not None:
                    lse[token, head] = scores.logsumexp(0)
    return out.flatten(1)


CASES = [
    # counts, contexts, q_heads, kv_heads, head_dim, block_size, window
    ([1], [1], 2, 1, 16, 16, None),
    ([1, 1, 1], [5, 70, 200], 9, 3, 64, 16, None),
    ([1, 40, 7], [130, 40, 90], 6, 3, 64, 16, None),
    ([33, 1], [33, 64], 8, 8, 80, 4, None),
    ([20, 1, 100], [90, 150, 100], 7, 1, 6, 16, None),
    ([1, 50, 3], [300, 120, 10], 4, 2, 32, 8, 17),
    ([70], [70], 40, 1, 24, 16, 5),
    ([1, 9, 100], [333, 200, 150], 5, 1, 80, 32, None),
    ([1, 1, 50, 40], [65, 400, 300, 40], 4, 2, 128, 16, 70),
    ([3, 1], [90, 17], 20, 2, 256, 16, None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=[str(c[0]) for c in CASES])
@pytest.mark.parametrize("kind", ["native", "plain"])
def test_attention_over_paged_kv_is_exact(kind: str, case: tuple, dtype: torch.dtype) -> None:
    counts, contexts, q_heads, kv_heads, head_dim, block_size, window = case
    kernels: Kernels = native(dtype) if kind == "native" else create_plain_kernels()
    batch, blocks = ragged(counts, contexts, block_size, seed=len(counts))
    torch.manual_seed(1)
    cache = KVCache(*(torch.randn(blocks, block_size, kv_heads, head_dim).to(dtype) for _ in range(2)))
    spoil_behind(cache, batch, window)
    q = torch.randn(sum(counts), q_heads, head_dim).to(dtype) * 3
    sums, want_sums = (torch.full((sum(counts), q_heads), torch.nan) for _ in range(2))
    got = kernels.attention.attend(q, written(kernels, cache), batch, head_dim**-0.5, window, sums)
    want = attend_by_loop(q, cache, batch, head_dim**-0.5, window, want_sums)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(sums, want_sums, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(kernels.attention.attend(q, written(kernels, cache), batch, head_dim**-0.5, window), got)
    sinks = torch.randn(q_heads).to(dtype) * 4
    got = kernels.attention.attend(q, written(kernels, cache), batch, head_dim**-0.5, window, sinks=sinks)
    want = apply_sinks(want, want_sums, sinks)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["native", "plain"])
def test_two_parts_of_a_context_are_joined_to_one(kind: str) -> None:
    kernels = native(torch.float32) if kind == "native" else create_plain_kernels()
    joined_is_whole(kernels)


def joined_is_whole(kernels: Kernels) -> None:
    """Rows of one token: attention over the first blocks, and over the others, joined by the sums of their weights."""
    contexts, block_size, q_heads, kv_heads, head_dim, first = [200, 130, 70], 16, 6, 2, 64, 4
    batch, blocks = ragged([1, 1, 1], contexts, block_size, seed=1)
    torch.manual_seed(2)
    cache = KVCache(*(torch.randn(blocks, block_size, kv_heads, head_dim) for _ in range(2)))
    stored, q = written(kernels, cache), torch.randn(3, q_heads, head_dim) * 3
    before = replace(batch, context=torch.full_like(batch.context, first * block_size))
    after = replace(batch, context=batch.context - first * block_size, tables=batch.tables[:, first:].contiguous())
    parts = []
    for part in (before, after):
        lse = torch.empty(3, q_heads)
        kernels.attention.prepare(part)
        out = kernels.attention.attend(q, stored, part, head_dim**-0.5, None, lse)
        parts.append((out.unflatten(1, (q_heads, head_dim)), lse))
    weights = torch.stack([lse for _, lse in parts]).softmax(0).unsqueeze(-1)
    joined = sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True))
    kernels.attention.prepare(batch)
    whole = kernels.attention.attend(q, stored, batch, head_dim**-0.5, None)
    torch.testing.assert_close(joined, whole.unflatten(1, (q_heads, head_dim)), atol=2e-5, rtol=2e-5)


def test_sinks_take_their_share_of_the_softmax() -> None:
    torch.manual_seed(3)
    scores, values, sinks = torch.randn(5, 4, 9) * 3, torch.randn(4, 9, 16), torch.randn(4) * 3
    without = torch.einsum("thk,hkd->thd", scores.softmax(-1), values).flatten(1)
    wide = torch.cat((scores, sinks.expand(5, 4).unsqueeze(-1)), -1)
    want = torch.einsum("thk,hkd->thd", wide.softmax(-1)[..., :-1], values).flatten(1)
    torch.testing.assert_close(apply_sinks(without, scores.logsumexp(-1), sinks), want)


def test_rows_that_begin_alike_are_read_together_and_everything_once(tmp_path: Path) -> None:
    passes("tiles", tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("q_heads", "head_dim"), [(6, 64), (4, 20)])  # 20 is no whole number of vectors
@pytest.mark.parametrize("window", [None, 50, 200])
@pytest.mark.usefixtures("threads")
def test_rows_that_share_blocks_get_what_rows_with_copies_of_them_get(
    dtype: torch.dtype, q_heads: int, head_dim: int, window: int | None
) -> None:
    kernels, block_size = native(dtype), 16
    # Rows of one token that begin alike, some of them for longer, in any order, beside others; one has several tokens.
    contexts = [150, 400, 33, 129, 260, 500, 64, 65, 280, 300, 170, 430, 77, 20]
    counts = [1] * (len(contexts) - 1) + [6]
    apart, blocks = ragged(counts, contexts, block_size, seed=3)
    tables = apart.tables.clone()
    for row, like, shared in (
        (3, 0, 128),
        (4, 1, 256),
        (8, 1, 256),
        (9, 8, 272),
        (5, 4, 256),
        (7, 6, 48),
        (11, 1, 384),
    ):
        tables[row, : shared // block_size] = tables[like, : shared // block_size]
    for row, context in enumerate(contexts):
        tables[row, -(-context // block_size) :] = 2**31 - 1  # what lies past its end is not looked at
    together = replace(apart, tables=tables)
    torch.manual_seed(4)
    kv_heads = 2
    cache = KVCache(*(torch.randn(blocks, block_size, kv_heads, head_dim).to(dtype) for _ in range(2)))
    copies = KVCache(cache.keys.clone(), cache.values.clone())
    for row, context in enumerate(contexts):
        used = -(-context // block_size)
        copies.keys[apart.tables[row, :used]] = cache.keys[tables[row, :used]]
        copies.values[apart.tables[row, :used]] = cache.values[tables[row, :used]]
    q = torch.randn(sum(counts), q_heads, head_dim).to(dtype) / 2  # so that many keys count
    for threads in (1, 2):  # with few, more rows are read together
        torch.set_num_threads(threads)
        got = kernels.attention.attend(q, written(kernels, cache), together, head_dim**-0.5, window)
        want = kernels.attention.attend(q, written(kernels, copies), apart, head_dim**-0.5, window)
        assert torch.equal(got, want)
    exact = attend_by_loop(q, cache, together, head_dim**-0.5, window)
    torch.testing.assert_close(got.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 13])
def test_native_rows_agree_with_plain_ones(dtype: torch.dtype, tokens: int) -> None:
    fast, plain = native(dtype).pointwise, PlainPointwise()
    torch.manual_seed(2)
    x, residual, weight = (torch.randn(*dims).to(dtype) for dims in ((tokens, 50), (tokens, 50), (50,)))
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(fast.norm(x, weight, 1e-5), plain.norm(x, weight, 1e-5), **close)
    ours, theirs = residual.clone(), residual.clone()
    torch.testing.assert_close(fast.add_norm(x, ours, weight, 1e-5), plain.add_norm(x, theirs, weight, 1e-5), **close)
    torch.testing.assert_close(ours, theirs, **close)
    wide = torch.randn(tokens, 84).to(dtype) * 20
    torch.testing.assert_close(fast.silu_mul(wide), plain.silu_mul(wide), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("head_dim", "block_size", "turned"), [(20, 4, True), (32, 16, False), (48, 32, True)])
def test_native_rotation_writes_what_the_plain_one_writes(
    dtype: torch.dtype, normed: bool, head_dim: int, block_size: int, turned: bool
) -> None:
    q_heads, kv_heads = 6, 2
    batch, blocks = ragged([3, 1, 9], [40, 7, 9], block_size, seed=3)
    batch = with_turns(batch, 64) if turned else batch
    torch.manual_seed(4)
    qkv = torch.randn(13, (q_heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.outer(torch.arange(64.0), torch.rand(head_dim // 2))
    table = torch.cat((angles.cos(), angles.sin()), 1)
    norm = HeadNorm(torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype), 1e-6) if normed else None
    results = []
    for kernels in (native(dtype), create_plain_kernels()):
        cache = KVCache(*(torch.zeros(blocks, block_size, kv_heads, head_dim, dtype=dtype) for _ in range(2)))
        q = kernels.pointwise.rotate_and_store(qkv, q_heads, table, cache, batch, norm)
        # The same numbers somewhere, and each where its own attention finds it.
        results.append((q, cache.keys.flatten().sort()[0], kernels.attention.attend(q, cache, batch, 0.2, None)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (31, 7), (33, 64), (96, 51), (300, 576)])
def test_a_product_is_that_of_the_unpacked_weight(dtype: torch.dtype, rows: int, cols: int) -> None:
    """For every number of tokens that a tile can have, and more; what comes out of bf16 is rounded once."""
    torch.manual_seed(rows)
    weight, bias = torch.randn(rows, cols).to(dtype), torch.randn(rows).to(dtype)
    for biased in (None, bias):
        product = native(dtype).matrices.matrix(weight, biased)
        for tokens in (*range(1, 15), 29, 100):
            x = torch.randn(tokens, cols).to(dtype)
            want = x.double() @ weight.double().T + (0 if biased is None else biased.double())
            torch.testing.assert_close(
                product(x).double(), want, atol=1e-4, rtol=1e-5 if dtype == torch.float32 else 2**-8
            )


def test_extreme_scores_stay_finite() -> None:
    kernels = native(torch.float32)
    batch, blocks = ragged([1], [100], 16, seed=0)
    cache = KVCache(torch.full((blocks, 16, 1, 16), 50.0), torch.ones(blocks, 16, 1, 16))
    for sign in (1, -1):
        out = kernels.attention.attend(torch.full((1, 1, 16), sign * 50.0), cache, batch, 1.0, None)
        torch.testing.assert_close(out, torch.ones(1, 16))
    assert math.isfinite(float(kernels.pointwise.silu_mul(torch.tensor([[-1e4, 1.0]]))[0, 0]))


@pytest.mark.parametrize(
    ("variable", "value", "advice"), [("XDG_CACHE_HOME", "/dev/null", "XDG_CACHE_HOME"), ("PATH", "", "install g++")]
)
def test_without_compiler_or_cache_it_falls_back_with_the_advice_that_helps(
    variable: str, value: str, advice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_the_library()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value)
    try:
        with caplog.at_level("WARNING", "weft"):
            assert create_kernels("auto", torch.device("cpu"), shaped(torch.float32)).attention.name == "torch"
        assert advice in caplog.text and ("g++" in advice) == ("g++" in caplog.text)
    finally:
        forget_the_library()


def forget_the_library() -> None:
    """This process looks for the library anew."""
    build_library.cache_clear()
    load_library.cache_clear()


@pytest.mark.parametrize("dtype", CPP_TYPES)
def test_the_compiler_has_nothing_to_warn_of(dtype: str) -> None:
    has_no_warnings(dtype)


def test_fp16_falls_back_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "weft"):
        assert create_kernels("auto", torch.device("cpu"), shaped(torch.float16)).attention.name == "torch"
    assert "float16" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["native", "plain"])
def test_a_row_is_not_touched_by_what_lies_past_its_end(kind: str, dtype: torch.dtype) -> None:
    """Nor by the other rows: their values may have overflowed."""
    kernels: Kernels = native(dtype) if kind == "native" else create_plain_kernels()
    batch, blocks = ragged([1, 1, 20], [5, 90, 33], 16, seed=5)
    torch.manual_seed(6)
    cache = KVCache(*(torch.full((blocks, 16, 1, 16), torch.nan, dtype=dtype) for _ in range(2)))
    for row, context in ((0, 5), (2, 33)):  # row 1 is all NaN
        for position in range(context):
            block = int(batch.tables[row, position // 16])
            cache.keys[block, position % 16], cache.values[block, position % 16] = torch.randn(2, 1, 16)
    got = kernels.attention.attend(torch.randn(22, 1, 16).to(dtype), written(kernels, cache), batch, 0.25, None)
    assert got[[0, *range(2, 22)]].isfinite().all()
    assert got[1].isnan().all()
