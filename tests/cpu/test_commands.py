"""Commands between the steps of a running engine: sleep and wake-up, other weights, figures, traces."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu import checkpoints
from tests.cpu.families import family
from tests.refusals import refuses
from weft import LLM, AsyncLLM, SamplingParams
from weft.errors import EngineError, RequestError
from weft.monitor.trace_report import read_trace, report_traces
from weft.ranks.worker.trace import finish_writing

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=4, max_tokens=8, ignore_eos=True, repetition_penalty=1.2)
PROMPTS = [[1, 5, 9, 33], [4], [*range(20, 60)], [7] * 18]
ENGINE: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20}
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole, inline": {"executor": "inline"},
    "tp2, inline": {"executor": "inline", "tensor_parallel_size": 2},
    "pp2, inline": {"executor": "inline", "pipeline_parallel_size": 2},
    "tp2, processes": {"executor": "processes", "tensor_parallel_size": 2},
    "pp2, processes": {"executor": "processes", "pipeline_parallel_size": 2},
}


def in_layouts(*often: str) -> pytest.MarkDecorator:
    """Parametrise a test with all layouts; those that are not named are long."""
    rows = [
        pytest.param(layout, marks=[pytest.mark.long] * (name not in often), id=name)
        for name, layout in LAYOUTS.items()
    ]
    return pytest.mark.parametrize("layout", rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return checkpoints.make("qwen3-biased", folder)


@pytest.fixture(scope="module")
def other(path: Path, folder: Path) -> Path:
    """The same model with other weights."""
    return with_other_weights(path, folder / "other")


def with_other_weights(path: Path, target: Path) -> Path:
    target.mkdir()
    generator = torch.Generator().manual_seed(1)
    for file in path.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            for tensor in tensors.values():
                tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
            save_file(tensors, target / file.name)
        else:
            (target / file.name).write_bytes(file.read_bytes())
    return target


def with_config(path: Path, target: Path, **values: Any) -> Path:
    """The same checkpoint with other values in its config.json."""
    shutil.copytree(path, target)
    config = json.loads((path / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | values))
    return target


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(PROMPTS, params, use_tqdm=False)]


def both_answers(llm: LLM) -> list[list[list[int]]]:
    return [answers(llm, params) for params in (GREEDY, DRAWN)]


@in_layouts("pp2, inline", "tp2, processes")
def test_an_engine_that_has_slept_gives_the_same_tokens(path: Path, layout: dict[str, Any]) -> None:
    with LLM(str(path), **ENGINE, **layout) as llm:
        want = both_answers(llm)
        for level in (1, 2, 1):
            llm.sleep(level)
            assert llm.is_sleeping
            llm.wake_up()
            assert not llm.is_sleeping
            hits = llm.stats().prefix_hits
            assert both_answers(llm)[0] == want[0]
            assert llm.stats().prefix_hits > hits, "what was computed since is found"
            assert both_answers(llm) == want


@in_layouts("tp2, inline", "pp2, processes")
@pytest.mark.parametrize("asleep", [pytest.param(False, marks=pytest.mark.long), True], ids=["awake", "asleep"])
def test_swapped_weights_are_those_of_a_fresh_engine(
    path: Path, other: Path, layout: dict[str, Any], asleep: bool
) -> None:
    with LLM(str(other), **ENGINE, **layout) as llm:
        want = both_answers(llm)
    with LLM(str(path), **ENGINE, **layout) as llm:
        before = both_answers(llm)
        assert before != want
        for checkpoint, expected in ((other, want), (path, before)):
            if asleep:
                llm.sleep(2)
            llm.swap_weights(checkpoint)
            if asleep:
                llm.wake_up()
            assert both_answers(llm) == expected


@pytest.mark.parametrize(
    ("name", "how"),
    [
        # The next one has the same matrices.
        pytest.param("llama-biased", {"attention_backend": "torch"}, marks=pytest.mark.long),
        ("llama-biased", {"attention_backend": "torch", "dtype": "bfloat16"}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("smollm2", {"dtype": "bfloat16", "tensor_parallel_size": 3, "executor": "inline"}),
        ("gemma3", {}),
        ("qwen3-moe", {"tensor_parallel_size": 2, "executor": "inline"}),
        ("gpt-oss", {}),
        ("gpt-oss", {"dtype": "bfloat16"}),
        ("gpt-oss", {"dtype": "bfloat16", "attention_backend": "torch"}),
    ],
    ids=lambda it: it if isinstance(it, str) else ", ".join(map(str, it.values())) or "native",
)
def test_every_kind_of_weight_is_swapped(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    path = checkpoints.make(name, tmp_path)
    swapped = with_other_weights(path, tmp_path / "other")
    with LLM(str(swapped), **{**ENGINE, **how}) as llm:
        want = answers(llm)
    with LLM(str(path), **{**ENGINE, **how}) as llm:
        before = answers(llm)
        llm.swap_weights(swapped)
        assert answers(llm) == want != before


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_weights_that_are_quantised_as_they_load_are_swapped(quantization: str, tmp_path: Path) -> None:
    path = checkpoints.make("qwen2", tmp_path)
    swapped = with_other_weights(path, tmp_path / "other")
    how = {**ENGINE, "dtype": "bfloat16", "quantization": quantization, "tensor_parallel_size": 2, "executor": "inline"}
    with LLM(str(swapped), **how) as llm:
        want = answers(llm)
    with LLM(str(path), **how) as llm:
        before = answers(llm)
        llm.swap_weights(swapped)
        assert answers(llm) == want != before
        llm.sleep(1)
        llm.wake_up()
        assert answers(llm) == want


@pytest.fixture(scope="module")
def large(folder: Path) -> Path:
    """A model whose weights are most of its process's memory: 270 MB."""
    name = "large"
    config = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 2048}
    checkpoints.RECIPES[name] = checkpoints.Recipe(
        "Llama", config | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    )
    return checkpoints.make(name, folder)


