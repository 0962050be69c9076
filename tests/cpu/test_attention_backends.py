"""Attention by FlashInfer and by torch's varlen attention, neither of which runs here: against a copy of what they take
and give, which computes in plain torch. tests/gpu has the real ones."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu import checkpoints, fake_flashinfer, fake_varlen
from tests.cpu.attention import ragged, shaped
from tests.log_events import logged
from tests.refusals import has_values, refuses
from weft import LLM, SamplingParams
from weft.errors import ConfigError
from weft.plan import backends
from weft.ranks import kernels
from weft.ranks.kernels import attention_inputs, contest, create_kernels, flashinfer, triton, usable, varlen
from weft.ranks.kernels.attention import AttentionShape, HeadNorm, KVCache, PagedAttention, apply_sinks
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.plain import PlainAttention, PlainPointwise, create_plain_kernels
from weft.ranks.kernels.triton import attention, tuning
from weft.ranks.probes import trials
from weft.ranks.worker import graphs, runner

pytest.importorskip("triton", reason="needs triton, whose kernels do the rest")

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
PLAIN = PlainAttention()
FLASHINFER = "0.6.12.post1"
RIVALS = ("flashinfer", "triton")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both are here, and the CPU is a card that computes in fp32 too: what is compared then is exact."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module())
    packages_are(monkeypatch, FLASHINFER)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1 << 10)
    limits(monkeypatch, "flashinfer", interpreted=True, dtypes=("float32", "float16"), head_dims=(16, 64, 128))
    limits(monkeypatch, "varlen", interpreted=True, dtypes=("float32", "float16"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use(monkeypatch, fake_varlen.varlen_attn)


def packages_are(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Triton is installed, and FlashInfer of this version, or not at all."""
    installed = {"triton": "3.6.0"} | ({} if version is None else {backends.FLASHINFER: version})
    monkeypatch.setattr(usable, "kernel_packages", lambda: installed)


def limits(monkeypatch: pytest.MonkeyPatch, backend: str, **others: Any) -> None:
    """The backend with other limits."""
    changed = replace(backends.ATTENTION_BACKENDS[backend], **others)
    monkeypatch.setitem(backends.ATTENTION_BACKENDS, backend, changed)


def use(monkeypatch: pytest.MonkeyPatch, function: Callable[..., torch.Tensor]) -> None:
    names = frozenset(inspect.signature(function).parameters)
    monkeypatch.setattr(varlen, "varlen_function", lambda: (function, names))


MADE: dict[str, Callable[[AttentionShape], PagedAttention]] = {
    "flashinfer": lambda shape: flashinfer.FlashInferAttention(CPU, shape),
    "varlen": lambda shape: varlen.VarlenAttention(CPU, shape, paged=False),
    "varlen, paged": lambda shape: varlen.VarlenAttention(CPU, shape, paged=True),
}
CASES = [
    # counts, contexts, q_heads, kv_heads, head_dim, block_size, window
    ([1], [1], 2, 1, 64, 16, None),
    ([1, 1, 1], [5, 70, 200], 9, 3, 64, 16, None),
    ([40, 7], [40, 7], 6, 3, 64, 16, None),  # whole prompts
    ([1, 40, 7, 1], [130, 40, 90, 33], 6, 2, 128, 16, None),  # a chunk, a hit, one token after them
    ([1, 50, 3], [300, 120, 10], 8, 1, 64, 32, 17),
    ([20], [90], 7, 7, 64, 4, 1),
]


