"""The worker's whole path on a GPU, on a stand-in for one (fake_cuda.py): the tokens of the plain path on a CPU."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.log_events import logged

pytest.importorskip("triton", reason="needs triton")

from scripts.programs.gpu_check.work import bench
from tests.cpu import checkpoints, fake_cuda, tiny
from tests.cpu.captured import Captured
from tests.cpu.fake_cuda import CUDA, Card, CardError, OnCard, the_card  # noqa: F401
from tests.cpu.layouts import plan_for
from tests.cpu.test_commands import with_other_weights
from weft import LLM, SamplingParams
from weft.engine.core import kv
from weft.engine.core.step import StepPlan
from weft.engine.executors import ranks
from weft.engine.frontend.outputs import RequestOutput
from weft.ranks.comm import Links, threads
from weft.ranks.kernels import contest, create_rounding
from weft.ranks.kernels.attention import AttentionShape
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.capture import WORKSPACE_BYTES, release_cached_memory, synchronize_device
from weft.ranks.kernels.triton import attention
from weft.ranks.kernels.triton.pointwise import silu_mul
from weft.ranks.models.decoder import DecoderModel
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.weights.load import allocate_parameters, load_weights
from weft.ranks.weights.sharded import tensor_parts
from weft.ranks.worker import graphs, host_copies, runner, worker
from weft.ranks.worker import swap as swaps
from weft.ranks.worker.device import ToHost
from weft.ranks.worker.graphs import CudaGraphs
from weft.ranks.worker.host_copies import SPARE_BYTES
from weft.ranks.worker.importance import measure_importance
from weft.ranks.worker.request_slots import BUFFERS, Staging
from weft.ranks.worker.swap import WeightSwap

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "executor": "inline",
    "max_model_len": 128,
    "kv_cache_memory_bytes": 1_000_000,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 24,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
}
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # keys and values of two layers, 16 tokens, two heads of 16 float32
ON_CPU = {"device": "cpu", "attention_backend": "torch", "async_scheduling": False}
ON_CARD = {"device": "cuda", "attention_backend": "triton"}
WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"top_p": 0.9, "top_k": 20},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"logit_bias": {5: 2.0}, "min_tokens": 6, "max_tokens": 8},
    {"allowed_token_ids": [3, 4, 5, 6, 7, 8, 9]},
    {"prompt_logprobs": 2},
    {"n": 2},
    {"top_k": 1},
    {"stop_token_ids": [3, 4, 5], "ignore_eos": False, "logprobs": 0},
]
# Of one token, of several, and longer than a step.
PROMPTS = [[3 + (7 * i + 3 * j) % 22 for j in range(1 + (i * 11) % 29)] for i in range(12)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("card") / "tiny"))


def asked(wishes: list[dict[str, Any]]) -> list[SamplingParams]:
    usual = {"temperature": 0.9, "ignore_eos": True}
    return [SamplingParams(**{**usual, "seed": i, "max_tokens": 3 + i % 5, **wish}) for i, wish in enumerate(wishes)]


def answers(path: str, params: list[SamplingParams], **how: Any) -> list[list[Any]]:
    with LLM(path, **{**COMMON, **how}) as llm:
        return [told(it) for it in llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)]


def told(answer: RequestOutput) -> list[Any]:
    """Tokens, ends and figures, those to three places."""

    def figures(positions: Any) -> list[Any]:
        return [at and {token: (round(it.logprob, 3), it.rank) for token, it in at.items()} for at in positions or ()]

    of_choices = [(list(it.token_ids), it.finish_reason, figures(it.logprobs)) for it in answer.outputs]
    return [of_choices, figures(answer.prompt_logprobs)]


def test_all_that_can_be_asked(path: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    params = asked(WISHES)
    want = answers(path, params, **ON_CPU)
    laid = launches_before_replays(card, monkeypatch)
    with LLM(path, **COMMON, **ON_CARD) as llm:
        laid.clear()
        before = card.waits.copy()
        assert [told(it) for it in llm.generate(PROMPTS, params, use_tqdm=False)] == want
        # Logprobs of a prompt are brought at once, and nothing else is waited for.
        assert card.waits - before == {"tolist": 1}
    assert card.replays > 5
    # Unknown tokens and new blocks included, a step comes in one copy and is laid into its graph by one kernel.
    assert len(laid) > 5 and {*laid} == {2}, laid


def launches_before_replays(card: Card, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled while steps run: launches of each one that is replayed, and admits no request, before its replay."""
    counts: list[int] = []
    begun: list[int | None] = [None]
    execute, replay = worker.Worker.execute, fake_cuda.Graph.replay

    def counted_execute(rank: worker.Worker, step: StepPlan) -> Any:
        begun[0] = None if step.admitted else card.launches
        return execute(rank, step)

    def counted_replay(graph: fake_cuda.Graph) -> None:
        if begun[0] is not None:
            counts.append(card.launches - begun[0])
        replay(graph)

    monkeypatch.setattr(worker.Worker, "execute", counted_execute)
    monkeypatch.setattr(fake_cuda.Graph, "replay", counted_replay)
    return counts