@pytest.mark.parametrize(
    ("executor", "level"),
    [
        ("inline", 1),
        ("processes", 2),
        pytest.param("inline", 2, marks=pytest.mark.long),
        pytest.param("processes", 1, marks=pytest.mark.long),
    ],
)
def test_sleep_gives_memory_back(large: Path, executor: str, level: int) -> None:
    """At level 1 the KV cache's, at level 2 the weights' too."""
    weights = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert weights > 200 << 20
    how = {**ENGINE, "kv_cache_memory_bytes": 64 << 20, "executor": executor, "max_num_batched_tokens": 64}
    with LLM(str(large), **how) as llm:
        pid = family()[0].pid if executor == "processes" else os.getpid()
        prompts = [[number, *range(100, 219)] for number in range(4)]
        llm.generate(prompts, GREEDY, use_tqdm=False)
        kv = 4 * 120 * 2 * 4 * 1024 * 4  # bytes: of keys and values, in 4 layers of 1024 float32
        want, awake = answers(llm), private_bytes(pid)
        (row,) = llm.layout()
        llm.sleep(level)
        freed = 0.9 * (weights if level > 1 else kv)
        assert private_bytes(pid) < awake - freed
        (asleep,) = llm.layout()
        assert asleep["allocated_bytes"] < row["allocated_bytes"] - freed
        llm.wake_up()
        assert answers(llm) == want
        assert private_bytes(pid) < awake + 0.2 * weights


def private_bytes(pid: int) -> int:
    return psutil.Process(pid).memory_full_info().uss


def test_requests_wait_while_the_engine_sleeps(path: Path) -> None:
    with LLM(str(path), **ENGINE) as llm:
        want = answers(llm)
        llm.sleep()
        found: list[list[list[int]]] = []
        caller = Thread(target=lambda: found.append(answers(llm)))
        caller.start()
        while llm.stats().waiting < len(PROMPTS):
            sleep(0.002)  # the ranks may have this core only
        stats = llm.stats()
        assert (stats.running, stats.sleep_level) == (0, 1) and not found
        llm.wake_up()
        caller.join(60)
        assert found == [want]


@pytest.mark.each_value
@pytest.mark.parametrize("executor", ["inline", "processes"])
@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_size": 2}, {"async_scheduling": True}], ids=str)
def test_running_requests_lose_no_token_to_a_command(
    path: Path, executor: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=2, max_tokens=50, ignore_eos=True, frequency_penalty=0.3, logprobs=2),
        SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    ]
    with LLM(str(path), **ENGINE, executor=executor, **layout) as llm:
        want, logprobs = outputs(llm.generate(PROMPTS, params, use_tqdm=False))
        found: list[Any] = []
        caller = Thread(target=lambda: found.extend(llm.generate(PROMPTS, params, use_tqdm=False)))
        before = llm.stats()
        caller.start()
        while llm.stats().generation_tokens < before.generation_tokens + 10:
            sleep(0.002)  # the ranks may have this core only
        llm.rank_stats()
        llm.sleep(1)
        assert llm.stats().running == 0 < llm.stats().waiting and not found
        llm.wake_up()
        llm.reset_prefix_cache()
        llm.swap_weights(path)
        llm.layout()
        assert llm.profile(2, tmp_path)
        caller.join(120)
        assert outputs(found) == (want, pytest.approx(logprobs, abs=1e-4))
        assert llm.stats().blocks_used == 0


def outputs(answers: list[Any]) -> tuple[list[list[int]], list[float]]:
    """All tokens, and the logprobs of all."""
    tokens = [list(it.outputs[0].token_ids) for it in answers]
    positions = [at for it in answers for at in (*(it.outputs[0].logprobs or ()), *(it.prompt_logprobs or ())) if at]
    return tokens, [figure.logprob for at in positions for figure in at.values()]


