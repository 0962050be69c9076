"""FlashInfer and torch's varlen attention on the card, where they are installed: the same numbers as the plain kernels,
graphs that are told of other rows, whole engines; and how long they take beside Triton's, which is printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cpu import tiny
from tests.cpu.attention import as_staged, ragged, shaped
from tests.cpu.test_attention_backends import CASES
from tests.gpu.test_triton_cuda import CUDA, LONG, TOLERANCE, there
from weft import LLM, SamplingParams
from weft.ranks.kernels import attention_obstacle, create_kernels
from weft.ranks.kernels.attention import KVCache, PagedAttention
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.plain import PlainAttention
from weft.ranks.worker.graphs import CudaGraphs, blank_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")

PLAIN = PlainAttention()
FP8 = torch.float8_e4m3fn


@pytest.fixture(params=["flashinfer", "varlen"])
def backend(request: pytest.FixtureRequest) -> str:
    reason = attention_obstacle(request.param, CUDA, shaped(torch.float16))
    if reason is not None:
        pytest.skip(f"needs {request.param}: {reason}")
    return request.param


def exact(
    attention: PagedAttention, batch: Batch, q: torch.Tensor, cache: KVCache, windows: tuple, dtype: torch.dtype
) -> None:
    attention.prepare(there(batch))
    on_card = KVCache(cache.keys.to(CUDA), cache.values.to(CUDA))
    wide = KVCache(cache.keys.float(), cache.values.float())
    scale, close = q.shape[-1] ** -0.5, TOLERANCE[dtype]
    for window in windows:
        sums, want_sums = torch.empty(q.shape[:2], device=CUDA), torch.empty(q.shape[:2])
        got = attention.attend(q.to(CUDA), on_card, there(batch), scale, window, sums).cpu().float()
        want = PLAIN.attend(q.float(), wide, batch, scale, window, want_sums)
        torch.testing.assert_close(got, want, atol=close, rtol=close)
        torch.testing.assert_close(sums.cpu(), want_sums, atol=close, rtol=close)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES, LONG], ids=[str(c[0]) for c in [*CASES, LONG]])
def test_attention_over_paged_kv_is_exact(backend: str, case: tuple, dtype: torch.dtype) -> None:
    counts, contexts, q_heads, kv_heads, head_dim, block_size, window = case
    windows = tuple({None, window})
    others = {"windows": windows, "block_size": block_size, "length": 8192, "tokens": 2048}
    attention = create_kernels(backend, CUDA, shaped(dtype, head_dim, q_heads, kv_heads, **others)).attention
    batch, blocks = ragged(counts, contexts, block_size, seed=1)
    torch.manual_seed(1)
    cache = KVCache(*(torch.randn(blocks, block_size, kv_heads, head_dim).to(dtype) for _ in range(2)))
    exact(attention, batch, torch.randn(sum(counts), q_heads, head_dim).to(dtype), cache, windows, dtype)


def test_flashinfer_reads_an_fp8_cache() -> None:
    shape = shaped(torch.bfloat16, 128, 8, 2, cache_dtype=FP8)
    if attention_obstacle("flashinfer", CUDA, shape) is not None or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs flashinfer and a card with FP8")
    batch, blocks = ragged([1, 1, 40], [130, 7, 90], 16, seed=3)
    torch.manual_seed(3)
    cache = KVCache(*(torch.randn(blocks, 16, 2, 128).to(FP8) for _ in range(2)))
    q = torch.randn(42, 8, 128).to(torch.bfloat16)
    exact(create_kernels("flashinfer", CUDA, shape).attention, batch, q, cache, (None,), torch.bfloat16)


def test_a_graph_is_told_of_other_rows(backend: str) -> None:
    """Steps are laid into it while the ones before may still run: nothing that they read is overwritten too early."""
    dtype, rows = torch.float16, 8
    shape = shaped(dtype, 128, 16, 8, windows=(None, 33), rows=rows, length=4096)
    kernels = create_kernels(backend, CUDA, shape)
    batch = blank_batch(rows, 256, CUDA)
    contexts = [[1 + 517 * i * (n + 1) % 3000 for i in range(n)] for n in range(1, rows + 1)]
    steps = [ragged([1] * len(row), row, 16, seed=len(row)) for row in contexts]
    torch.manual_seed(1)
    blocks = max(count for _, count in steps)
    cache = KVCache(*(torch.randn(blocks, 16, 8, 128, dtype=dtype, device=CUDA) for _ in range(2)))
    q = torch.randn(rows, 16, 128, dtype=dtype, device=CUDA)
    outs: list[torch.Tensor] = []

    def run() -> None:
        outs[:] = [kernels.attention.attend(q, cache, batch, shape.scale, window) for window in shape.windows]

    kernels.attention.prepare(batch)
    run()
    replay = CudaGraphs()(run)
    found = []
    for step, _ in steps * 3:
        kernels.pointwise.fill_batch(as_staged(there(step)), batch)
        kernels.attention.prepare(replace(batch, host=step.lengths().padded(rows)))
        replay()
        found.append([out[: step.rows].clone() for out in outs])
    wide = KVCache(cache.keys.float().cpu(), cache.values.float().cpu())
    for (step, _), got in zip(steps * 3, found, strict=True):
        for window, out in zip(shape.windows, got, strict=True):
            want = PLAIN.attend(q[: step.rows].float().cpu(), wide, step, shape.scale, window)
            torch.testing.assert_close(out.cpu().float(), want, atol=4e-3, rtol=4e-3)


def test_an_engine_gives_the_tokens_of_triton_s(backend: str, tmp_path: Path) -> None:
    """But where two were nearly as likely: another order of sums."""
    path = tiny.write(tmp_path / "tiny")
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"head_dim": 64}))
    prompts = [[3 + (7 * i + j) % 20 for j in range(1 + 9 * i)] for i in range(11)]
    params = [SamplingParams(temperature=0, max_tokens=9 + 5 * i, ignore_eos=True) for i in range(11)]

    def answers(**how: object) -> list[list[int]]:
        common = {"dtype": "float16", "load_format": "dummy", "kv_cache_memory_bytes": 64_000_000}
        with LLM(str(path), device="cuda", skip_tokenizer_init=True, **common, **how) as llm:
            return [it.outputs[0].token_ids for it in llm.generate(prompts, params)]

    want = answers(attention_backend="triton")
    for how in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 48}, {"max_num_seqs": 3}):
        got = answers(attention_backend=backend, **how)
        assert sum(a != b for a, b in zip(got, want, strict=True)) <= 2, how
