"""weft plan without a model: the well known ones, in the precision that suits the hardware."""

from __future__ import annotations

import re
import shlex

from tests.pure.commands import weft, weft_json
from tests.refusals import has_values
from weft.checkpoint.architectures.registry import RUNNABLE
from weft.checkpoint.names import catalogue
from weft.planner.search.objections import unsupported_reasons

HOME = "--gpus 1xRTX4090+1xRTX3090"


def test_every_well_known_model_has_a_row_or_says_what_it_lacks() -> None:
    status, told = weft_json("plan", *HOME.split())
    assert status == 0
    rows = {row["name"]: row for row in told["models"]}
    assert list(rows) == [model.name for model in catalogue.well_known()] and 15 <= len(rows) <= 20
    assert [row["params"] for row in told["models"]] == sorted(row["params"] for row in told["models"])
    fitting = [row for row in told["models"] if row["fits"]]
    for row in fitting:
        low, high = row["predicted"]["bands"]["single_tok_s"]
        assert 0 < low < row["predicted"]["single_tok_s"] < high and row["kv_tokens"] >= 2048
        assert row["runs"] == (not row["missing"])
    short = [row for row in told["models"] if not row["fits"]]
    assert short and all(row["short_bytes"] > 0 and row["reason"] for row in short)
    # As published if that leaves room, else what Weft makes itself.
    precisions = {name: rows[name]["precision"] for name in ("Qwen/Qwen3-14B", "Qwen/Qwen3-32B", "openai/gpt-oss-20b")}
    assert list(precisions.values()) == ["bf16", "int8", "mxfp4"]
    assert rows["meta-llama/Llama-3.3-70B-Instruct"]["precision"] == "q4_1+q8_0"


def test_models_of_the_engine_s_architectures_run_as_they_are_published() -> None:
    models = [catalogue.find(entry.names[0]) for entry in catalogue.entries()]
    own = [model for model in models if model.shape.architecture in RUNNABLE]
    assert {"bf16", "fp8", "mxfp4"} <= {model.precision for model in own}
    assert [model.name for model in own if unsupported_reasons(model.shape, model.precision)] == []


def test_a_row_is_what_the_plan_of_its_model_says() -> None:
    row = next(row for row in weft_json("plan", *HOME.split())[1]["models"] if row["name"] == "Qwen/Qwen3-32B")
    best = weft_json("plan", "Qwen3-32B", *HOME.split(), "-q", "int8")[1]["best"]
    assert {name: row[name] for name in ("kv_tokens", "predicted")} == {
        name: best[name] for name in ("kv_tokens", "predicted")
    }
    assert best["name"] == f"{row['layout']}, {row['precision']}"


def test_the_table_has_a_line_for_each_model_and_says_how_to_go_on() -> None:
    status, out, err = weft("plan", *HOME.split())
    lines = out.splitlines()
    assert (status, err) == (0, "") and max(map(len, lines[:20])) <= 120
    assert lines[0] == "1 x RTX 4090 + 1 x RTX 3090 (PCIe); engine weft"
    (line,) = [line for line in lines if line.startswith("Qwen3-32B")]
    assert line.split()[1:4] == ["int8", "TP", "2"] and line.endswith("yes")
    assert "not yet" not in out
    assert re.search(r"\bDeepSeek-V3\.1 \([\d.]+ GB .*\bint4\)", lines[-2])
    has_values(lines[-1], f"weft plan MODEL {HOME}", "-q int4", "-q int8")


def test_models_that_the_engine_does_not_run_are_told_apart() -> None:
    rows = weft("plan", "--gpus", "1xRTX5090", "--precision", "nvfp4")[1].splitlines()
    assert any(row.startswith("Llama-3.2-1B-Instruct") and row.endswith("not yet") for row in rows)
    assert not any("for one person" in row for row in rows)


def test_flags_hold_for_all_models() -> None:
    out = weft("plan", *["--nodes", "2x1xH100", "--concurrency", "300", "-q", "int4"])[1]
    assert "tok/s at 300" in out and "bf16" not in out
    assert out.endswith("weft plan MODEL --nodes 2x1xH100 -q int4 --concurrency 300\n")
    told = weft_json("plan", "--gpus", "1xH100", "--objective", "latency", "--engine", "vllm")[1]
    assert (told["objective"], told["engine"]) == ("latency", "vllm")
    # Flags that some models cannot have rule those out, and no others.
    rows = weft_json("plan", "--gpus", "2xH100", "-ep")[1]["models"]
    refused = [row for row in rows if "--enable-expert-parallel" in row.get("reason", "")]
    assert refused and any(row["fits"] for row in rows)


def test_nothing_fits() -> None:
    status, told = weft_json("plan", "--gpus", "1xH100", "--max-memory", "0=1GB")
    assert status == 3 and not any(row["fits"] for row in told["models"])


def test_one_person_is_advised_in_a_format_that_people_fetch() -> None:
    advice = weft_json("plan", *HOME.split())[1]["advice"]
    assert advice["model"] == "Qwen/Qwen3-32B" and advice["format"] in ("Q4_K_M", "AWQ", "FP8")
    assert advice["single_tok_s"] >= 20 and advice["kv_tokens"] >= 8192
    assert advice["faster"] == "openai/gpt-oss-20b"
    # The command that it names is the plan that it tells.
    status, told = weft_json(*shlex.split(advice["command"])[1:])
    assert status == 0 and told["best"]["predicted"]["single_tok_s"] == advice["single_tok_s"]
    out = weft("plan", *HOME.split())[1].splitlines()
    assert f"{advice['single_tok_s']:.0f} tok/s" in out[1] and advice["command"] == out[2].strip()


def test_the_best_model_for_one_person_is_on_top() -> None:
    out = weft("plan", *HOME.split())[1].splitlines()
    names = [line.split()[0] for line in out if line.endswith("yes")]
    assert names[0] == "Qwen3-32B"
    assert names[-1] == "Llama-3.3-70B-Instruct"  # it has room for 2,048 tokens


def test_nobody_is_advised_what_is_slow() -> None:
    assert weft_json("plan", "--gpus", "1xH100", "--max-memory", "0=1GB")[1]["advice"] is None