def test_a_draft_model_sleeps_and_wakes_too(path: Path, other: Path) -> None:
    with LLM(str(path), **ENGINE) as llm:
        want = both_answers(llm)
    with LLM(str(other), **ENGINE) as llm:
        swapped = both_answers(llm)
    draft = {"model": str(path), "num_speculative_tokens": 3}
    with LLM(str(path), **ENGINE, speculative_config=draft) as llm:
        assert both_answers(llm) == want
        llm.sleep(2)
        llm.wake_up()
        assert both_answers(llm) == want
        stats = llm.stats()
        assert stats.accepted_tokens > 0.9 * stats.draft_tokens > 0
        llm.swap_weights(other)
        assert both_answers(llm) == swapped


@in_layouts("whole, inline", "pp2, inline", "tp2, processes")
def test_figures_of_ranks(path: Path, layout: dict[str, Any]) -> None:
    with LLM(str(path), **ENGINE, **layout) as llm:
        llm.rank_stats()
        before = llm.stats().steps
        answers(llm)
        rows, steps = llm.rank_stats(), llm.stats().steps - before
        assert [row["rank"] for row in rows] == [*range(len(llm.plan.places))]
        for row in rows:
            assert row["steps"] == steps > 0
            assert row["compute_s"] > 0 and row["waiting_s"] > 0
            assert (row["communication_s"] > 0) == (len(rows) > 1)
            assert row["allocated_bytes"] > 20 << 20 and row["reserved_bytes"] is None
        again = llm.rank_stats()
        assert all(row["steps"] == row["compute_s"] == 0 for row in again)


@in_layouts("whole, inline", "tp2, inline", "pp2, processes")
def test_the_layout_is_the_plan_s_with_the_memory_of_now(path: Path, layout: dict[str, Any]) -> None:
    with LLM(str(path), **ENGINE, **layout) as llm:
        rows, plan, blocks = llm.layout(), llm.plan, llm.num_blocks
        llm.rank_stats()
        llm.layout()
        assert llm.rank_stats()[0]["steps"] == 0, "it has counted on"
    for rank, (row, place) in enumerate(zip(rows, plan.places, strict=True)):
        assert (row["rank"], row["stage"], row["device"], row["replica"]) == (rank, place.stage, "cpu", 0)
        assert (row["first_layer"], row["layers"]) == (place.layers.start, len(place.layers))
        assert (row["first_q_head"], row["q_heads"]) == (place.q_heads.start, len(place.q_heads))
        assert (row["first_kv_head"], row["kv_heads"]) == (place.kv_heads.start, len(place.kv_heads))
        assert row["weight_bytes"] == plan.weight_bytes(rank) == 4 * row["parameters"]
        assert row["kv_bytes"] == plan.block_bytes(rank) * blocks
        assert row["allocated_bytes"] > 20 << 20 and row["driver_bytes"] is row["reserved_bytes"] is None
        assert row["node"] == os.uname().nodename


def wait_for(files: Sequence[Path]) -> None:
    """Wait until ranks have written traces, which they do beside their steps."""
    ends = monotonic() + 60
    while not all(file.exists() for file in files):
        assert monotonic() < ends, f"{files} are not written"
        sleep(0.01)


