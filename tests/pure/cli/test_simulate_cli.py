"""weft simulate at the command line: what it answers, exit statuses, and one clear line for bad input."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.pure.commands import refused_line, weft, weft_json
from weft.cli import plot
from weft.cli.simulate import study

HERE = "Llama-3.1-8B --gpus 2xH100 --engine vllm --output-len 64 --duration 40s"


def run(words: str) -> tuple[int, str, str]:
    return weft("simulate", *words.split())


def told(words: str) -> tuple[int, dict[str, Any]]:
    return weft_json("simulate", *words.split())


# What it answers


def test_one_load() -> None:
    status, found = told(f"{HERE} --rate 6 --price 2 --slo ttft_p95=1s,tpot_p95=50ms")
    assert status == 0
    (only,) = found["runs"]
    assert found["layout"]["name"] == "DP 2, bf16" and (only["replicas"], only["sampled"], only["gpus"]) == (2, 2, 2)
    assert only["rate"] == 6.0 and only["window_s"] == pytest.approx(36.0)
    assert only["requests"] == only["completed"] == pytest.approx(6 * 36, rel=0.3)
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"):
        spread = only[name]
        assert spread["p50"] <= spread["p90"] <= spread["p95"] <= spread["p99"]
    assert only["met"] is True and [it["target"] for it in only["objective"]] == ["ttft_p95", "tpot_p95"]
    assert only["gpu_hours"] == pytest.approx(2 * 36 / 3600)
    assert only["dollars_per_million_tokens"] == pytest.approx(4 / 3600 / only["output_tok_s"] * 1e6)


def test_the_same_words_give_the_same_answer() -> None:
    words = f"{HERE} --rate 6 --burstiness 0.3 --input-len lognormal:600:400 --prefix-len 200 --prefixes 4"
    assert told(words) == told(words)
    assert told(words) != told(f"{words} --seed 1")


def test_a_sweep_is_a_table_and_plots() -> None:
    status, out, err = run(f"{HERE} --rates 2,8")
    assert (status, err) == (0, "")
    table = out[out.index("requests/s   ") :].split("TTFT, ms")[0]
    assert [line.split()[0] for line in table.splitlines() if line.strip(" ─")] == ["requests/s", "2", "8"]
    assert "TTFT, ms" in out and "TPOT, ms" in out and "o p50   + p95   x p99" in out


def test_plus_minus_is_explained_only_if_it_is_shown() -> None:
    one = run(f"{HERE} --rate 8 --slo ttft_p95=1s")[1]
    assert one.count("±") == 2 and re.match(r"± .*\b95 %", one.rstrip().splitlines()[-1])
    assert "±" not in run(f"{HERE} --rates 2,8 --slo ttft_p95=1s")[1]


def test_without_a_load_rates_are_shares_of_what_is_predicted() -> None:
    _, found = told(f"{HERE} --duration 8s")
    whole = 2 * found["predicted_capacity"]
    assert [it["rate"] for it in found["runs"]] == pytest.approx([whole * share for share in study.SHARES], rel=0.01)


def test_lengths_that_nobody_says_vary_around_the_planner_s() -> None:
    _, found = told("Llama-3.1-8B --gpus 2xH100 --rate 4 --duration 20s")
    assert (found["load"]["input_len"], found["load"]["output_len"]) == (1024, 1024)
    _, short = told("Llama-3.1-8B --gpus 2xH100 --rate 4 --duration 20s --max-model-len 100")
    assert (short["load"]["input_len"], short["load"]["output_len"]) == (50, 50)
    said = "all answers have the same length"
    assert said not in run("Llama-3.1-8B --gpus 2xH100 --rate 4 --duration 20s")[1]
    assert said in run(f"{HERE} --rate 4")[1]


def test_users_and_think_time() -> None:
    _, found = told(f"{HERE} --users 12 --think 2s")
    (only,) = found["runs"]
    assert (only["rate"], only["users"]) == (None, 12) and only["running"] < 6


def test_a_trace_is_measured_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time,input_len,output_len\n" + "".join(f"{at},{100 + at},30\n" for at in range(20)))
    _, found = told(f"Llama-3.1-8B --gpus 1xH100 --trace {path}")
    (only,) = found["runs"]
    assert found["duration_s"] is None and found["warmup_s"] == 0.0
    assert only["requests"] == only["completed"] == 20 and only["window_s"] > 19
    assert only["output_tok_s"] * only["window_s"] == pytest.approx(20 * 30)
    _, faster = told(f"Llama-3.1-8B --gpus 1xH100 --trace {path} --rate 10")
    assert faster["runs"][0]["window_s"] < 4


def test_replicas_are_found() -> None:
    words = "Llama-3.1-8B --gpus 2xH100 --engine vllm --rate 30 --find replicas --output-len 48 --duration 15s"
    words += " --slo ttft_p95=250ms,tpot_p95=12ms"
    status, found = told(words)
    assert status == 0
    answer = found["find"]
    by_count = {it["replicas"]: it["met"] for it in found["runs"]}
    assert answer["best"]["replicas"] == answer["value"] and by_count[answer["value"]] is True
    assert answer["value"] == 1 or by_count[answer["value"] - 1] is False
    assert re.search(rf"\b{answer['value']} replicas \({answer['value']} GPUs\)", run(words)[1])


def test_a_rate_is_found() -> None:
    status, found = told(f"{HERE} --duration 15s --find rate --slo ttft_p95=300ms,tpot_p95=20ms")
    assert status == 0
    value = found["find"]["value"]
    assert all(it["met"] for it in found["runs"] if it["rate"] <= value)
    assert any(not it["met"] and it["rate"] <= 1.03 * value for it in found["runs"])


@pytest.mark.parametrize("what", ["replicas --rate 5", "rate"])
def test_an_objective_that_a_lone_request_misses_is_met_by_none(what: str) -> None:
    words = f"{HERE} --find {what} --slo ttft_p95=1ms,e2e_p50=1h"
    status, found = told(words)
    assert status == 3
    assert found["find"]["value"] is None
    assert "ttft_p95" in found["find"]["reason"] and "1 ms" in found["find"]["reason"]
    assert found["find"]["reason"] in run(words)[1]


def test_a_share_of_many_replicas_is_simulated() -> None:
    words = "Llama-3.1-8B --nodes 16x8xH100 --rate 300 --output-len 16 --duration 8s"
    _, whole = told(words)
    _, part = told(f"{words} --sample-replicas 32")
    assert [it["runs"][0]["sampled"] for it in (whole, part)] == [128, 32]
    assert part["runs"][0]["requests"] == pytest.approx(whole["runs"][0]["requests"] / 4, rel=0.15)
    assert part["runs"][0]["output_tok_s"] == pytest.approx(whole["runs"][0]["output_tok_s"], rel=0.1)
    assert re.search(r"\b32 of 128 ", run(f"{words} --sample-replicas 32")[1])


def test_step_by_step_says_the_same() -> None:
    words = f"{HERE} --rate 4"
    (fast,), (slow,) = (found["runs"] for _, found in (told(words), told(f"{words} --no-stretches")))
    assert fast["ttft_s"]["p95"] == pytest.approx(slow["ttft_s"]["p95"], rel=0.02)
    assert fast["output_tok_s"] == pytest.approx(slow["output_tok_s"], rel=0.001)


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "load.png"
    assert run(f"{HERE} --rates 2,4 --plot {path}")[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[plot.Panel], str]]:
    """The panels and the title of each picture that is drawn."""
    pictures: list[tuple[list[plot.Panel], str]] = []
    monkeypatch.setattr(plot, "check_image_path", lambda path: None)
    monkeypatch.setattr(plot, "write_image", lambda path, panels, title: pictures.append((panels, title)))
    return pictures


def lines_of(panel: plot.Panel, *, upright: bool) -> dict[str, float]:
    return {line.name: line.value for line in panel.lines if line.upright is upright}


def test_one_run_is_drawn_as_a_distribution_with_the_promise(drawn: list[tuple[list[plot.Panel], str]]) -> None:
    words = f"{HERE} --users 20 --think 1s --slo ttft_p95=300ms,e2e_p50=2s --plot x.png"
    status, told_json = told(words)
    assert status == 0
    ((panels, title),) = drawn
    assert title.startswith("meta-llama/Llama-3.1-8B: ") and "2 x H100" in title and "20 users" in title
    assert [panel.x for panel in panels] == ["TTFT, ms", "TPOT, ms", "whole answer, ms"]
    spread = told_json["runs"][0]["ttft_s"]
    (curve,) = panels[0].curves
    shares = [share for _, share in curve.points]
    assert shares == [*range(101)] and [at for at, _ in curve.points] == sorted(at for at, _ in curve.points)
    assert curve.points[95][0] == pytest.approx(1000 * spread["p95"])
    assert lines_of(panels[0], upright=True) == {"promised: ttft_p95 300 ms": 300.0}
    assert lines_of(panels[0], upright=False) == {"95 %": 95.0}
    assert panels[1].lines == []
    assert lines_of(panels[2], upright=True) == {"promised: e2e_p50 2 s": 2000.0}
    assert "distributions" not in told_json["runs"][0]


def test_a_search_is_drawn_with_promise_answer_and_saturation(drawn: list[tuple[list[plot.Panel], str]]) -> None:
    words = f"{HERE} --duration 15s --find rate --slo ttft_p95=300ms --plot x.png"
    _, told_json = told(words)
    ((panels, title),) = drawn
    assert "2 x H100" in title
    value, whole = told_json["find"]["value"], 2 * told_json["predicted_capacity"]
    for panel in panels:
        assert [curve.name for curve in panel.curves] == ["p50", "p95", "p99"]
        marked = lines_of(panel, upright=True)
        assert sorted(marked.values()) == pytest.approx(sorted([value, whole]))
    assert lines_of(panels[0], upright=False) == {"promised: ttft_p95 300 ms": 300.0}
    assert lines_of(panels[1], upright=False) == {}


def test_slow_answers_are_simulated_for_longer() -> None:
    """Ten minutes of one request in twenty minutes would measure nothing."""
    slow = "Llama-3.1-70B --gpus 1xH200 --rate 0.01 --output-len 8 --input-len 8"
    _, seldom = told(slow)
    assert seldom["duration_s"] == pytest.approx(300 / 0.01)
    assert seldom["runs"][0]["requests"] > 200
    _, usual = told(slow.replace("0.01", "1"))
    assert usual["duration_s"] == 600


def test_without_matplotlib_it_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    refused_line(f"simulate {HERE} --rates 2,4 --plot load.png", 2, "matplotlib-missing")


@pytest.mark.parametrize(
    ("path", "code", "value"),
    [("/nowhere/x.png", "folder-missing", "/nowhere"), ("x.foo", "unknown-image-format", ".foo")],
)
def test_a_plot_that_cannot_be_written_is_refused_before_the_run(path: str, code: str, value: str) -> None:
    pytest.importorskip("matplotlib")
    refused_line(f"simulate {HERE} --rates 2,4 --plot {path}", 2, code, value)


# Bad input


def test_requests_at_once_take_memory() -> None:
    """They take it in an engine too: for their logits, and for steps that have room for all of them."""
    few, many = (told(f"{HERE} --rate 4 --max-num-seqs {count}")[1]["runs"][0] for count in (16, 2048))
    assert many["kv_utilisation"] > few["kv_utilisation"]
    status, out, err = run(f"{HERE} --rate 4 --max-num-seqs 1000000000000")
    assert (status, out) == (3, "") and "for the engine" in err and err.count("\n") == 1


def test_a_bad_line_of_a_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time,input_len,output_len\n0,10,10\n1,ten,10\n")
    line = f"simulate Llama-3.1-8B --gpus 1xH100 --trace {path}"
    refused_line(line, 1, "bad-trace-tokens", f"{path} 3 input_len 'ten'")
    path.write_text("time,input_len,output_len\n5,10,10\n6,10,10\n")
    refused_line(f"{line} --warmup 1m --json", 1, "only-warmup", "60")
    path.write_text("time,input_len,output_len\n5,10,10\n5,10,10\n")
    refused_line(line, 1, "trace-without-duration", str(path))


def test_a_model_that_does_not_fit_is_told_with_the_missing_memory() -> None:
    status, out, err = run("Llama-3.1-70B --gpus 1xH100 --rate 1")
    assert (status, out) == (3, "") and "143.3 GB" in err and err.count("\n") == 1


OVERLOADED = "Llama-3.1-8B --gpus 1xL40S --rate 50 --duration 20s"


def test_an_overloaded_run_says_so_first() -> None:
    status, out, _ = run(OVERLOADED)
    first = out.splitlines()[0]
    assert status == 0 and first.startswith("overloaded") and " 50 " in first
    assert "--duration" not in out  # a longer run would not help
    status, document = told(f"{OVERLOADED} --slo ttft_p95=1s")
    assert status == 3 and document["verdict"]["overloaded"] and document["verdict"]["kept"] is False


@pytest.mark.parametrize(("slo", "status", "kept"), [("10s", 0, True), ("1ms", 3, False)])
def test_a_promise_decides_the_exit_status(slo: str, status: int, kept: bool) -> None:
    words = f"Llama-3.1-8B --gpus 1xL40S --rate 0.5 --duration 60s --slo ttft_p95={slo}"
    found, document = told(words)
    assert found == status
    assert document["verdict"]["kept"] is kept and not document["verdict"]["overloaded"]
    assert run(words)[1].splitlines()[0].startswith("promise kept" if kept else "promise not kept")


def test_a_sweep_tells_the_highest_rate_that_is_carried() -> None:
    status, document = told("Llama-3.1-8B --gpus 1xL40S --rates 0.5,1,80 --duration 30s")
    assert status == 0 and not document["verdict"]["overloaded"]
    assert " 1 " in document["verdict"]["text"]
