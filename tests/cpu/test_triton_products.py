"""Products with quantised weights on GPUs, in Triton's interpreter, against what the weights stand for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu import tiny
from tests.cpu.kernels import triton_kernels
from tests.cpu.matrices import KINDS, MXFP4, TYPICAL_KINDS, random
from weft import LLM, SamplingParams
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.quantised.schemes import ALL_SCHEMES
from weft.ranks.kernels.plain import create_plain_kernels
from weft.ranks.quant.quantised import unpack_nibbles
from weft.ranks.worker import runner

pytest.importorskip("triton", reason="needs triton")

from triton.runtime.interpreter import GridExecutor

from weft.ranks.kernels.triton import products
from weft.ranks.kernels.triton.weights import nibbles_in_order, pack_weight

# Triton's interpreter multiplies bfloat16 matrices wrongly: tests/gpu has that.
DTYPES = [torch.float32, torch.float16]
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-4},
    torch.float16: {"rtol": 2e-3, "atol": 1e-2},
}
# Rows, columns of a matrix of so many: groups that are cut, rows and columns that fill no tile.
CUTS = [(33, Span(0, 576), 576), (1, Span(0, 32), 32), (70, Span(160, 800), 928)]
# Whole columns to a program for one token and for many, and parts of them: the interpreter takes seconds for each.
LOADS = {torch.float32: [(1, (1, 40)), (24, (1, 40))], torch.float16: [(24, (40,))]}


def in_cuts() -> Iterator[Any]:
    """Typical kinds with every cut in both types, the others with one cut in each; the rest is long."""
    for number, kind in enumerate([*KINDS, MXFP4]):
        for place, dtype in enumerate(DTYPES):
            for at, cut in enumerate(CUTS):
                often = kind in TYPICAL_KINDS or (number + 2 * place) % len(CUTS) == at
                yield pytest.param(
                    kind, dtype, *cut, marks=[pytest.mark.long] * (not often), id=f"{kind}-{dtype}-{cut[0]}"
                )


@pytest.mark.parametrize(("type", "dtype", "rows", "cols", "width"), [*in_cuts()])
def test_products(type: str, dtype: torch.dtype, rows: int, cols: Span, width: int) -> None:
    weight = random(type, rows, cols, width, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(rows, generator=generator).to(dtype)
    exact = weight.dequantise(dtype).float()
    for processors, lengths in LOADS[dtype]:
        product = triton_kernels(processors).matrices.matrix(weight, bias)
        for tokens in lengths:
            x = torch.randn(tokens, len(cols), generator=generator).to(dtype)
            got = product(x)
            assert got.dtype == dtype
            torch.testing.assert_close(got.float(), x.float() @ exact.T + bias.float(), **CLOSE[dtype])
        assert torch.equal(product(x), got), "equal batches give equal bits"
        assert not product.through.any(), "the next product counts from nothing"
        plain = triton_kernels(processors).matrices.matrix(weight, None)(x)
        torch.testing.assert_close(plain.float(), x.float() @ exact.T, **CLOSE[dtype])


@pytest.mark.parametrize("type", ["Q4_1", "INT8", MXFP4])
def test_many_rows_are_multiplied_with_what_was_dequantised(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = random(type, 70, Span(160, 448), 576, dtype=torch.float32), torch.randn(70)
    product, x = triton_kernels(4).matrices.matrix(weight, bias), torch.randn(products.MANY, 288)
    want = x @ weight.dequantise().T + bias
    whole = product(x)
    torch.testing.assert_close(whole, want, **CLOSE[torch.float32])
    monkeypatch.setattr(products, "SCRATCH_BYTES", 20 * 288 * 4)
    torch.testing.assert_close(product(x), want, **CLOSE[torch.float32])
    torch.testing.assert_close(product(x[:-1]), whole[:-1], **CLOSE[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("type", [*KINDS, MXFP4])
def test_rows_of_a_table(type: str, dtype: torch.dtype) -> None:
    """To the last bit what the whole table would have, for what is asked of it alone; and the head of the same."""
    weight = random(type, 70, Span(0, 576), 576, dtype=dtype)
    table, numbers = triton_kernels(4).matrices.embedding_table(weight), torch.tensor([0, 69, 31, 32, 33, 0])
    got = table.rows(numbers)
    torch.testing.assert_close(got, weight.dequantise(dtype)[numbers], rtol=0, atol=0)
    assert table.rows(numbers[:0]).shape == (0, 576)
    if dtype == torch.float32:
        x = torch.randn(3, 576)
        torch.testing.assert_close(table(x), x @ weight.dequantise().T, **CLOSE[dtype])


@pytest.mark.parametrize("type", [*KINDS, MXFP4])
def test_products_take_no_more_memory_than_planned(type: str) -> None:
    weight = random(type, 70, Span(160, 1408), 1664)
    assert pack_weight(weight).nbytes == weight.nbytes == ALL_SCHEMES[type].nbytes(70, Span(160, 1408))


def test_nibbles_in_order() -> None:
    numbers = torch.randint(0, 16, (3, 256), dtype=torch.uint8)
    found = nibbles_in_order((numbers.view(3, 8, 2, 16)[:, :, 0] | numbers.view(3, 8, 2, 16)[:, :, 1] << 4).flatten(1))
    assert torch.equal(torch.stack((found & 15, found >> 4), dim=2).flatten(1), numbers)
    assert not torch.equal(unpack_nibbles(found), numbers)


# --- the engine ---


def answers(folder: Path, *, tied: bool, **how: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log probabilities: of a short prompt, and of one in two chunks."""
    path = tiny.write(folder / str(len(list(folder.iterdir()))))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    prompts = [{"prompt_token_ids": [1 + (5 * i + j) % 40 for j in range(n)]} for i, n in enumerate((2, 11))]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=0)
    common: dict[str, Any] = {
        "load_format": "dummy",
        "device": "cpu",
        "executor": "inline",
        "kv_cache_memory_bytes": 1 << 20,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 2,
        "attention_backend": "triton",
    }
    with LLM(str(path), **common, **how) as llm:
        found = [it.outputs[0] for it in llm.generate(prompts, params, use_tqdm=False)]
    scores = [[step[token].logprob for token, step in zip(it.token_ids, it.logprobs, strict=True)] for it in found]
    return [(it.token_ids, score) for it, score in zip(found, scores, strict=True)]


