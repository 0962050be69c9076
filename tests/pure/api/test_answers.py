"""Commands that answer: what they ask an engine, and what they print."""

from __future__ import annotations

import io
import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.pure.commands import parsed, refused_line
from tests.pure.machines import expected, plan
from tests.refusals import has_values
from weft.cli import engine, main
from weft.cli.flags.flags import engine_config
from weft.cli.run import demo, run
from weft.config import EngineConfig
from weft.engine.client.control import memory_rows
from weft.engine.core.commands import RankReport
from weft.engine.core.params import SamplingParams
from weft.engine.core.token_ids import TokenIds
from weft.engine.executors.base import StartResult
from weft.engine.frontend.outputs import CompletionOutput, Metrics, RequestOutput
from weft.engine.replicas.running import RunningReplica
from weft.errors import ConfigError, RequestError
from weft.plan.memory import Capacity
from weft.planner.execution.forecast import Forecast, predicted_json


def answer(text: str, tokens: int, *, finished: bool = True, at: float = 2.5) -> RequestOutput:
    choice = CompletionOutput(0, text, list(range(tokens)), finish_reason="stop" if finished else None)
    times = Metrics(arrival_s=1.0, first_token_s=1.5, finished_s=at if finished else None)
    return RequestOutput("0", None, TokenIds.pack([1, 2, 3]), [choice], times, finished=finished)


class FakeLLM:
    """An engine that says the same thing always, and remembers what it was asked."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.asked: list[Any] = []
        self.given: dict[str, Any] = {}
        self.closed = 0
        self.num_blocks = 10
        self.plan = fake_plan()
        self.capacities = [
            Capacity(
                rank=rank,
                host="h",
                device="cpu",
                weight_bytes=134 * 10**6,
                activation_bytes=10**8,
                free_bytes=0,
                block_bytes=1,
                load_s=0.5,
            )
            for rank in range(2)
        ]

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed += 1

    def sampling_params(self, **given: Any) -> SamplingParams:
        self.given = given
        return SamplingParams(**given)

    def forecast(self) -> Forecast:
        return expected(tensor_parallel_size=2)

    def layout(self) -> list[dict[str, Any]]:
        report = RankReport(steps=1, compute_s=1.0, communication_s=None, waiting_s=0.0, allocated_bytes=10**9)
        ready = StartResult(num_blocks=self.num_blocks, ranks=self.capacities)
        return memory_rows([(RunningReplica(self.plan, ready), [report, report])])

    def stream(self, asked: Any, params: SamplingParams) -> Any:
        if asked == "too long":
            raise RequestError("the prompt is too long", code="prompt-too-long")
        self.asked.append(asked)
        yield answer("Hel", 1, finished=False)
        yield answer("Hello", 2, finished=False)
        yield answer("Hello.", 3)


def fake_plan() -> Any:
    return plan(kind="dummy", tensor_parallel_size=2)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The FakeLLM that the next command starts, as `.now`."""
    made = SimpleNamespace(now=None)

    def start(arguments: Namespace, **ours: Any) -> FakeLLM:
        made.now = FakeLLM(engine_config(arguments, **ours))
        return made.now

    monkeypatch.setattr(engine, "start_engine", start)
    return made


