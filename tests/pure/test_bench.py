"""Benchmarks: the same work for the same seed, and figures that follow from the times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.bench import __main__ as side
from weft.bench.measure import Run, run, typical
from weft.bench.peer import SCRIPT, Peer, PeerError, Timing, decode_tok_s
from weft.bench.workload import Ask, nano_vllm, random_requests
from weft.cli import bench, engine, main
from weft.client.outputs import CompletionOutput, Metrics, RequestOutput
from weft.config import EngineConfig
from weft.errors import ConfigError


@given(seed=st.integers(0, 2**32), low=st.integers(1, 40), more=st.integers(0, 40), count=st.integers(1, 9))
def test_random_requests(seed: int, low: int, more: int, count: int) -> None:
    def draw(seed: int) -> list[Ask]:
        return random_requests(seed, vocab=97, count=count, input_len=(low, low + more), output_len=5)

    def wide(seed: int) -> list[Ask]:
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
    with pytest.raises(ConfigError, match="10000"):
        nano_vllm(10_000)


class FakeLLM:
    """Answers every request after one second, and then a token every tenth of one."""

    num_blocks = 10

    def __init__(self, **said: Any) -> None:
        from tests.pure.test_layout import plan

        self.config, self.plan, self.asked, self.short = EngineConfig(**said), plan(), [], 0

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[RequestOutput]:
        self.asked.append((prompts, params))
        answers = []
        for prompt, one in zip(prompts, params, strict=True):
            made = one.max_tokens - self.short
            times = Metrics(arrival_s=10.0, first_token_s=11.0, finished_s=11.0 + 0.1 * (made - 1))
            choice = CompletionOutput(0, "", [7] * made, finish_reason="length")
            answers.append(RequestOutput("0", None, prompt["prompt_token_ids"], [choice], times, finished=True))
        return answers


def test_a_run_s_figures() -> None:
    llm: Any = FakeLLM(model="m")
    done = run(llm, [Ask([1, 2], 11), Ask([3], 21)])
    assert (done.input_tokens, done.output_tokens) == (3, 32)
    assert done.ttft_s == pytest.approx(1.0) and done.tpot_s == pytest.approx(0.1)
    assert done.decode_tok_s == pytest.approx(10)
    assert done.output_tok_s == 32 / done.seconds
    ((prompts, params),) = llm.asked
    assert prompts == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]
    assert [(p.max_tokens, p.ignore_eos, p.temperature) for p in params] == [(11, True, 0.0), (21, True, 0.0)]
    llm.short = 1
    with pytest.raises(ConfigError, match="after 10 of 11"):
        run(llm, [Ask([1], 11)])
    llm.short = 0
    assert run(llm, [Ask([1], 1)]).decode_tok_s == 0


def test_typical_is_the_median_of_each_figure() -> None:
    def made(seconds: float, ttft_s: float) -> Run:
        return Run(seconds=seconds, ttft_s=ttft_s, tpot_s=0.5, input_tokens=10, output_tokens=20)

    got = typical([made(1, 0.3), made(4, 0.1), made(2, 0.2)])
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
        from weft.cli.flags import engine_config

        made.append(FakeLLM(**vars(engine_config(arguments, **ours))))
        return made[-1]

    monkeypatch.setattr(engine, "start", start)
    return made


def test_bench_latency(llm: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench latency m --input-len 7 --output-len 3 --batch-size 2 --num-iters 2 --num-iters-warmup 1"
    assert main.main(words.split()) == 0
    captured = capsys.readouterr()
    got = json.loads(captured.out.splitlines()[-1])
    assert (got["task"], got["requests"], got["input_tokens"], got["output_tokens"]) == ("latency", 2, 14, 6)
    assert got["ttft_s"] == 1.0 and got["decode_tok_s"] == 10.0 and got["runs"] == 2
    assert [line.split(":")[0] for line in captured.err.splitlines()] == ["warm-up", "run 1", "run 2"]
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
    assert "tokens/s" in bench.line("run 1", run(llm[0], [Ask([1], 2)]))  # type: ignore[arg-type]


# --- the peer ---

FAKE = """
import json, sys
assert sys.argv[2:] == ["model.gguf", "cpu"]
print("a library says hello", flush=True)
print(json.dumps({"threads": 3}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["new"] == 13:
        print("out of luck", file=sys.stderr)
        sys.exit(3)
    print(json.dumps({"ttft_s": len(asked["prompts"]), "seconds": asked["new"]}), flush=True)
"""


def test_a_peer_answers_and_its_end_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    with Peer(tmp_path / "model.gguf", "cpu", script) as peer:
        assert peer.threads == 3
        assert peer.run([Ask([1], 4), Ask([2], 4)]) == Timing(ttft_s=2, seconds=4)
        with pytest.raises(PeerError, match="status 3: out of luck"):
            peer.run([Ask([1], 13)])
    peer.close()


def test_a_peer_that_does_not_start(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import nothing_of_that_name")
    with pytest.raises(PeerError, match="nothing_of_that_name"):
        Peer(tmp_path / "model.gguf", "cpu", script)
    with pytest.raises(PeerError, match="there is no"):
        Peer(tmp_path / "model.gguf", "cpu", tmp_path / "none.py")
    assert SCRIPT.is_file()


def test_decode_rate_leaves_the_first_token_out() -> None:
    assert decode_tok_s([Timing(ttft_s=1, seconds=2), Timing(ttft_s=1, seconds=6)], 11) == 6.0


def test_the_table() -> None:
    better = side.compare("decode", "tokens/s", 60.0, 40.0, higher_is_better=True)
    worse = side.compare("first token", "ms", 60.0, 40.0, higher_is_better=False)
    assert (better.ratio, worse.ratio) == (1.5, 0.667)
    alone = side.Figure(name="start", unit="s", weft=3.0, transformers=None, ratio=None)
    assert side.markdown([better, worse, alone]).splitlines()[2:] == [
        "| decode | tokens/s | 60.00 | 40.00 | 1.50 |",
        "| first token | ms | 60.00 | 40.00 | 0.67 |",
        "| start | s | 3.00 |  |  |",
    ]


def test_the_turns_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side, "QUIET_S", 0)
    order = []

    class Other:
        def run(self, asks: list[Ask]) -> Timing:
            order.append("theirs")
            return Timing(ttft_s=1, seconds=2)

    def ours(llm: Any, asks: list[Ask]) -> Run:
        order.append("ours")
        return Run(seconds=1, ttft_s=1, tpot_s=1, input_tokens=1, output_tokens=1)

    monkeypatch.setattr(side, "run", ours)
    peer: Any = Other()
    side.side_by_side(None, peer, side.works(0, 50, runs=3, count=1, input_len=(4, 4)))  # type: ignore[arg-type]
    assert order == ["theirs", "ours", "ours", "theirs", "theirs", "ours"]