@pytest.mark.parametrize("case", CASES, ids=[str(c[0]) for c in CASES])
@pytest.mark.parametrize("kind", MADE)
def test_attention_is_the_plain_one(kind: str, case: tuple) -> None:
    counts, contexts, q_heads, kv_heads, head_dim, block_size, window = case
    others = {"windows": (None, window), "block_size": block_size}
    attention = MADE[kind](shaped(torch.float32, head_dim, q_heads, kv_heads, **others))
    for seed in (1, 2):  # the second step has other rows
        batch, blocks = ragged(counts, contexts, block_size, seed=seed)
        torch.manual_seed(seed)
        cache = KVCache(*(torch.randn(blocks, block_size, kv_heads, head_dim) for _ in range(2)))
        q = torch.randn(sum(counts), q_heads, head_dim)
        attention.prepare(batch)
        for seen in (window, None):  # layers of both kinds
            sums, want_sums = (torch.full((sum(counts), q_heads), torch.nan) for _ in range(2))
            got = attention.attend(q, cache, batch, head_dim**-0.5, seen, sums)
            want = PLAIN.attend(q, cache, batch, head_dim**-0.5, seen, want_sums)
            torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(sums, want_sums, atol=2e-4, rtol=2e-4)
            assert torch.equal(attention.attend(q, cache, batch, head_dim**-0.5, seen), got)
            sinks = torch.randn(q_heads) * 4
            got = attention.attend(q, cache, batch, head_dim**-0.5, seen, sinks=sinks)
            torch.testing.assert_close(got, apply_sinks(want, want_sums, sinks), atol=2e-4, rtol=2e-4)
        contexts = contexts[::-1] if counts == counts[::-1] else contexts


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "rows", "reserved"),
    [
        (32, 8, 256, 33 * 128),  # a prompt's tiles on 132 multiprocessors
        (40, 8, 512, 671 * 16),
        (64, 8, 512, 767 * 16),
        (64, 2, 256, 383 * 64),
    ],
)
def test_flashinfer_s_workspace_holds_what_it_sets_aside(
    q_heads: int, kv_heads: int, rows: int, reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its plan fails. As PrefillPlan of 0.5 to 0.7.0 counts, tiles times their rows for each query head."""
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 128 << 20)
    shape = shaped(torch.float16, 128, q_heads, kv_heads, rows=rows)
    assert flashinfer.workspace_bytes(shape, 132) >= q_heads * reserved * (128 + 1) * 4


def test_flashinfer_reads_an_fp8_cache() -> None:
    attention = MADE["flashinfer"](shaped(torch.float16, cache_dtype=FP8))
    batch, blocks = ragged([1, 20], [40, 30], 16, seed=3)
    torch.manual_seed(3)
    cache = KVCache(*(torch.randn(blocks, 16, 2, 64).to(FP8) for _ in range(2)))
    q = torch.randn(21, 4, 64, dtype=torch.float16)
    attention.prepare(batch)
    wide = KVCache(cache.keys.float(), cache.values.float())
    want = PLAIN.attend(q.float(), wide, batch, 0.125, None)
    torch.testing.assert_close(attention.attend(q, cache, batch, 0.125, None).float(), want, atol=4e-3, rtol=4e-3)


def test_torch_2_11_has_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, fake_varlen.varlen_attn_of_2_11)
    assert not varlen.activate_flash3(CPU, shaped(torch.float32))
    test_attention_is_the_plain_one("varlen", CASES[3])


def test_batches_beyond_the_gathering_memory_are_triton_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "MAX_GATHERED_TOKENS", 169)
    calls: list[int] = []

    def counted(*given: object, **more: object) -> torch.Tensor:
        calls.append(1)
        return fake_varlen.varlen_attn(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(varlen, "varlen_function", lambda: (counted, frozenset({"enable_gqa"})))
    for contexts, count in (([40, 129], 2), ([40, 130], 0)):
        calls.clear()
        case = ([40, 7], contexts, 6, 3, 64, 16, None)
        attention = MADE["varlen"](shaped(torch.float32, 64, 6, 3))
        batch, blocks = ragged(case[0], contexts, 16, seed=1)
        cache = KVCache(*(torch.randn(blocks, 16, 3, 64) for _ in range(2)))
        q = torch.randn(47, 6, 64)
        attention.prepare(batch)
        for _ in range(2):
            got = attention.attend(q, cache, batch, 0.125, None)
        torch.testing.assert_close(got, PLAIN.attend(q, cache, batch, 0.125, None), atol=2e-4, rtol=2e-4)
        assert len(calls) == count


def test_the_copy_takes_what_torch_takes() -> None:
    real = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch 2.10 or later")
    names, known = (list(inspect.signature(f.varlen_attn).parameters) for f in (fake_varlen, real))
    if "block_table" not in known:
        pytest.skip("needs torch 2.12 or later, whose function is copied")
    assert names == known


# --- whole engines ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that see everything and three with a window."""
    return checkpoints.make("qwen2-window", tmp_path_factory.mktemp("attention"))


PROMPTS = [[1, 5, 9, 33, 7], list(range(3, 40)), [4], [40, 41, 42] * 6]


def answers(path: Path, **how: object) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True, executor="inline", **how) as llm:
        first, again = (llm.generate(PROMPTS, params) for _ in range(2))  # the second from the prefix cache
        assert again[1].num_cached_tokens >= 32
    assert [it.outputs[0].token_ids for it in first] == [it.outputs[0].token_ids for it in again]
    return [it.outputs[0].token_ids for it in first]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> list[list[int]]:
    return answers(checkpoint, attention_backend="torch")