@pytest.mark.parametrize(
    ("quantization", "dtype", "tied", "ranks"),
    [
        pytest.param("int8", "float32", False, 2, marks=pytest.mark.long),
        ("int4", "float32", True, 2),
        pytest.param("q4_0", "float16", False, 1, marks=pytest.mark.long),
        pytest.param("q8_0", "float32", True, 1, marks=pytest.mark.long),
    ],
)
def test_an_engine_gives_what_the_dequantised_weights_give(
    quantization: str, dtype: str, tied: bool, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"tied": tied, "dtype": dtype}
    with monkeypatch.context() as patched:
        one_at_a_time(patched)
        got = answers(tmp_path, **how, quantization=quantization, tensor_parallel_size=ranks)
    # The worker's other kernels dequantise what they get.
    monkeypatch.setattr(runner, "create_kernels", lambda *_: create_plain_kernels())
    want = answers(tmp_path, **how, quantization=quantization)
    assert want != answers(tmp_path, **how), "nothing was quantised"
    for (tokens, scores), (their_tokens, their_scores) in zip(got, want, strict=True):
        assert scores == pytest.approx(their_scores, abs=1e-4 if dtype == "float32" else 2e-2)
        assert tokens == their_tokens


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, and the interpreter keeps a program's number in a global."""
    lock, run = threading.Lock(), GridExecutor.__call__

    def alone(self: GridExecutor, *given: Any, **more: Any) -> None:
        with lock:
            run(self, *given, **more)

    monkeypatch.setattr(GridExecutor, "__call__", alone)
