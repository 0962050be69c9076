"""Benchmarks: the same work for the same seed, and figures that follow from the times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.machines import host, plan
from tests.refusals import has_values, refuses
from weft.cli import engine, main
from weft.cli.bench import bench
from weft.config import EngineConfig
from weft.engine.core.token_ids import TokenIds
from weft.engine.executors.base import StartResult
from weft.engine.frontend.outputs import CompletionOutput, Metrics, RequestOutput
from weft.engine.replicas.running import RunningReplica
from weft.errors import ConfigError, WeftError
from weft.machine.hardware.cpu import CpuSpeed
from weft.planner.execution.forecast import Forecast, forecast_plan
from weft.probes.stored_speeds import Speeds
from weft.study.bench import __main__ as side
from weft.study.bench import suite
from weft.study.bench.compare import figure_changes, read_result
from weft.study.bench.measure import RunFigures, median_figures, run_batch
from weft.study.bench.predicted import FIGURES, comparison_lines, predict_batch
from weft.study.bench.workload import BenchRequest, nano_vllm, random_requests


@given(seed=st.integers(0, 2**32), low=st.integers(1, 40), more=st.integers(0, 40), count=st.integers(1, 9))
def test_random_requests(seed: int, low: int, more: int, count: int) -> None:
    def draw(seed: int) -> list[BenchRequest]:
        return random_requests(seed, vocab=97, count=count, input_len=(low, low + more), output_len=5)

    def wide(seed: int) -> list[BenchRequest]:
        return random_requests(seed, vocab=97, count=9, input_len=(40, 40), output_len=5)

    asks = draw(seed)
    assert asks == draw(seed)
    # Of many tokens: two seeds may well agree on a single one.
    assert wide(seed) != wide(seed + 1)
    assert len(asks) == count and all(low <= len(ask.prompt) <= low + more for ask in asks)
    assert all(0 <= token < 97 for ask in asks for token in ask.prompt)
    assert {ask.output_len for ask in asks} == {5}


def test_nano_vllm_s_workload_is_its_own_draw() -> None:
    import random

    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    lengths = [random.randint(100, 1024) for _ in range(256)]
    asks = nano_vllm(49152)
    assert [ask.prompt for ask in asks] == prompts and [ask.output_len for ask in asks] == lengths
    assert {ask.temperature for ask in asks} == {0.6}
    with refuses(ConfigError, "vocabulary-too-small", "10000"):
        nano_vllm(10_000)


class FakeLLM:
    """Answers every request after one second, and then a token every tenth of one."""

    num_blocks = 10

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.plan, self.asked, self.short = config, plan(kind="dummy"), [], 0

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def forecast(self) -> Forecast:
        return planned()

    @property
    def replicas(self) -> list[RunningReplica]:
        return [RunningReplica(self.plan, StartResult(num_blocks=self.num_blocks, ranks=[]))]

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[RequestOutput]:
        self.asked.append((prompts, params))
        answers = []
        for prompt, one in zip(prompts, params, strict=True):
            made = one.max_tokens - self.short
            times = Metrics(arrival_s=10.0, first_token_s=11.0, finished_s=11.0 + 0.1 * (made - 1))
            choice = CompletionOutput(0, "", [7] * made, finish_reason="length")
            ids = TokenIds.pack(prompt["prompt_token_ids"])
            answers.append(RequestOutput("0", None, ids, [choice], times, finished=True))
        return answers


def test_a_run_s_figures() -> None:
    llm: Any = FakeLLM(EngineConfig(model="m"))
    done = run_batch(llm, [BenchRequest([1, 2], 11), BenchRequest([3], 21)])
    assert (done.input_tokens, done.output_tokens) == (3, 32)
    assert done.ttft_s == pytest.approx(1.0) and done.tpot_s == pytest.approx(0.1)
    assert done.decode_tok_s == pytest.approx(10)
    assert done.output_tok_s == 32 / done.seconds
    ((prompts, params),) = llm.asked
    assert prompts == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]
    assert [(p.max_tokens, p.ignore_eos, p.temperature) for p in params] == [(11, True, 0.0), (21, True, 0.0)]
    llm.short = 1
    with refuses(ConfigError, "request-ended-early", "10", "11"):
        run_batch(llm, [BenchRequest([1], 11)])
    llm.short = 0
    assert run_batch(llm, [BenchRequest([1], 1)]).decode_tok_s == 0


def test_typical_is_the_median_of_each_figure() -> None:
    def made(seconds: float, ttft_s: float) -> RunFigures:
        return RunFigures(seconds=seconds, ttft_s=ttft_s, tpot_s=0.5, input_tokens=10, output_tokens=20)

    got = median_figures([made(1, 0.3), made(4, 0.1), made(2, 0.2)])
    assert got == {
        "ttft_s": 0.2,
        "tpot_s": 0.5,
        "decode_tok_s": 2.0,
        "output_tok_s": 10.0,
        "total_tok_s": 15.0,
        "seconds": 2,
    }


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """The engines that commands start."""
    made: list[FakeLLM] = []

    def start(arguments: Any, **ours: Any) -> FakeLLM:
        from weft.cli.flags.flags import engine_config

        made.append(FakeLLM(engine_config(arguments, **ours)))
        return made[-1]

    monkeypatch.setattr(engine, "start_engine", start)
    return made


def test_bench_latency(llm: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench latency m --input-len 7 --output-len 3 --batch-size 2 --num-iters 2 --num-iters-warmup 1"
    assert main.main(words.split()) == 0
    captured = capsys.readouterr()
    got = json.loads(captured.out.splitlines()[-1])
    assert (got["task"], got["requests"], got["input_tokens"], got["output_tokens"]) == ("latency", 2, 14, 6)
    assert got["ttft_s"] == 1.0 and got["decode_tok_s"] == 10.0 and got["runs"] == 2
    told = [line.split(":")[0] for line in captured.err.splitlines()]
    assert told == ["warm-up", "run 1", "run 2", *(words for words, _, _ in FIGURES.values())]
    assert got["predicted"].keys() == FIGURES.keys()
    seen = [tuple(prompts[0]["prompt_token_ids"]) for prompts, _ in llm[0].asked]
    assert len(seen) == len(set(seen)) == 3  # other tokens each time, so that no KV block is found again
    assert llm[0].config.skip_tokenizer_init


def test_bench_throughput(llm: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "throughput", "m", "--num-iters", "1"]) == 0
    got = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (got["task"], got["requests"], got["output_tokens"]) == ("throughput", 32, 32 * 128)
    assert all(32 <= len(p["prompt_token_ids"]) <= 256 for prompts, _ in llm[0].asked for p in prompts)
    assert main.main(["bench", "throughput", "m", "--num-iters", "1", "--workload", "nano-vllm"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["requests"] == 256
    assert "tokens/s" in bench.run_line("run 1", run_batch(llm[0], [BenchRequest([1], 2)]))  # type: ignore[arg-type]


# --- beside the planner ---


def planned(**flags: Any) -> Forecast:
    return forecast_plan(plan(host(), kind="dummy", **flags), host(), Speeds(machine="", cpu=CpuSpeed(40e9, 0.2e12)))


def test_predictions_for_a_batch() -> None:
    expected = planned()

    def asks(count: int, input_len: int, output_len: int) -> list[BenchRequest]:
        return [BenchRequest([1] * input_len, output_len)] * count

    alone = predict_batch(expected, asks(1, 128, 128))
    speed = expected.speed(128, 128)
    assert alone["ttft_s"] == pytest.approx(speed.ttft_s, abs=1e-5)
    assert alone["decode_tok_s"] == pytest.approx(speed.single_tok_s, rel=0.01)
    seconds = speed.ttft_s + 127 / speed.single_tok_s
    assert alone["output_tok_s"] == pytest.approx(128 / seconds, rel=0.01)
    # All prompts of a step have their first token at its end.
    several = predict_batch(expected, asks(8, 128, 128))
    assert several["ttft_s"] == pytest.approx(speed.ttft_s + 7 * speed.prefill_s, rel=0.01)
    assert alone["decode_tok_s"] > several["decode_tok_s"] > alone["decode_tok_s"] / 8
    assert several["output_tok_s"] > alone["output_tok_s"]
    # Of 32 prompts of 128 tokens 16 are read in a step of 2,048.
    many = predict_batch(expected, asks(32, 128, 128))
    assert many["ttft_s"] == pytest.approx(speed.ttft_s + 15 * speed.prefill_s, rel=0.01)
    lines = comparison_lines(
        {"ttft_s": 0.1, "decode_tok_s": 50.0, "output_tok_s": 0.0}, alone | {"decode_tok_s": 100.0}
    )
    assert len(lines) == 2
    has_values(lines[1], "50.0 tokens/s", "100.0", "0.50")


def test_hardware_of_which_nothing_is_known_is_predicted_nothing(
    llm: list[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(self: FakeLLM) -> Forecast:
        raise ConfigError("unknown GPU", code="unknown-gpu")

    monkeypatch.setattr(FakeLLM, "forecast", unknown)
    assert main.main(["bench", "latency", "m", "--num-iters", "1", "--num-iters-warmup", "0"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["predicted"] is None
    assert "nothing is predicted: unknown GPU" in captured.err


# --- the suite ---


def test_the_suite_s_table(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    golden: Callable[[str, str], None],
) -> None:
    found: suite.Tasks = {
        "latency": {"ttft_s": 0.05, "decode_tok_s": 90.0, "predicted": {"ttft_s": 0.04, "decode_tok_s": 100.0}},
        "prefill": {"prompt_tok_s": 3000.0, "predicted": None},
        "memory": {"beyond_kv_bytes": 800_000_000},
    }
    monkeypatch.setattr(side, "measure_parts", lambda *_: found)
    assert side.main(["--save-result", str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1:4] for line in out[4:8]] == [
        ["ms", "50.00", "40.00"],
        ["tokens/s", "90.00", "100.00"],
        ["tokens/s", "3,000.00", ""],
        ["GB", "0.80", ""],
    ]
    golden("bench_suite.txt", "\n".join(out[2:8]) + "\n")
    assert json.loads(out[-1])["latency"]["decode_tok_s"] == 90.0
    old = read_result(str(tmp_path / "a.json"))
    names = {change.name: change.higher_is_better for change in figure_changes(old, old)}
    assert names == {
        "latency: ttft_s": False,
        "latency: decode_tok_s": True,
        "prefill: prompt_tok_s": True,
        "memory: beyond_kv_bytes": False,
    }

    def broken(*_: object) -> suite.Tasks:
        raise WeftError("no engine", code="no-engine")

    monkeypatch.setattr(side, "measure_parts", broken)
    assert side.main([]) == 1
    assert capsys.readouterr().err == "weft.study.bench: error: no engine\n"


def test_a_batch_of_the_suite_is_other_tokens_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "QUIET_S", 0)
    llm: Any = FakeLLM(EngineConfig(model="m"))
    names = [batch.name for batch in suite.BATCHES]
    assert names == ["latency", "prefill", "throughput", "prefix"]
    for batch in suite.BATCHES:
        llm.asked.clear()
        found = suite.measure_batch(llm, batch, 2)
        seen = [tuple(prompts[0]["prompt_token_ids"]) for prompts, _ in llm.asked]
        assert len(set(seen)) == len(seen) == 2 + suite.WARM_UPS
        assert found["runs"] == 2 and (found["predicted"] is None) == (batch.name == "prefix")
    (prompts, _), *_ = llm.asked
    assert len({tuple(it["prompt_token_ids"][:512]) for it in prompts}) == 1 < len({*map(str, prompts)}) == 128
    assert suite.measure_batch(llm, suite.BATCHES[1], 1)["prompt_tok_s"] == 1024.0