def test_a_rank_that_cannot_trace_goes_on(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a profiler that does not start nor one that does not end is the engine's end."""

    stop = torch.profiler.profile.stop

    def fails(profiler: torch.profiler.profile, *path: str) -> None:
        if not path:
            stop(profiler)
        raise KeyError("profiler")

    def cannot(*arguments: object, **options: object) -> None:
        raise RuntimeError("another profiler runs")

    with LLM(str(path), **ENGINE) as llm:
        want = answers(llm)
        with monkeypatch.context() as patch:
            patch.setattr("weft.ranks.worker.trace.Trace", cannot)
            assert llm.profile(2, tmp_path) == []
            assert answers(llm) == want
        for method in ("stop", "export_chrome_trace"):
            with monkeypatch.context() as patch:
                assert llm.profile(1, tmp_path)
                patch.setattr(f"torch.profiler.profile.{method}", fails)
                assert answers(llm) == want
                finish_writing()
        (file,) = llm.profile(1, tmp_path)
        assert answers(llm) == want
        wait_for([Path(file)])
    assert [str(found) for found in tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(
    "layout", [LAYOUTS["whole, inline"], LAYOUTS["tp2, inline"], LAYOUTS["pp2, processes"]], ids=str
)
def test_a_trace_is_written_once_its_steps_are_over(path: Path, layout: dict[str, Any], tmp_path: Path) -> None:
    with LLM(str(path), **ENGINE, **layout) as llm:
        files = [Path(file) for file in llm.profile(4, tmp_path / "traces")]
        processes = len(llm.plan.places) if layout["executor"] == "processes" else 1
        assert len({*files}) == processes
        assert not any(file.exists() for file in files)
        answers(llm)
        wait_for(files)
        report = report_traces([read_trace(file) for file in files])
        assert [(row.rank, row.steps) for row in report.ranks] == [(rank, 4) for rank in range(len(llm.plan.places))]
        for row in report.ranks:
            assert (
                sum(row.shares.values()) == pytest.approx(1.0) and row.shares["products"] > 0 < row.shares["attention"]
            )
            assert (row.communication_s > 0) == (len(report.ranks) > 1) and row.waiting_s is not None
        assert [*report.layers] == [*range(len(llm.plan.shape.layers))]
        assert all(layer["attention"] > 0 < layer["feed-forward"] for layer in report.layers.values())
        endless = [Path(file) for file in llm.profile(10**6, tmp_path)]
        answers(llm)
        assert [Path(file) for file in llm.profile(0, tmp_path)] == endless
        wait_for(endless)
        assert llm.profile(0, tmp_path) == []


def test_the_prefix_cache_is_reset(path: Path) -> None:
    with LLM(str(path), **ENGINE) as llm:
        want = answers(llm)
        for cached in (True, False):
            if not cached:
                assert llm.reset_prefix_cache()
            found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [list(it.outputs[0].token_ids) for it in found] == want
            assert any(it.num_cached_tokens for it in found) == cached


def test_impossible_commands_are_refused_in_one_line_and_change_nothing(
    path: Path, folder: Path, tmp_path: Path
) -> None:
    narrow = checkpoints.make("llama", folder)
    with LLM(str(path), **ENGINE) as llm:
        want = answers(llm)
        with refuses(RequestError, "awake-already"):
            llm.wake_up()
        with refuses(RequestError, "unknown-sleep-level"):
            llm.sleep(3)
        with refuses(RequestError, "swap-of-other-shapes") as refusal:
            llm.swap_weights(narrow)
        assert "\n" not in str(refusal.value) and "architecture" in str(refusal.value)
        with refuses(RequestError, "swap-of-other-shapes", "layers[0].mixer.rope.theta is 500.0, not 10000.0"):
            llm.swap_weights(with_config(path, tmp_path / "other", rope_theta=500.0))
        (tmp_path / "file").touch()
        with refuses(RequestError, "profile-directory"):
            llm.profile(3, tmp_path / "file")
        assert answers(llm) == want
        llm.sleep()
        with refuses(RequestError, "asleep-already"):
            llm.sleep(2)


@pytest.mark.parametrize("layout", [LAYOUTS["tp2, processes"], LAYOUTS["pp2, processes"]], ids=str)
def test_a_command_to_a_rank_that_is_gone(path: Path, layout: dict[str, Any]) -> None:
    with LLM(str(path), **ENGINE, **layout) as llm:
        llm.sleep()
        family()[1].send_signal(signal.SIGKILL)
        with refuses(EngineError, "process-killed", "SIGKILL") as failed:
            llm.wake_up()
        assert failed.value.cause.rank == 1 and failed.value.cause.phase in ("step", "wake-up")
        with refuses(EngineError, "process-killed", "SIGKILL"):
            llm.rank_stats()


async def test_asyncio(path: Path, other: Path, tmp_path: Path) -> None:
    with LLM(str(path), **ENGINE) as reference:
        want = list(reference.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    with LLM(str(other), **ENGINE) as reference:
        swapped = list(reference.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)

    async with AsyncLLM(str(path), **ENGINE) as llm:

        async def answer() -> list[int]:
            async for made in llm.generate(PROMPTS[2], GREEDY):
                last = made
            return list(last.outputs[0].token_ids)

        assert await answer() == want
        await llm.sleep(2)
        assert await llm.is_sleeping()
        with refuses(RequestError, "asleep-already"):
            await llm.sleep()
        waiting = asyncio.create_task(answer())
        rows = await llm.layout()
        assert [row["rank"] for row in rows] == [0] and not waiting.done()
        await llm.wake_up()
        assert not await llm.is_sleeping()
        assert await waiting == want
        await llm.swap_weights(other)
        assert await answer() == swapped
        assert await llm.reset_prefix_cache()
        (file,) = await llm.profile(1, tmp_path)
        assert await answer() == swapped
        await asyncio.to_thread(wait_for, [Path(file)])
        assert (await llm.rank_stats())[0]["steps"] > 0
        # A caller that gives up does not stop what it asked for.
        task = asyncio.create_task(llm.sleep())
        await asyncio.sleep(0)
        task.cancel()
        while not await llm.is_sleeping():
            await llm.layout()
        await llm.wake_up()