class PaddedPointwise(PlainPointwise):
    """Skips the rows that fill a graph up."""

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        real = batch.slots >= 0
        part = replace(batch, positions=batch.positions[real], slots=batch.slots[real])
        q = qkv.new_zeros(len(qkv), q_heads, cache.keys.shape[-1])
        q[real] = super().rotate_and_store(qkv[real], q_heads, rope, cache, part, norm)
        return q


def composed_kernels(attention: PagedAttention, device: torch.device, shape: AttentionShape) -> Kernels:
    """Attention of another kind beside the plain kernels: Triton's would take minutes in its interpreter."""
    return replace(create_plain_kernels(), attention=attention, pointwise=PaddedPointwise())


def decode(
    q: torch.Tensor,
    cache: KVCache,
    batch: Batch,
    rows: int,
    scale: float,
    window: int | None,
    processors: int,
    out: torch.Tensor,
    *sizes: object,
) -> None:
    """Result of Triton's kernel, independent of its sizes."""
    starts, context, tables = batch.row_starts[: rows + 1], batch.context[:rows], batch.tables[:rows]
    part = replace(batch, row_starts=starts, context=context, tables=tables)
    out[:rows] = PLAIN.attend(q[:rows], cache, part, scale, window)


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "complete_kernels", composed_kernels)
    monkeypatch.setattr(attention, "decode", decode)
    monkeypatch.setattr(attention.TritonAttention, "launches", lambda *_: [])


@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize(
    "how",
    [{"max_num_batched_tokens": 24}, {"tensor_parallel_size": 2}, {"async_scheduling": True}],
    ids=["chunks", "tp2", "ahead"],
)
@pytest.mark.parametrize("backend", ["flashinfer", "varlen"])
def test_an_engine_gives_the_same_tokens(checkpoint: Path, plain: list[list[int]], backend: str, how: dict) -> None:
    assert answers(checkpoint, attention_backend=backend, **how) == plain


