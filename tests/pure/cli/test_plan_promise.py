"""weft plan with a load and a promise: the simulation behind the plan judges it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.pure.commands import weft, weft_json
from tests.refusals import has_values

# Short answers: a run takes a fraction of a second.
HERE = "Llama-3.2-1B --gpus 1xL40S --input-len 256 --output-len 12"


def test_a_promise_that_is_kept() -> None:
    words = f"{HERE} --users 4 --think 10s --slo ttft_p95=1s,tpot_p95=50ms"
    status, told = weft_json("plan", *words.split())
    promise, run = told["promise"], told["promise"]["run"]
    assert status == 0 and promise["kept"] is True and promise["needed"] is None
    assert (promise["users"], promise["rate"], promise["think_s"], promise["replicas"]) == (4, None, 10.0, 1)
    assert [target["target"] for target in promise["targets"]] == ["ttft_p95", "tpot_p95"]
    predicted = told["best"]["predicted"]
    assert predicted["ttft_s_at_concurrency"] == run["ttft_s"]["mean"]
    assert predicted["ttft_s_at_concurrency_p95"] == run["ttft_s"]["p95"]
    assert predicted["tpot_s_at_concurrency_p95"] == run["tpot_s"]["p95"]
    low, high = predicted["bands"]["ttft_s_at_concurrency_p95"]
    assert low < run["ttft_s"]["p95"] < high
    assert told["candidates"][0]["predicted"] == predicted
    # The same simulation by its own command.
    again = weft_json("simulate", *shlex.split(promise["command"])[2:])[1]
    assert again["runs"] == [run] and again["slo"] == promise["slo"]


def test_the_second_line_is_the_verdict(tmp_path: Path) -> None:
    words = f"{HERE} --users 4 --think 10s --slo ttft_p95=1s"
    status, out, _ = weft("plan", *words.split(), "--html", str(tmp_path / "plan.html"))
    line = out.splitlines()[1]
    assert status == 0 and re.search(r"^Promise kept .*\b4 users .*\b10 s\b.*: ttft_p95 .* ms \(1 s ", line)
    assert line.partition(":")[0] in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize("load", ["--users 24 --slo tpot_p95=6ms", "--rate 30 --slo tpot_p95=5ms"])
def test_a_promise_that_is_not_kept_names_the_replicas_that_keep_it(load: str) -> None:
    # Time per token grows with the requests at once.
    status, told = weft_json("plan", *f"{HERE} {load}".split())
    promise = told["promise"]
    assert status == 3 and promise["kept"] is False
    needed = promise["needed"]
    assert needed["replicas"] == needed["gpus"] > 1
    has_values(needed["text"], f"{needed['replicas']} replicas", f"{needed['gpus']} GPUs", "weft simulate ")
    command = shlex.split(needed["command"])
    assert " --duration " in needed["command"]
    assert command[-2:] == ["--replicas", str(needed["replicas"])]
    if "--users" in load:
        for count, met in ((needed["replicas"], True), (needed["replicas"] - 1, False)):
            assert weft_json("simulate", *command[2:-1], f"{count}")[1]["runs"][0]["met"] is met


def test_a_promise_that_no_replicas_keep_is_told_at_once() -> None:
    status, told = weft_json("plan", *f"{HERE} --users 2 --slo tpot_p95=1us".split())
    assert status == 3 and told["promise"]["needed"]["replicas"] is None
    assert "tpot_p95" in told["promise"]["needed"]["text"]


def test_nothing_fits() -> None:
    status, told = weft_json("plan", *["Llama-3.1-405B", "--gpus", "1xL40S", "--users", "2", "--slo", "ttft_p95=1s"])
    assert status == 3 and told["best"] is None and told["promise"] is None


def test_a_plan_without_a_promise_has_no_times_under_load() -> None:
    told = weft_json("plan", "Llama-3.2-1B", "--gpus", "1xL40S")[1]
    assert told["promise"] is None and told["best"]["predicted"]["ttft_s_at_concurrency_p95"] is None
