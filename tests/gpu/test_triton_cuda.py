"""The Triton kernels as they are compiled for the card, bfloat16 included, against the loop that is obviously right.

And CUDA graphs and steps scheduled ahead, which change no token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cpu import checkpoints
from tests.cpu.attention import ragged, shaped
from tests.cpu.test_kernels import attend_by_loop
from tests.cpu.test_triton import MIXED
from weft import LLM, SamplingParams
from weft.ranks.kernels import create_kernels
from weft.ranks.kernels.attention import HeadNorm, KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.plain import PlainAttention, PlainPointwise
from weft.ranks.worker import runner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
CUDA = torch.device("cuda")
LONG = ([1, 1, 500, 1, 60], [8000, 3, 2000, 4097, 60], 32, 8, 128, 16, None)


def there(batch: Batch) -> Batch:
    return replace(
        batch, **{name: value.to(CUDA) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", [*MIXED, LONG], ids=[str(c[0]) for c in [*MIXED, LONG]])
def test_attention_over_paged_kv_is_exact(case: tuple, dtype: torch.dtype) -> None:
    counts, contexts, q_heads, kv_heads, head_dim, block_size, window = case
    batch, blocks = ragged(counts, contexts, block_size, seed=len(counts))
    torch.manual_seed(1)
    cache = KVCache(*(torch.randn(blocks, block_size, kv_heads, head_dim).to(dtype) for _ in range(2)))
    q = torch.randn(sum(counts), q_heads, head_dim).to(dtype)
    kernels = create_kernels("triton", CUDA, shaped(dtype, head_dim, q_heads, kv_heads))
    on_card = KVCache(cache.keys.to(CUDA), cache.values.to(CUDA))
    sums, want_sums = torch.empty(q.shape[:2], device=CUDA), torch.empty(q.shape[:2])
    got = kernels.attention.attend(q.to(CUDA), on_card, there(batch), head_dim**-0.5, window, sums).cpu()
    if case is LONG:
        want = PlainAttention().attend(
            q.float(), KVCache(cache.keys.float(), cache.values.float()), batch, head_dim**-0.5, None, want_sums
        )
    else:
        want = attend_by_loop(q, cache, batch, head_dim**-0.5, window, want_sums)
    torch.testing.assert_close(got.double(), want.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(sums.cpu(), want_sums, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [50, 576, 5120])
def test_operations_between_the_products(dtype: torch.dtype, width: int) -> None:
    fast, plain = create_kernels("triton", CUDA, shaped(dtype)).pointwise, PlainPointwise()
    torch.manual_seed(2)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    x, residual = (torch.randn(37, width, device=CUDA).to(dtype) for _ in range(2))
    weight = torch.randn(width, device=CUDA).to(dtype)
    ours, theirs = residual.clone(), residual.clone()
    torch.testing.assert_close(fast.add_norm(x, ours, weight, 1e-5), plain.add_norm(x, theirs, weight, 1e-5), **close)
    torch.testing.assert_close(ours, theirs, **close)
    wide = torch.randn(37, 2 * width, device=CUDA).to(dtype) * 8
    torch.testing.assert_close(fast.silu_mul(wide), plain.silu_mul(wide), **close)
    batch, blocks = ragged([30, 1, 6], [40, 7, 9], 4, seed=3)
    heads = torch.randn(37, 10 * 64, device=CUDA).to(dtype)
    norm = HeadNorm(*(torch.randn(64, device=CUDA).to(dtype) for _ in range(2)), 1e-6)
    rope = torch.randn(64, 64, device=CUDA)
    caches = [KVCache(*(torch.zeros(blocks, 4, 2, 64, dtype=dtype, device=CUDA) for _ in range(2))) for _ in range(2)]
    queries = [
        pointwise.rotate_and_store(heads, 6, rope, cache, there(batch), norm)
        for pointwise, cache in zip((fast, plain), caches, strict=True)
    ]
    torch.testing.assert_close(*queries, **close)
    torch.testing.assert_close(caches[0].keys, caches[1].keys, **close)


def test_a_cache_in_fp8_rounds_what_it_keeps() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no FP8")
    dtype, kind = torch.bfloat16, torch.float8_e4m3fn
    batch, blocks = ragged([30, 1, 6], [40, 7, 9], 4, seed=3)
    heads = torch.randn(37, 10 * 64, device=CUDA).to(dtype) * 4
    rope = torch.zeros(64, 64, device=CUDA)
    rope[:, :32] = 1.0
    fast, cases = create_kernels("triton", CUDA, shaped(dtype)), []
    for kept in (kind, dtype):
        cache = KVCache(*(torch.zeros(blocks, 4, 2, 64, dtype=kept, device=CUDA) for _ in range(2)))
        q = fast.pointwise.rotate_and_store(heads, 6, rope, cache, there(batch), None)
        cases.append((cache, q))
    assert torch.equal(cases[0][0].keys.float(), cases[1][0].keys.to(kind).float())
    assert torch.equal(cases[0][0].values.float(), cases[1][0].values.to(kind).float())
    rounded = KVCache(cases[0][0].keys.to(dtype), cases[0][0].values.to(dtype))
    got, want = (
        fast.attention.attend(cases[0][1], cache, there(batch), 0.125, None) for cache in (cases[0][0], rounded)
    )
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "how", [{}, {"enforce_eager": True}, {"async_scheduling": False}, {"max_num_seqs": 3}], ids=str
)
def test_graphs_and_scheduling_ahead_change_no_token(tmp_path_factory: pytest.TempPathFactory, how: dict) -> None:
    path = checkpoints.make("qwen3", tmp_path_factory.mktemp("graphs"))
    prompts = [[3 + (7 * i + j) % 150 for j in range(1 + 5 * i)] for i in range(11)]
    params = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=9 + 5 * i, ignore_eos=True) for i in range(11)
    ]

    def answers(**chosen: object) -> list[list[int]]:
        common = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 64_000_000}
        with LLM(str(path), **common, **chosen) as llm:
            return [it.outputs[0].token_ids for it in llm.generate(prompts, params)]

    plain = answers(device="cuda", attention_backend="torch", enforce_eager=True, async_scheduling=False)
    assert answers(device="cuda", **how) == plain


def test_decode_steps_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []

    class Counted(runner.CudaGraphs):
        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            replay = super().__call__(run)
            return lambda: (replays.append(1), replay())[1]

    monkeypatch.setattr(runner, "CudaGraphs", Counted)
    path = checkpoints.make("llama", tmp_path)
    with LLM(str(path), skip_tokenizer_init=True, executor="inline", kv_cache_memory_bytes=64_000_000) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(replays) >= 7