@pytest.mark.usefixtures("card")
def test_captures_are_counted() -> None:
    """scripts/gpu_check reports graphs that were captured while it measured."""
    with bench.captures_counted() as captured:
        CudaGraphs()(lambda: None)
    CudaGraphs()(lambda: None)
    assert len(captured) == 1


def test_attention_by_torch_runs_without_graphs(path: str, card: Card, caplog: pytest.LogCaptureFixture) -> None:
    """It asks the card for contexts in every layer, which no capture allows."""
    params = asked(WISHES[:3])
    want = answers(path, params, **ON_CPU)
    assert answers(path, params, device="cuda", attention_backend="torch") == want
    assert card.replays == 0
    assert logged(caplog, "no-cuda-graphs") == [{}]


def test_requests_are_preempted(path: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of a block each, all of which want three: there are five, and one more for each is all that is kept."""
    monkeypatch.setattr(kv, "GROWTH", 1)
    prompts = [[3 + (i + j) % 20 for j in range(10)] for i in range(3)]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(3)]
    found = []
    for how in (ON_CPU, {**ON_CARD, "kv_cache_memory_bytes": 5 * BLOCK_BYTES, "max_model_len": 64}):
        with LLM(path, **{**COMMON, **how}) as llm:
            found.append([told(it) for it in llm.generate(prompts, params, use_tqdm=False)])
            preempted = llm.stats().preemptions
    assert found[1] == found[0] and preempted


def test_requests_that_go_away_leave_the_others_as_they_were(
    path: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "CAPTURE_S", 0.0)  # all but the largest are captured between the requests
    params = asked([{}, {"temperature": 0.0}, {"top_p": 0.8}])
    want = answers(path, params, **ON_CPU)
    with LLM(path, **COMMON, **ON_CARD) as llm:
        for _ in range(2):
            for number, _ in enumerate(llm.stream({"prompt_token_ids": PROMPTS[5]}, SamplingParams(max_tokens=20))):
                if number == 2:
                    break  # with a step under way
            got = llm.generate(PROMPTS[:3], params, use_tqdm=False)
            assert [told(it) for it in got] == want


def measured_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each runner has measured for its largest step."""
    measured, measure = [], runner.ModelRunner.measure

    def note(of: runner.ModelRunner, rehearse: runner.Rehearse) -> None:
        measure(of, rehearse)
        measured.append(of.activation_bytes)

    monkeypatch.setattr(runner.ModelRunner, "measure", note)
    return measured


@pytest.mark.long
def test_no_step_takes_more_memory_than_was_measured(path: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measured_bytes(monkeypatch)
    wishes: list[dict[str, Any]] = [
        {},
        {"logprobs": 20, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1},
        {"prompt_logprobs": 20},
        {"allowed_token_ids": [3, 4]},
    ]
    with LLM(path, **{**COMMON, "max_num_batched_tokens": 40}, **ON_CARD) as llm:
        before = card.bytes
        for wish in wishes:
            card.peak = before
            llm.generate(PROMPTS[:6], asked([wish] * 6), use_tqdm=False)
            assert card.peak - before <= 1.02 * measured[0], wish


def test_a_start_takes_the_memory_of_the_largest_step(path: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the KV cache, and the allocator keeps it: no step has to ask CUDA for more."""
    measured = measured_bytes(monkeypatch)
    with LLM(path, **COMMON, **ON_CARD) as llm:
        reserved = card.reserved
        assert reserved - card.bytes >= 0.9 * measured[0]
        llm.generate(PROMPTS[:6], asked([{"top_p": 0.9, "prompt_logprobs": 2}] * 6), use_tqdm=False)
        assert card.reserved == reserved


@pytest.mark.parametrize("draft", [False, pytest.param(True, marks=pytest.mark.long)], ids=["ngram", "draft"])
def test_graphs_that_a_start_has_no_time_for_are_captured_while_nothing_runs(
    path: str, card: Card, monkeypatch: pytest.MonkeyPatch, draft: bool
) -> None:
    monkeypatch.setattr(graphs, "CAPTURE_S", 0.0)
    seen = threading.Event()
    capture = worker.Worker.capture_graph

    def capture_graph(rank: worker.Worker) -> int:
        left = capture(rank)
        if not left:
            seen.set()
        return left

    monkeypatch.setattr(worker.Worker, "capture_graph", capture_graph)
    speculation = {"model": path, "num_speculative_tokens": 2} if draft else None
    params = asked([{"temperature": 0.0}])
    want = answers(path, params, **ON_CPU)
    with LLM(path, **COMMON, **ON_CARD, speculative_config=speculation) as llm:
        assert [told(it) for it in llm.generate(PROMPTS[:1], params, use_tqdm=False)] == want
        assert seen.wait(120)
        assert [told(it) for it in llm.generate(PROMPTS[:1], params, use_tqdm=False)] == want


def test_a_model_wakes_without_a_rehearsal_or_a_capture(path: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from and to pinned memory wait for nothing. Later steps run without graphs, which come between them."""
    params = asked([{}, {"temperature": 0.0}])
    want = answers(path, params, **ON_CPU)
    with LLM(path, **COMMON, **ON_CARD) as llm:
        awake = card.bytes
        for _ in range(2):
            waits, pinned, captured = card.waits.copy(), len(card.pinned), card.captured
            llm.sleep(1)
            assert card.bytes < 0.2 * awake
            llm.rank_stats()
            llm.wake_up()
            assert card.captured == captured
            assert card.waits == waits, "a copy from memory that is not pinned"
            assert [row["steps"] for row in llm.rank_stats()] == [0], "a step has been rehearsed"
            assert [told(it) for it in llm.generate(PROMPTS[:2], params, use_tqdm=False)] == want
            ends_s = time.monotonic() + 120
            while card.captured < captured + len(graphs.graph_sizes(5)) and time.monotonic() < ends_s:
                time.sleep(0.01)
            replays = card.replays
            assert [told(it) for it in llm.generate(PROMPTS[:2], params, use_tqdm=False)] == want
            assert card.replays > replays
        assert len(card.pinned) - pinned < 20, "the second sleep pins what it has pinned"


def test_sleeping_leaves_nothing_behind(path: str, card: Card) -> None:
    """No graph, and no workspace of cuBLAS: each sleep gives back as much as the one before."""
    asleep = []
    with LLM(path, **COMMON, **ON_CARD) as llm:
        for _ in range(5):
            llm.generate(PROMPTS[:2], asked([{}] * 2), use_tqdm=False)
            llm.sleep(1)
            asleep.append((card.bytes, card.reserved, len(card.workspaces)))
            llm.wake_up()
    assert len({*asleep}) == 1, asleep
    assert asleep[0][2] == 0


@pytest.mark.parametrize("awake", [True, False], ids=["another awake", "alone"])
def test_workspaces_that_graphs_of_another_engine_hold_stay(path: str, card: Card, awake: bool) -> None:
    """Two engines of one process."""
    params = asked([{}, {"temperature": 0.0}])
    with LLM(path, **COMMON, **ON_CARD) as first, LLM(path, **COMMON, **ON_CARD) as other:
        want = [told(it) for it in other.generate(PROMPTS[:2], params, use_tqdm=False)]
        if not awake:
            other.sleep(2)
        first.sleep(1)
        assert bool(card.workspaces) == awake
        if not awake:
            other.wake_up()
        replays = card.replays
        assert [told(it) for it in other.generate(PROMPTS[:2], params, use_tqdm=False)] == want
        assert card.replays > replays or not awake


def test_weights_asleep_are_pageable_if_the_host_has_too_little_memory(
    path: str, card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = asked([{}, {"temperature": 0.0}])
    with LLM(path, **COMMON, **ON_CARD) as llm:
        want = [told(it) for it in llm.generate(PROMPTS[:2], params, use_tqdm=False)]
        monkeypatch.setattr(host_copies.host, "memory_bytes", lambda root: (8 << 30, SPARE_BYTES + 1000))
        for _ in range(2):
            llm.sleep(1)
            llm.wake_up()
            assert [told(it) for it in llm.generate(PROMPTS[:2], params, use_tqdm=False)] == want
    (warned,) = logged(caplog, "weights-not-pinned")
    assert warned["bytes"] > 1000 and card.waits["copy"]


def test_copies_of_storages_that_lie_in_several_slabs(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "SLAB_BYTES", 64)
    large, small = torch.arange(50.0).to(CUDA), torch.tensor(7, dtype=torch.int16).to(CUDA)
    tensors = [large[10:20], large.view(5, 10).t(), small, torch.zeros(0, device=CUDA), torch.ones(64).byte().to(CUDA)]
    want, held = [tensor.tolist() for tensor in tensors], card.bytes
    copies = host_copies.HostCopies()
    for _ in range(2):
        copies.save(tensors)
        assert card.bytes == held - 200 - 2 - 64
        copies.restore()
        torch.cuda.synchronize()
        assert card.bytes == held and [tensor.tolist() for tensor in tensors] == want
    assert len(card.pinned) == 5, "266 bytes"
    copies.save(tensors[:1])
    copies.forget()


def test_a_capture_that_fails_between_steps_is_the_last_one(
    path: str, card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Graphs are an option: requests go on without."""
    params, begun = asked(WISHES[:2]), list[None]()
    want, capture = answers(path, params, **ON_CPU), graphs.capture_graph

    def failing(*given: Any) -> Any:
        begun.append(None)
        if len(begun) == 2:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        return capture(*given)

    monkeypatch.setattr(graphs, "CAPTURE_S", 0.0)
    monkeypatch.setattr(graphs, "capture_graph", failing)
    with LLM(path, **{**COMMON, **ON_CARD}) as llm:
        deadline = time.monotonic() + 60
        while "previous error" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [told(answer) for answer in llm.generate(PROMPTS[:2], params, use_tqdm=False)] == want
    assert len(begun) == 2 and card.captured == 1


def test_no_graph_is_captured_once_a_rank_has_no_memory(
    path: str, card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs, "CAPTURE_S", 0.0)
    monkeypatch.setattr(threads, "ThreadGroup", Captured)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, fake_cuda.TOTAL_BYTES))
    two = {"tensor_parallel_size": 2, "device_ids": (0, 0)}
    with LLM(path, **{**COMMON, **ON_CARD, **two}):
        deadline = time.monotonic() + 60
        while caplog.text.count("No more CUDA graphs") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert caplog.text.count("No more CUDA graphs") == 2 and card.captured == 2, "the largest of each rank"


@pytest.mark.parametrize("other", [0, 1])
def test_no_rank_captures_beside_one_that_cannot(
    path: str, card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, other: int
) -> None:
    """A rank on an older GPU has torch's attention: without a vote the others would wait for it in their graphs."""
    params = asked(WISHES[:2])
    want = answers(path, params, **ON_CPU)
    monkeypatch.setattr(threads, "ThreadGroup", Captured)
    name = f"weft-rank-{other}"
    capturable = property(lambda self: threading.current_thread().name != name)
    monkeypatch.setattr(attention.TritonAttention, "capturable", capturable)
    two = {"tensor_parallel_size": 2, "device_ids": (0, 0)}
    assert answers(path, params, **{**ON_CARD, **two}) == want
    assert card.captured == card.replays == 0
    assert logged(caplog, "no-cuda-graphs") == [{}, {}]


def test_memory_of_graphs_has_the_workspace_of_their_stream(
    path: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, measure = [], runner.ModelRunner.measure

    def note(of: runner.ModelRunner, rehearse: runner.Rehearse) -> None:
        measure(of, rehearse)
        measured.append(of.graph_bytes)

    monkeypatch.setattr(runner.ModelRunner, "measure", note)
    for size in (0, WORKSPACE_BYTES):
        monkeypatch.setattr(runner, "WORKSPACE_BYTES", size)
        with LLM(path, **{**COMMON, "max_num_seqs": 1}, **ON_CARD):
            pass
    assert measured[1] - measured[0] == WORKSPACE_BYTES == 32 << 20


def test_graphs_are_captured_behind_steps_in_flight(path: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is scheduled ahead of the tokens of the one before, and a capture comes between any two."""
    monkeypatch.setattr(graphs, "CAPTURE_S", 0.0)
    monkeypatch.setattr(ranks, "IDLE_S", 0.001)
    monkeypatch.setattr(ranks.CapturePace, "is_due", lambda self, idle: True)
    params = asked([{"max_tokens": 12}, {"temperature": 0.0, "max_tokens": 20}, {"max_tokens": 9, "logprobs": 1}])
    want = answers(path, params, **ON_CPU)
    in_flight: list[int] = []
    call = ranks.RankExecutor.call

    def noted(executor: ranks.RankExecutor, command: Any) -> Any:
        in_flight.append(len(executor._pending))
        return call(executor, command)

    monkeypatch.setattr(ranks.RankExecutor, "call", noted)
    with LLM(path, **COMMON, **ON_CARD) as llm:
        for _ in range(3):
            llm.sleep(1)
            llm.wake_up()
            assert [told(it) for it in llm.generate(PROMPTS[:3], params, use_tqdm=False)] == want
    assert any(in_flight), "no capture came behind a step"


@pytest.mark.parametrize("draft", [False, pytest.param(True, marks=pytest.mark.long)], ids=["ngram", "draft"])
def test_speculation(path: str, card: Card, draft: bool) -> None:
    how = {"model": path, "num_speculative_tokens": 2} if draft else {"method": "ngram"}
    params = asked([{"temperature": 0.0, "max_tokens": 9}, {}, {"top_k": 5}])
    want = answers(path, params, **ON_CPU)
    assert answers(path, params, **ON_CARD, speculative_config=how) == want
    assert card.replays


@pytest.mark.long
def test_steps_of_few_tokens_are_replayed_whatever_their_rows(
    path: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts, guesses, and what a draft reads of them."""
    draft = {"model": path, "num_speculative_tokens": 2}
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 8}
    how: dict[str, Any] = {**COMMON, **ON_CARD, **limits, "speculative_config": draft}
    params = asked([{"temperature": 0.0, "max_tokens": 9}, {}, {"top_k": 5, "prompt_logprobs": 1}, {"logprobs": 1}])
    want = answers(path, params, **ON_CPU)
    eager: list[int] = []
    forward = DecoderModel.hidden

    def hidden(self: DecoderModel, incoming: Any, caches: Any, batch: Batch) -> torch.Tensor:
        if not batch.fixed:
            eager.append(batch.rows)
        return forward(self, incoming, caches, batch)

    monkeypatch.setattr(DecoderModel, "hidden", hidden)
    for limit in (runner.EAGER_BYTES, 0):
        monkeypatch.setattr(runner, "EAGER_BYTES", limit)
        with LLM(path, **how) as llm:
            eager.clear()
            assert [told(it) for it in llm.generate(PROMPTS[:4], params, use_tqdm=False)] == want
        assert bool(eager) == (limit == 0)


def test_an_fp8_cache_in_graphs_is_that_without(path: str, card: Card) -> None:
    params = asked([{}, {"temperature": 0.0}, {}])
    want = answers(path, params, **ON_CARD, kv_cache_dtype="fp8", enforce_eager=True, async_scheduling=False)
    assert not card.replays
    assert answers(path, params, **ON_CARD, kv_cache_dtype="fp8") == want
    assert card.replays


def test_weights_are_swapped_beside_a_full_card(card: Card, tmp_path: Path) -> None:
    """In the memory of the old ones, under the graphs that are captured: no byte more, no graph again."""
    old, params = checkpoints.make("qwen3-biased", tmp_path), asked([{"temperature": 0.0}, {}])
    new, how = with_other_weights(old, tmp_path / "new"), {"load_format": "auto", "max_num_seqs": 2}
    want = answers(str(new), params, **how, **ON_CPU)
    with LLM(str(old), **{**COMMON, **ON_CARD, **how}) as llm:
        before = [told(it) for it in llm.generate(PROMPTS[:2], params, use_tqdm=False)]
        full, captured = card.bytes, sum(map(len, card.pools.values()))
        card.peak = full
        llm.swap_weights(new)
        assert card.peak == card.bytes == full
        replays = card.replays
        assert [told(it) for it in llm.generate(PROMPTS[:2], params, use_tqdm=False)] == want != before
        assert card.replays > replays and sum(map(len, card.pools.values())) == captured


@torch.inference_mode()
def test_staged_weights_are_rounded_on_the_card_a_band_at_a_time(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.make("llama-biased", tmp_path)
    plan = plan_for(path, "whole", quantization="int4", max_model_len=64)
    place, rounding = plan.places[0], create_rounding("triton", CUDA, AttentionShape.from_plan(plan, 0))
    there = allocate_parameters(plan, place, CUDA)
    importance = measure_importance(plan, 0, Links(), there, CUDA)
    load_weights(plan, place, there, rounding, importance)
    monkeypatch.setattr(swaps, "measure_importance", lambda *_: importance)
    swap = WeightSwap(plan, 0, Links(), CUDA, rounding)
    before = card.peak = card.bytes
    swap.stage()
    here = dict(tensor_parts(swap._staged))
    for name, part in tensor_parts(there):
        assert torch.equal(part.cpu(), here[name]), name
    # Of a matrix, its rounded form, and the parameters that are no matrices.
    matrices = [weight for weight in there.values() if isinstance(weight, QuantisedWeight)]
    band = max(prod(weight.shape) * 4 + weight.nbytes for weight in matrices)
    vectors = sum(weight.nbytes for weight in there.values() if isinstance(weight, torch.Tensor))
    assert max(weight.nbytes for weight in matrices) < card.peak - before <= band + vectors


@pytest.mark.long
def test_quantised_weights_in_graphs_are_those_without(path: str, card: Card) -> None:
    params = asked([{"max_tokens": 5}, {"temperature": 0.0, "max_tokens": 6}, {"max_tokens": 4}])
    how = {**ON_CARD, "max_num_seqs": 3, "quantization": "int4"}
    want = answers(path, params, **how, enforce_eager=True, async_scheduling=False)
    assert not card.replays
    assert answers(path, params, **how) == want
    assert card.replays


def test_stages(path: str, card: Card) -> None:
    """Stages are threads, each with graphs of its own."""
    params = asked(WISHES[:6])
    want = answers(path, params, **ON_CPU)
    two = {"pipeline_parallel_size": 2, "device_ids": (0, 0)}
    assert answers(path, params, **{**ON_CARD, **two}) == want
    assert card.replays


@pytest.mark.parametrize("other", ["capture", "contest", "synchronize", "empty_cache"])
def test_nothing_of_the_whole_device_happens_while_a_graph_is_captured(card: Card, other: str) -> None:
    """Torch captures one graph at a time, and stages are threads of one process."""
    x, inside, tried = torch.zeros(3, device=CUDA), threading.Event(), threading.Event()

    def slowly() -> None:
        x.add_(1)
        inside.set()
        tried.wait(0.3)

    def interfere() -> None:
        torch.cuda.set_device(CUDA)
        inside.wait()
        try:
            with fake_cuda.OnThisThread():
                {
                    "capture": lambda: CudaGraphs()(lambda: x.add_(1)),
                    "contest": lambda: contest.graph_seconds(lambda: x.add_(1)),
                    "synchronize": lambda: synchronize_device(CUDA),
                    "empty_cache": release_cached_memory,
                }[other]()
        finally:
            tried.set()

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(interfere)
        replay = CudaGraphs()(slowly)
        job.result()
    replay()
    assert x.tolist()[0] >= 1


def test_ranks_that_sum_in_graphs(path: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    params = asked(WISHES[:6])
    want = answers(path, params, **ON_CPU)
    monkeypatch.setattr(threads, "ThreadGroup", Captured)
    two = {"tensor_parallel_size": 2, "device_ids": (0, 0)}
    assert answers(path, params, **{**ON_CARD, **two}) == want
    assert card.replays


# That the stand-in finds out what CUDA would only get wrong:


def test_pinned_memory_is_not_filled_again_too_early(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(CUDA)
    for step in range(2 * BUFFERS):
        staging.put([np.arange(5) + step])
    monkeypatch.setattr(fake_cuda.Event, "synchronize", lambda event: None)
    for step in range(BUFFERS):
        staging.put([np.arange(5) - step])
    with pytest.raises(CardError, match="filled again"):
        torch.cuda.synchronize()


def test_results_are_not_read_too_early(card: Card) -> None:
    arrival = ToHost(torch.arange(3, device=CUDA))
    assert arrival._values.tolist() == [-1, -1, -1]
    assert arrival.values() == [0, 1, 2]


def test_a_thread_has_a_device_before_it_waits_for_one(card: Card) -> None:
    event = torch.cuda.Event()
    event.record()
    with ThreadPoolExecutor(1) as pool, pytest.raises(CardError, match="current device"):
        pool.submit(event.synchronize).result()
    x = torch.arange(3.0, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    refused: list[Callable[[], object]] = [
        lambda: silu_mul(torch.zeros(1, 8, device=CUDA)),
        graph.capture_begin,
        torch.cuda.Stream,
        torch.cuda.current_stream,
        torch.cuda.synchronize,
        torch.cuda.mem_get_info,
        lambda: torch.zeros(3, device="cuda"),
    ]
    with ThreadPoolExecutor(1, initializer=fake_cuda.OnThisThread().__enter__) as pool:
        for call in refused:
            with pytest.raises(CardError, match="current device"):
                pool.submit(call).result()
        # torch's own operations are on the device of their tensors, and others name theirs.
        assert pool.submit(lambda: (x + torch.ones(3, device=CUDA)).tolist()).result() == [1, 2, 3]
        assert pool.submit(torch.cuda.mem_get_info, CUDA).result()
    arrival = ToHost(torch.arange(3, device=CUDA))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(arrival.values).result() == [0, 1, 2]


def test_a_graph_does_what_was_captured_and_no_more(card: Card) -> None:
    capture, size = CudaGraphs(), [2]
    x, found = torch.arange(4.0, device=CUDA), []

    def run() -> None:
        found[:] = [x[: size[0]] * 2, x + 1]

    replay = capture(run)
    doubled, more = found
    x.add_(10)
    size[0] = 4
    replay()
    assert doubled.tolist() == [20, 22] and more.tolist() == [11, 12, 13, 14]
    other = capture(lambda: found.append(x * 3))
    other()
    assert np.isnan(more.tolist()).all(), "its memory is the pool's"

    def asks() -> None:
        x.sum().item()

    with pytest.raises(CardError, match="waits"):
        capture(asks)
    with pytest.raises(CardError, match="pinned"):
        capture(lambda: torch.zeros(3).to(CUDA))
    with pytest.raises(CardError, match="of the host"):
        x.add(torch.zeros(4))


def test_a_graph_holds_the_workspace_of_its_stream(card: Card) -> None:
    x = torch.eye(3).to(CUDA)
    replay = CudaGraphs()(lambda: x.copy_(x @ x))
    replay()
    held = card.bytes
    card.clear_workspaces()
    assert card.bytes < held
    with pytest.raises(CardError, match="workspace"):
        replay()


def test_a_second_capture_is_refused_and_whatever_concerns_the_whole_device(card: Card) -> None:
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    first.capture_begin()
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(CUDA,)) as pool:
        for refused in (second.capture_begin, torch.cuda.synchronize, torch.cuda.empty_cache):
            with pytest.raises(CardError, match=r"one graph at a time|while a graph"):
                pool.submit(refused).result()
    first.capture_end()
    second.capture_begin()
    second.capture_end()