@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize("backend", ["flashinfer", "varlen"])
def test_graphs_give_the_same_tokens(
    checkpoint: Path, plain: list[list[int]], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture is a function that is called again: what it has been told apart from its tensors stays as it was."""

    def capture() -> Callable[[Callable[[], None]], Callable[[], None]]:
        return lambda run: (run(), run)[1]

    monkeypatch.setattr(runner.ModelRunner, "_agree_on_captures", lambda self: True)
    monkeypatch.setattr(runner, "CudaGraphs", capture)
    monkeypatch.setattr(graphs, "graph_sizes", lambda most: [1, 2, 4])
    assert answers(checkpoint, attention_backend=backend, max_num_seqs=4) == plain


# --- what cannot be ---


def refused(backend: str, *words: str, **others: object) -> None:
    shape = shaped(torch.float16, **{"head_dim": 64, **others})  # type: ignore[arg-type]
    with refuses(ConfigError, "attention-backend-not-usable") as caught:
        create_kernels(backend, CPU, shape)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_flashinfer_refuses_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    refused("flashinfer", "80", "64, 128", head_dim=80)
    limits(monkeypatch, "flashinfer", dtypes=("bfloat16",))
    refused("flashinfer", "float16")
    packages_are(monkeypatch, "0.4.1")
    refused("flashinfer", "flashinfer-python 0.4.1", "0.5")
    packages_are(monkeypatch, None)
    refused("flashinfer", "weft-llm[cuda]")


@pytest.mark.parametrize("backend", ["flashinfer", "varlen"])
def test_neither_runs_on_a_cpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, backend, interpreted=False)
    refused(backend, "GPUs", "CPU")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    refused(backend, "GPUs", "CPU", "TRITON_INTERPRET=1")  # by Triton's, which the rest is


def test_flashinfer_whose_kernels_cannot_be_built_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: object, **more: object) -> None:
        raise RuntimeError("Ninja build failed:\n[1/2] nvcc ...\nsh: nvcc: not found\n")

    monkeypatch.setattr(sys.modules["flashinfer"], "BatchDecodeWithPagedKVCacheWrapper", broken)
    refused("flashinfer", "nvcc: not found")
    with caplog.at_level("INFO", "weft"):
        assert fastest(shaped(torch.float16)).name == "triton"
    assert logged(caplog, "attention-backend-replaced") == [{"backend": "flashinfer", "instead": "triton"}]


def test_triton_refuses_what_the_planner_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head wider than its tiles, on any device, and a GPU that Triton compiles nothing for."""
    for backend in ("triton", "flashinfer", "varlen"):
        refused(backend, "256", "320", head_dim=320)
    monkeypatch.setattr(usable, "gpu_cards", lambda device: [("Tesla V100", (7, 0))])
    refused("triton", "Tesla V100", "7.0", "7.5")


def test_varlen_refuses_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, "triton", widest_head=None)
    refused("varlen", "260", "256", head_dim=260)
    refused("varlen", "FP8", cache_dtype=FP8)
    limits(monkeypatch, "varlen", dtypes=("bfloat16",))
    refused("varlen", "float16")
    limits(monkeypatch, "varlen", dtypes=None)
    monkeypatch.setattr(varlen, "varlen_function", lambda: None)
    refused("varlen", torch.__version__, "2.11")


@pytest.mark.parametrize("backend", backends.ATTENTION_BACKENDS)
def test_every_row_has_its_module(backend: str) -> None:
    """The modules are named by strings, which no type checker resolves."""
    row = backends.ATTENTION_BACKENDS[backend]
    assert callable(importlib.import_module(row.module).create_attention)
    rest = importlib.import_module(backends.ATTENTION_BACKENDS[row.rest].module)
    assert callable(rest.complete_kernels) and callable(rest.create_rounding)


# --- the faster of two ---


def fastest(shape: AttentionShape) -> PagedAttention:
    """Backend of "auto" on a GPU."""
    own = create_kernels("triton", CPU, shape).attention
    return kernels._winner(own, CPU, shape)


def both(shape: AttentionShape) -> list[PagedAttention]:
    return [create_kernels(backend, CPU, shape).attention for backend in ("flashinfer", "triton")]