def test_run_streams_text(llm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", "m", "--prompt", "Hi", "--system-prompt", "Be brief", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "Hello.\n"
    system, user = {"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}
    assert llm.now.asked == [[system, user]]
    assert llm.now.given == {"temperature": 0.0, "max_tokens": run.MAX_TOKENS}
    assert llm.now.closed == 1


def test_run_json_is_one_object(llm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", "m", "--prompt", "Hi", "--json", "--raw"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert llm.now.asked == ["Hi"]
    assert got["timing"].pop("load_s") >= 0
    layout, predicted = got.pop("layout"), got.pop("predicted")
    assert predicted == predicted_json(expected(tensor_parallel_size=2), 3, 3)
    assert predicted["weight_bytes"] == sum(row["weight_bytes"] for row in layout)
    assert got == {
        "text": "Hello.",
        "token_ids": [0, 1, 2],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
        "timing": {"ttft_s": 0.5, "decode_tok_s": 2.0},
    }
    assert [(row["rank"], row["device"], row["layers"], row["q_heads"], row["kv_heads"]) for row in layout] == [
        (0, "cpu", 30, 6, 2),
        (1, "cpu", 30, 3, 1),
    ]
    # 10 blocks of 16 tokens: keys and values, heads, head_dim, bytes, layers.
    assert [row["kv_bytes"] for row in layout] == [160 * 2 * heads * 64 * 2 * 30 for heads in (2, 1)]
    assert sum(row["weight_bytes"] for row in layout) > 2 * 134_515_008


def test_run_verbose_tells_predicted_beside_real(
    llm: Any, capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    assert main.main(["run", "m", "--prompt", "Hi", "--verbose"]) == 0
    got = capsys.readouterr()
    assert got.out == "Hello.\n"
    memory, speed = got.err.splitlines()
    assert re.search(r"^memory: 268 MB .*\b269 MB\b.*\b1\.00\b", memory)
    assert re.search(r"\b3 \+ 3 tokens: .*\b500 ms \(.*\b2\.0 tokens/s \(.*weft bench calibrate", speed)
    golden("run.txt", got.err)


def test_run_goes_on_where_nothing_can_be_predicted(
    llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(self: FakeLLM) -> Forecast:
        raise ConfigError("unknown GPU 'X'", code="unknown-gpu")

    monkeypatch.setattr(FakeLLM, "forecast", unknown)
    assert main.main(["run", "m", "--prompt", "Hi", "--json"]) == 0
    got = capsys.readouterr()
    assert json.loads(got.out)["predicted"] is None
    assert got.err.count("\n") == 1 and "GPU 'X'" in got.err


def test_run_reads_standard_input(
    llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße".encode())))
    assert main.main(["run", "m", "--raw"]) == 0
    assert llm.now.asked == ["Grüße"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Gr\xff")))
    refused_line("run m --raw", 2, "input-not-utf8", "2")


def test_run_takes_the_prompt_after_the_model(llm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    typed = (
        ["m", "Why", "is", "it?"],
        ["--temperature", "0", "m", "Why is it?"],
        ["m", "--top-k", "3", "Why is it?"],
        ["--model", "m", "Why is it?"],
        ["--model", "m", "Why", "is it?"],
        ["m", "--prompt", "Why is it?"],
    )
    for words in typed:
        assert main.main(["run", *words, "--raw"]) == 0, capsys.readouterr().err
        assert (llm.now.config.model, llm.now.asked) == ("m", ["Why is it?"])
    refused_line("run m one --prompt two", 2, "two-prompts", "'one' 'two'")


@pytest.mark.parametrize("words", [["--prompt", ""], [" "], []])
def test_an_empty_prompt_is_refused(llm: Any, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    refused_line(["run", "m", *words], 2, "empty-prompt", "weft run")
    assert llm.now is None


@pytest.mark.parametrize(
    ("flag", "code", "named"),
    [
        ("--temperature -1", "invalid-parameter", "temperature"),
        ("--top-p 2", "invalid-parameter", "top_p"),
        ("--block-size 0", "below-minimum", "block_size"),
    ],
)
def test_values_out_of_range_are_refused_before_anything_starts(llm: Any, flag: str, code: str, named: str) -> None:
    refused_line(f"run m --prompt p {flag}", 1, code, named)
    assert llm.now is None


def test_an_answer_of_one_token_has_no_rate() -> None:
    assert engine.answer_speed(answer("a", 1)) == {"ttft_s": 0.5, "decode_tok_s": None}
    assert engine.answer_speed(answer("ab", 2, at=1.5)) == {"ttft_s": 0.5, "decode_tok_s": None}
    has_values(text := engine.speed_text(answer("a", 1)), "1 token", "500 ms")
    assert "tokens/s" not in text


def test_a_stopped_answer_tells_its_first_token_and_no_rate() -> None:
    stopped = answer("Hello", 67, finished=False)
    assert engine.answer_speed(stopped) == {"ttft_s": 0.5, "decode_tok_s": None}
    has_values(text := engine.speed_text(stopped), "67 tokens", "500 ms")
    assert "tokens/s" not in text and text != engine.speed_text(answer("Hello", 67))


def test_demo_cuts_the_model_in_two(llm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["demo", "Why", "not?", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert llm.now.config.model == "demo" and llm.now.config.tensor_parallel_size == 2
    assert llm.now.config.device_ids is None
    assert llm.now.given == {"temperature": 0.0, "max_tokens": demo.MAX_TOKENS}
    assert llm.now.asked == [[{"role": "user", "content": "Why not?"}]]
    lines = out.splitlines()
    assert any(line.split()[:5] == ["0", "cpu", "0-29", "6", "2"] for line in lines)
    assert any(line.split()[:5] == ["1", "cpu", "0-29", "3", "1"] for line in lines)
    has_values(lines[-1], "3 tokens", "2.0 tokens/s", "500 ms")
    assert "Hello." in lines


def test_demo_takes_a_layout_and_shares_a_single_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.machine.hardware.host.probe_host", lambda: SimpleNamespace(gpus=("one",)))
    assert demo.demo_layout(parsed("demo")) == {"tensor_parallel_size": 2, "device_ids": (0, 0)}
    assert demo.demo_layout(parsed("demo --device cpu")) == {"tensor_parallel_size": 2}
    assert demo.demo_layout(parsed("demo -pp 3")) == {}
    monkeypatch.setattr("weft.machine.hardware.host.probe_host", lambda: SimpleNamespace(gpus=("one", "two")))
    assert demo.demo_layout(parsed("demo")) == {"tensor_parallel_size": 2}


def test_chat_remembers_forgets_and_ends(
    llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nAgain\n/reset\nNew\n/exit\nNever\n"))
    assert main.main(["chat", "m", "--system-prompt", "S"]) == 0
    system = {"role": "system", "content": "S"}
    one = [system, {"role": "user", "content": "Hi"}]
    two = [*one, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Again"}]
    assert llm.now.asked == [one, two, [system, {"role": "user", "content": "New"}]]
    assert capsys.readouterr().out == "Hello.\n" * 3
    assert llm.now.closed == 1


def test_chat_ends_with_its_input(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    assert main.main(["chat", "m"]) == 0
    assert len(llm.now.asked) == 1


def test_ctrl_c_ends_an_answer_of_a_chat_and_keeps_it(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*outputs: RequestOutput) -> Any:
        yield from outputs
        raise KeyboardInterrupt

    kept = engine.print_stream(interrupted(answer("Hel", 1, finished=False)), stoppable=True)
    assert kept is not None and kept.outputs[0].text == "Hel"
    assert engine.print_stream(interrupted(), stoppable=True) is None
    with pytest.raises(KeyboardInterrupt):
        engine.print_stream(interrupted())
    assert capsys.readouterr().out == "Hel\n\n\n"


def test_the_seed_is_drawn_unless_it_is_given(llm: Any) -> None:
    """A question that is asked again may be answered otherwise; dummy weights come from the seed, and stay."""
    seeds = []
    for words in ([], [], ["--seed", "7"], ["--load-format", "dummy"]):
        assert main.main(["run", "m", "--prompt", "Hi", *words]) == 0
        seeds.append(llm.now.config.seed)
    assert seeds[0] != seeds[1] and seeds[2:] == [7, 0]