@pytest.mark.parametrize(
    ("times", "won"),
    [
        ({"flashinfer": (2e-6, 5e-6), "varlen": (3e-6, 5e-6), "triton": (3e-6, 6e-6)}, "flashinfer"),
        ({"flashinfer": (4e-6, 5e-6), "varlen": (2e-6, 5e-6), "triton": (2e-6, 6e-6)}, "varlen"),
        # The fastest for decode rows takes far longer for prompts.
        ({"flashinfer": (2e-6, 9e-6), "varlen": (3e-6, 8e-6), "triton": (3e-6, 5e-6)}, "triton"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_fastest_for_rows_and_prompts_is_taken_and_all_figures_are_told(
    times: dict[str, tuple[float, float]], won: str, caplog: pytest.LogCaptureFixture
) -> None:
    shape = shaped(torch.float32, rows=3, length=40)
    left, outs = [seconds for took in times.values() for seconds in took], list[torch.Tensor]()

    def clock(run: Callable[[], torch.Tensor]) -> float:
        outs.append(run())
        return left.pop(0)

    rivals = [create_kernels(backend, CPU, shape).attention for backend in times]
    with caplog.at_level(logging.INFO, "weft"):
        assert contest.measure_fastest(rivals, CPU, shape, clock) == won
    # The same rows and prompts over the same cache.
    assert [len(out) for out in outs] == [3, 80] * 3
    for other in (2, 4):
        torch.testing.assert_close(outs[other], outs[0])
        torch.testing.assert_close(outs[other + 1], outs[1])
    assert logged(caplog, "attention-backends-compared") == [
        {"rows": 3, "tokens": 40, "prompt": 40, "seconds": times, "fastest": won}
    ]
    has_values(caplog.text, *(f"{seconds * 1e6:.0f}" for took in times.values() for seconds in took), won)


def test_backends_that_cannot_be_measured_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    shape = shaped(torch.float32, rows=3, length=40)

    def clock(run: Callable[[], object]) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    assert contest.measure_fastest(both(shape), CPU, shape, clock) is None
    assert "(CUDA out of memory)" in caplog.text
    contest.save_winner(contest.winner_path(CPU, shape, "0.6"), None)
    assert contest.load_winner(contest.winner_path(CPU, shape, "0.6"), RIVALS) is None


@pytest.mark.parametrize("won", ["flashinfer", "varlen", "triton"])
def test_the_winner_is_known_at_the_next_start(won: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a library that has lost is not even imported; another version of it, or other heads, are another contest."""
    shape, held = shaped(torch.float32), []

    def measured(found: Sequence[PagedAttention], *given: object) -> str:
        held.append(1)
        return won

    monkeypatch.setattr(contest, "measure_fastest", measured)
    assert fastest(shape).name == won
    if won != "flashinfer":
        monkeypatch.setattr(flashinfer, "create_attention", None)
    assert fastest(shape).name == won
    assert len(held) == 1
    assert contest.load_winner(contest.winner_path(CPU, shape, "0.6.13"), RIVALS) is None
    assert contest.load_winner(contest.winner_path(CPU, replace(shape, kv_heads=1), "0.6.12.post1"), RIVALS) is None


@pytest.mark.parametrize("content", [b"", b"torch", b"\xff\xfe", b"{}"])
def test_a_damaged_note_is_none(content: bytes) -> None:
    note = contest.winner_path(CPU, shaped(torch.float32), "0.6")
    contest.save_winner(note, "triton")
    assert note and contest.load_winner(note, RIVALS) == "triton"
    note.write_bytes(content)
    assert contest.load_winner(note, RIVALS) is None


def test_auto_says_nothing_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packages_are(monkeypatch, None)
    monkeypatch.setattr(varlen, "varlen_function", lambda: None)
    assert fastest(shaped(torch.float32)).name == "triton"
    assert not caplog.records


# --- the table of all of them ---


def test_a_table_goes_on_where_none_can_be_run() -> None:
    """scripts/gpu_check attention: a card that lacks memory for one table has it for the next."""
    from scripts.programs.gpu_check.work.attention import compared

    def broken(words: list[str], *given: object) -> torch.Tensor:
        raise RuntimeError(*words)

    entries = {"ours": partial(broken, []), "theirs": partial(broken, ["no code\nfor this GPU"])}
    given = attention_inputs.decode_inputs(shaped(torch.float16), CPU, [3])
    race = trials.Race("decode", [given], entries)
    figures = list(compared("m", race, tuning.DECODE, "GB/s", 1.0, None, rehearse=False))
    assert [(figure.name, figure.value, figure.note) for figure in figures] == [
        ("m, decode: ours", None, "RuntimeError"),
        ("m, decode: theirs", None, "no code"),
    ]
