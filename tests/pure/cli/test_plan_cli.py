"""weft plan at the command line: the fields that others rely on, exit statuses, and one clear line for bad input."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.pure.commands import weft, weft_json
from tests.refusals import has_values
from weft.cli.flags import plan_flags
from weft.cli.plan import plan_text
from weft.planner.profiles import engine_names, load_profile
from weft.planner.question import OBJECTIVES


def run(*words: str) -> tuple[int, str, str]:
    return weft("plan", *words)


def plan(words: str) -> tuple[int, dict[str, Any]]:
    return weft_json("plan", *words.split())


# --- the fields ---


def test_json_has_the_fields_that_others_rely_on() -> None:
    status, found = plan("Llama-3.1-70B-Instruct --gpus 4xA100 --price 2 --engine vllm")
    assert status == 0
    assert {"model", "hardware", "best", "candidates", "rejected", "advice"} <= found.keys()
    assert found["model"]["name"] == "meta-llama/Llama-3.1-70B-Instruct"
    assert found["model"]["params"] == 70553706496
    assert found["model"]["weight_bytes"] == 2 * 70553706496
    assert found["model"]["kv_bytes_per_token"] == 327680
    assert found["hardware"]["gpus"] == 4
    best = found["best"]
    layout = {name: best[f"{name}_parallel"] for name in ("tensor", "pipeline", "data", "expert")}
    assert layout == {"tensor": 4, "pipeline": 1, "data": 1, "expert": 1}
    assert best["precision"] == "bf16"
    assert [rank["rank"] for rank in best["ranks"]] == [0, 1, 2, 3]
    for rank in best["ranks"]:
        assert rank["gpu"] == "A100-80GB-SXM"
        assert (rank["layers"], rank["q_heads"], rank["kv_heads"], rank["ffn"], rank["experts"]) == (80, 16, 2, 7168, 0)
        parts = [rank[f"{kind}_bytes"] for kind in ("weight", "kv", "other", "free")]
        assert all(isinstance(part, int) and part >= 0 for part in parts) and sum(parts) == 81920 << 20
        assert rank["kv_bytes"] == best["kv_tokens"] * 81920
    # Norms are on every rank, the rest on one.
    assert sum(rank["weight_bytes"] for rank in best["ranks"]) == 2 * (70553706496 + 3 * 161 * 8192)
    assert best["max_concurrency"] == pytest.approx(best["kv_tokens"] / 2048, abs=0.01)
    speed = best["predicted"]
    assert {"single_tok_s", "ttft_s", "tpot_s_at_concurrency", "saturated_tok_s", "error_band"} <= speed.keys()
    assert all(speed[name] > 0 for name in ("single_tok_s", "ttft_s", "tpot_s_at_concurrency", "saturated_tok_s"))
    rent = 4 * 2 / 3600 / speed["saturated_tok_s"] * 1e6
    assert best["dollars_per_million_tokens"] == pytest.approx(rent)
    assert found["candidates"][0] == {name: value for name, value in best.items() if name != "ranks"}
    assert len(found["candidates"]) > 2
    assert all(it["layout"]["tensor_parallel"] and it["reason"] for it in found["rejected"])
    assert found["binding"]["constraint"] in ("memory", "bandwidth", "compute", "links")
    assert found["advice"]


def test_a_forced_layout_is_the_best() -> None:
    words = (
        "Llama-3.1-70B-Instruct --gpus 8xH100 --precision fp8 --tensor-parallel-size 2 --pipeline-parallel-size 2 "
        "--data-parallel-size 2 --engine trtllm --input-len 1000 --output-len 1000 --concurrency"
    )
    status, found = plan(f"{words} 64")
    best = found["best"]
    assert status == 0
    assert [best[f"{name}_parallel"] for name in ("tensor", "pipeline", "data")] == [2, 2, 2]
    assert best["predicted"]["concurrency"] == 64
    assert len(best["ranks"]) == 8 and {rank["replica"] for rank in best["ranks"]} == {0, 1}
    saturated = plan(f"{words} max")[1]["best"]["predicted"]
    assert saturated["saturated_tok_s"] == best["predicted"]["saturated_tok_s"]
    assert saturated["tpot_s_at_concurrency"] > best["predicted"]["tpot_s_at_concurrency"]
    assert saturated["limited_by"] in ("kv_cache", "max_num_seqs")


def test_expert_parallelism_is_forced() -> None:
    words = "Qwen3-30B-A3B --gpus 4xH100 --engine vllm --tensor-parallel-size 4"
    assert plan(f"{words} --enable-expert-parallel")[1]["best"]["expert_parallel"] == 4
    # Who gives the sizes gives all of the layout.
    found = plan(words)[1]
    assert {it["expert_parallel"] for it in found["candidates"]} == {1}
    shared = plan("Qwen3-30B-A3B --gpus 4xH100 --data-parallel-size 4 --tensor-parallel-size 1 -ep")[1]["best"]
    assert shared["expert_parallel"] == 4
    assert [rank["experts"] for rank in shared["ranks"]] == [32] * 4


def test_llama_cpp_has_no_replicas_that_share_experts() -> None:
    _, told = weft_json(
        "plan", "mistralai/Mixtral-8x7B-v0.1", "--gpus", "2xRTX3090", "--precision", "q4_k_m", "--engine", "llama.cpp"
    )
    assert {it["expert_parallel"] for it in told["candidates"]} == {1}
    shared = next(it for it in told["rejected"] if it["layout"]["name"].startswith("DP 2 x EP 2"))
    assert shared["code"] == "replicas_share_layer"


def test_uneven_splits() -> None:
    words = "Qwen2.5-32B-Instruct --gpus 1xRTXA6000+1xRTX4090"
    stages = plan(f"{words} --pipeline-parallel-size 2 --tensor-parallel-size 1")[1]["best"]["ranks"]
    assert [rank["gpu"] for rank in stages] == ["RTX A6000", "RTX 4090"]
    assert stages[0]["layers"] > stages[1]["layers"] and sum(rank["layers"] for rank in stages) == 64
    assert plan(f"{words} --tensor-split 5,3")[0] == 3
    ranks = plan(f"{words.replace('32B', '14B')} --tensor-split 5,3")[1]["best"]["ranks"]
    assert [rank["kv_heads"] for rank in ranks] == [5, 3]
    assert plan("gpt2 --gpus 2xH100 --pipeline-split 7,5")[1]["best"]["pipeline_split"] == [7, 5]


@pytest.mark.parametrize(
    ("precision", "weight_bytes"), [("bf16", 145412407296), ("fp16", 145412407296), ("int4", 41464774656)]
)
def test_weights_are_exact_for_the_precision(precision: str, weight_bytes: int) -> None:
    model = plan(f"Qwen2.5-72B-Instruct --gpus 8xH100 --precision {precision}")[1]["model"]
    assert model["weight_bytes"] == weight_bytes and model["params"] == 72706203648


def test_the_kv_cache_has_the_dtype_that_is_asked_for() -> None:
    words = "Llama-3.1-8B-Instruct --gpus 1xH100 --engine vllm"
    whole, half = plan(words)[1], plan(f"{words} --kv-cache-dtype fp8")[1]
    assert whole["model"]["kv_bytes_per_token"] == 2 * half["model"]["kv_bytes_per_token"] == 131072
    assert half["best"]["kv_tokens"] == pytest.approx(2 * whole["best"]["kv_tokens"], abs=32)


def test_a_model_that_the_engine_runs_is_told_from_one_it_does_not() -> None:
    assert plan("Qwen3-8B --gpus 1xH100")[1]["model"]["runs"] is True
    assert plan("gpt2 --gpus 1xH100")[1]["model"]["runs"] is True
    assert plan("gemma-2-2b-it --gpus 1xH100")[1]["model"]["runs"] is False
    assert plan("Qwen3-8B --gpus 1xH100 --precision nvfp4")[1]["model"]["runs"] is False
    missing = plan("gemma-2-2b-it --gpus 1xH100")[1]["model"]
    assert missing["missing_codes"] == ["architecture_not_run"]
    assert missing["missing"][0] in run("gemma-2-2b-it", "--gpus", "1xH100")[1]
    assert missing["missing"][0] not in run("gemma-2-2b-it", "--gpus", "1xH100", "--engine", "vllm")[1]


def test_old_gpus_run_bfloat16_checkpoints_in_float16() -> None:
    status, found = plan("Llama-3.1-8B-Instruct --gpus 2xT4")
    assert status == 0 and found["best"]["precision"] == "fp16"
    assert plan("Llama-3.1-8B-Instruct --gpus 2xT4 --precision bf16")[0] == 3


def test_lengths_that_are_left_out_fit_the_model() -> None:
    assert plan("gpt2 --gpus 1xH100")[1]["workload"]["max_model_len"] == 1024
    work = plan("gpt2 --gpus 1xH100 --input-len 1000")[1]["workload"]
    assert (work["input_len"], work["output_len"]) == (1000, 24)
    asked = plan("Llama-3.1-8B-Instruct --gpus 1xH100 --max-model-len 40960")[1]
    assert asked["best"]["max_concurrency"] == pytest.approx(asked["best"]["kv_tokens"] / 40960, abs=0.01)


# --- exit 3 ---


def test_nothing_fits() -> None:
    status, found = plan("Qwen2.5-72B-Instruct --gpus 4xRTX4090")
    assert status == 3
    assert found["best"] is None and found["candidates"] == []
    assert {"TP 4, bf16", "PP 4, bf16"} <= {it["layout"]["name"] for it in found["rejected"]}
    assert {it["code"] for it in found["rejected"]} == {"weights_too_large"}
    assert found["summary_code"] == "does_not_fit" and "smaller_checkpoint" in found["advice_codes"]
    status, out, err = run("Qwen2.5-72B-Instruct", "--gpus", "4xRTX4090")
    assert status == 3 and err == ""
    assert found["summary"] in out and all(change in out for change in found["advice"])


@pytest.mark.parametrize(
    ("claim", "status"),
    [
        ("Qwen2.5-72B-Instruct fp16 on 1xH100, 50 tok/s", 3),
        ("Qwen2.5-72B-Instruct fp16 on 4xH100, 150 tok/s", 3),
        ("Qwen2.5-72B-Instruct int4 on 2xRTX4090, 45 tok/s", 0),
        ("Qwen-72B-Chat bf16 on 2xA100, 17.60 tok/s", 0),
        ("Qwen-72B-Chat bf16 on 2xA100 at 32768 tokens, 1 tok/s", 3),
    ],
)
def test_a_claim_is_checked(claim: str, status: int) -> None:
    got, out, err = run("--check", claim)
    assert (got, err) == (status, "")
    assert out.startswith("impossible" if status else "possible")
    assert status or re.search(r"\bweft\b.* tok/s", out)
    got, out, err = run("--check", claim, "--json")
    found = json.loads(out)
    assert got == status and found["possible"] == (status == 0) and bool(found["reasons"]) == bool(status)
    assert found["bound_tok_s"] > 0


def test_a_possible_claim_has_the_predicted_speed_beside_it() -> None:
    out = json.loads(run("--check", "Qwen-72B-Chat bf16 on 2xA100, 17.60 tok/s", "--engine", "vllm", "--json")[1])
    assert out["predicted"]["layout"] == "TP 2, bf16"
    assert 0.75 * 17.6 < out["predicted"]["single_tok_s"] < 1.25 * 17.6  # measured


# --- what a person reads ---


def test_a_layout_that_an_engine_cannot_run_has_no_predicted_speed() -> None:
    status, out, _ = weft("plan", "--check", "SmolLM2-135M bf16 on 1xT4, 100 tok/s")
    assert status == 0 and "predicted" not in out
    assert re.search(r"\bweft: T4 .*\b7\.5\b.*\bbf16 .*\b8\.0\b", out.splitlines()[-1])
    told = weft_json("plan", "--check", "SmolLM2-135M bf16 on 1xT4, 100 tok/s")[1]
    assert told["predicted"] is None and told["objection"].startswith("T4")


@pytest.mark.parametrize(("gpus", "least"), [("1xRTX3090", "8.6; weft's fp8 KV cache needs 8.9"), ("1xA100", "8.0")])
def test_a_cache_that_the_engine_refuses_is_none_of_a_plan(gpus: str, least: str) -> None:
    words = ("plan", "Qwen3-8B", "--gpus", gpus, "--kv-cache-dtype", "fp8")
    status, out, _ = weft(*words)
    assert status == 3 and least in out
    assert weft(*words, "--engine", "vllm")[0] == 0
    assert weft("plan", "Qwen3-8B", "--gpus", "1xRTX4090", "--kv-cache-dtype", "fp8")[0] == 0


def test_fewer_requests_at_once_are_planned_as_the_engine_has_them() -> None:
    words = ("plan", "Qwen3-0.6B", "--gpus", "1xRTX4090")
    (_, usual), (_, few) = weft_json(*words), weft_json(*words, "--max-num-seqs", "8")
    assert few["max_num_seqs"] == 8 and few["best"]["predicted"]["saturated_concurrency"] == 8
    # Of a step of at least twice as many tokens as there are requests; and a prompt that is scored holds 64 logits.
    assert few["best"]["ranks"][0]["other_bytes"] < usual["best"]["ranks"][0]["other_bytes"]
    assert "--max-num-seqs 8" in weft(*words, "--max-num-seqs", "8", "--emit", "weft")[1]


LIMIT = "without_limit"  # code of the advice to leave a limit out


def test_limits_that_leave_no_room_are_named() -> None:
    for flag, value in (("--gpu-memory-utilization", "0.01"), ("--max-num-batched-tokens", "100000000")):
        status, found = plan(f"Qwen3-0.6B --gpus 1xRTX4090 {flag} {value}")
        (change,) = [text for code, text in zip(found["advice_codes"], found["advice"], strict=True) if code == LIMIT]
        assert status == 3
        has_values(change, flag, "one GPU, bf16")


def test_the_first_line_is_the_answer() -> None:
    for flags, code in (("-q int4", "fits"), ("", "does_not_fit")):
        words = f"Qwen3-32B --gpus 1xRTX4090+1xRTX3090 {flags}"
        found = plan(words)[1]
        assert found["summary_code"] == code
        assert run(*words.split())[1].startswith(found["summary"] + "\n")
    found = plan("gemma-2-2b-it --gpus 1xH100")[1]
    assert found["summary_code"] == "fits" and not found["model"]["runs"]


def test_nothing_fits_names_the_fix_that_needs_least_as_a_command_and_first() -> None:
    words = "Qwen3-32B --gpus 1xRTX4090+1xRTX3090"
    text = run(*words.split())[1]
    advice = plan(words)[1]["advice"]
    command, *_ = advice[0].removeprefix("try: weft ").partition(" (")
    assert command == "plan Qwen/Qwen3-32B --gpus 1xRTX4090+1xRTX3090 -q int4"
    places = [text.index(line) for line in (*advice, "rejected:")]
    assert places == sorted(places)
    assert weft(*command.split())[0] == 0


def test_fixes_keep_the_flags_that_were_given() -> None:
    words = "Qwen3-32B --gpus 1xRTX4090+1xRTX3090 --input-len 4000 --max-memory 0=20GB,1=24GB --price 0.5"
    (fix, *_) = plan(words)[1]["advice"]
    command = shlex.split(fix.removeprefix("try: weft ").partition(" (")[0])
    assert command[-2:] == ["-q", "int4"] and "--precision" not in command
    status, answer = weft_json(*command)
    assert status == 0 and answer["workload"]["input_len"] == 4000
    assert answer["hardware"]["dollars_per_gpu_hour"] == 0.5
    assert [rank["usable_bytes"] for rank in answer["best"]["ranks"]] != []
    assert "max_memory" in answer["note_codes"]


def test_every_speed_has_a_band() -> None:
    predicted = plan("Llama-3.1-8B --gpus 2xRTX4090 --engine vllm --price 1")[1]["best"]["predicted"]
    names = {"single_tok_s", "ttft_s", "tpot_s_at_concurrency", "output_tok_s", "saturated_tok_s"}
    assert predicted["bands"].keys() == names
    for name, (low, high) in predicted["bands"].items():
        assert low == pytest.approx(0.85 * predicted[name]) and high == pytest.approx(1.15 * predicted[name])
    assert predicted["error_source"] == load_profile("vllm").error.source
    ours = plan("Llama-3.1-8B --gpus 2xRTX4090")[1]["best"]["predicted"]
    assert ours["error_band"] == 0.4 and ours["error_source"] == load_profile("weft").error.source
    emitted = run("Llama-3.1-8B", "--gpus", "2xRTX4090", "--emit", "vllm")[1]
    assert f"within 15 % ({predicted['error_source']}" in emitted.replace("\n# ", " ")


def test_speeds_and_prices_of_a_row_are_at_the_same_load() -> None:
    words = "Llama-3.1-8B-Instruct --gpus 8xH100 -dp 8 --concurrency 300 --price 2.5"
    for candidate in plan(words)[1]["candidates"]:
        rate, gpus = candidate["predicted"]["output_tok_s"], 8
        if str(candidate["name"]).startswith("DP 8"):
            assert candidate["dollars_per_million_tokens"] == pytest.approx(2.5 * gpus / 3600 / rate * 1e6)
            assert candidate["output_tok_s_per_gpu"] == pytest.approx(rate / gpus)
    best, out = plan(words)[1]["best"], run(*words.split())[1]
    at_300, saturated = best["predicted"]["output_tok_s"], best["predicted"]["saturated_tok_s"]
    assert saturated > 1.5 * at_300
    assert f"{at_300:,.0f}" in out and f"{saturated:,.0f}" not in out


@pytest.mark.parametrize(
    ("words", "marked"),
    [
        ("--concurrency 30", "at 30 *"),
        ("", "all *"),
        ("--objective latency", "request *"),
        ("--objective cost", "per GPU *"),
        ("--objective cost --price 1", "tokens *"),
    ],
)
def test_the_figure_that_decided_is_marked(words: str, marked: str) -> None:
    out = run("Llama-3.1-8B", "--gpus", "1xH100", *words.split())[1]
    (line,) = [line for line in out.splitlines() if line.startswith("fullest GPU  ")]
    assert line.count("*") == 1 and f"{marked.removesuffix(' *')} *" in " ".join(line.split())


def test_requests_are_whole_and_more_of_them_at_once_are_explained(golden: Callable[[str, str], None]) -> None:
    out = run("Qwen3-8B", "--gpus", "1xRTX4090+1xRTX3090", "-dp", "2")[1]
    assert "30.5" not in out and re.search(r"\b38 requests .*\b1,024 tokens .*\b1,024 ", out)
    assert re.search(r"\bmore than the 30 ", out)
    assert "weft simulate Qwen/Qwen3-8B --gpus 1xRTX4090+1xRTX3090 -dp 2\n" in out
    golden("plan_page.txt", out)


@pytest.mark.parametrize(("tok_s", "told"), [(0.42, "0.4"), (0.031, "0.03"), (1.4, "1"), (12345.6, "12,346")])
def test_a_slow_rate_is_not_rounded_to_zero(tok_s: float, told: str) -> None:
    assert plan_text.token_rate(tok_s) == told


def test_the_best_of_each_precision_is_shown() -> None:
    out = run("Qwen3-32B", "--gpus", "2xH100", "--precision", "fp8,int8,bf16,int4", "--engine", "vllm")[1]
    table = out[out.index("fullest GPU") : out.index("* column that decided")]
    assert all(f", {precision} " in table for precision in ("fp8", "int8", "bf16", "int4"))
    # A precision in which nothing fits comes first among the rejected.
    out = run("Qwen3-32B", "--gpus", "2xRTX4090", "--precision", "int4,bf16")[1]
    assert ", bf16: needs" in out[out.index("rejected:") :].splitlines()[1]


def test_the_command_that_simulates_a_plan_is_one() -> None:
    words = "Llama-3.1-8B --gpus 2xRTX4090 --precision bf16,int8 --concurrency 8 --max-model-len 4096"
    command = plan(words)[1]["simulate"]
    assert command == "weft simulate meta-llama/Llama-3.1-8B --gpus 2xRTX4090 --max-model-len 4096 --precision int8"
    rate = ("--rate", "1", "--duration", "20s", "--input-len", "64", "--output-len", "16", "--json")
    assert weft(*shlex.split(command)[1:], *rate)[0] == 0
    guessing = run("Qwen3-8B", "--gpus", "1xRTX4090", "-sc", '{"method": "ngram"}', "--json")[1]
    assert json.loads(guessing)["simulate"] == "weft simulate Qwen/Qwen3-8B --gpus 1xRTX4090"
    capped = plan("Qwen3-8B --gpus 2xRTX4090 --max-memory 0=20GB,1=20GB")[1]["simulate"]
    assert weft(*shlex.split(capped)[1:], *rate)[0] == 0


def test_provenance_reads_estimate() -> None:
    """Nobody trusts a plan that says how little was looked up in words of its authors."""
    packages = ("weft.checkpoint", "weft.machine.hardware", "weft.planner")
    shipped = [path for package in packages for path in files(package).joinpath("data").iterdir() if path.is_file()]
    pages = [Path(__file__).parents[3] / "docs" / name for name in ("planner-accuracy.md", "hardware.md")]
    for file in (*shipped, *pages):
        text = file.read_text(encoding="utf-8")
        for words in ("unverified", "project began with"):
            assert words not in text, (file.name, words)


def test_the_table() -> None:
    status, out, err = run("Qwen2.5-32B-Instruct", "--gpus", "1xRTXA6000+1xRTX4090", "--price", "0.5")
    assert status == 0 and err == ""
    for word in ("GPU 0 RTX A6000", "GPU 1 RTX 4090", "layers", "KV heads", "weights", "free", "TTFT", "$/M"):
        assert word in out, word
    assert "bottleneck: " in out and "rejected:" in out
    found = plan("Qwen2.5-32B-Instruct --gpus 1xRTXA6000+1xRTX4090 --price 0.5")[1]
    assert found["advice"] and all(change in out for change in found["advice"])


def test_a_large_cluster_shows_each_kind_of_node() -> None:
    out = run("Llama-3.1-70B-Instruct", "--nodes", "16x8xH100", "--network", "400Gb")[1]
    assert "nodes 0-15, 16 alike: 8 GPUs" in out and out.count("H100-SXM, 85.5 GB") < 9


def test_a_large_mixed_cluster_shows_each_kind_of_gpu() -> None:
    out = run("Llama-3.1-8B", "--nodes", "2x8xH100+1x4xA100")[1]
    assert "GPUs 0-7 H100-SXM" in out and "node 2: 4 GPUs" in out and "GPUs 0-3 A100-80GB-SXM" in out


def test_saturated_tokens_are_told_alike() -> None:
    words = "Llama-3.1-8B --gpus 1xRTX4090 --concurrency Max"
    rate = f"{plan(words)[1]['best']['predicted']['saturated_tok_s']:,.0f}"
    out = run(*words.split())[1]
    assert f" {rate} tok/s " in out and f" {rate}\n" in out


def test_why_nothing_fits_is_said_once() -> None:
    status, out, _ = run("Llama-3.1-70B", "--gpus", "1xH100")
    found = plan("Llama-3.1-70B --gpus 1xH100")[1]
    assert status == 3 and "1 x H200-SXM" in out
    assert [it["code"] for it in found["rejected"]] == ["weights_too_large"]
    assert out.count(found["rejected"][0]["reason"]) == 1


def test_a_plan_tells_how_many_tokens_a_step_has() -> None:
    best = plan("Qwen3-8B --gpus 1xH200")[1]["best"]
    assert best["max_num_batched_tokens"] == 8192
    out = run("Qwen3-8B", "--gpus", "1xH200")[1]
    assert re.search(rf" 8,192 .*: {re.escape(best['max_num_batched_tokens_because'])}\n", out)
    others = plan("Qwen3-8B --gpus 1xH200 --engine vllm")[1]["best"]
    assert others["max_num_batched_tokens_because"] not in run("Qwen3-8B", "--gpus", "1xH200", "--engine", "vllm")[1]


def test_gpt_oss_is_told_of_its_own_checkpoint() -> None:
    found = plan("gpt-oss-120b --gpus 1xH100 --precision bf16 --engine vllm")[1]
    command = "weft plan openai/gpt-oss-120b --gpus 1xH100 --engine vllm --precision mxfp4"
    assert found["advice_codes"][0] == "smaller_checkpoint"
    assert found["advice"][0].startswith(f"try: {command} (") and "MXFP4" in found["advice"][0]
    assert "int4" not in str(found["advice"])


def test_advice_begins_with_compression_while_loading() -> None:
    found = plan("Llama-3.1-70B --gpus 1xH100")[1]
    lines = found["advice"]
    # Compression while loading comes before a checkpoint to be fetched.
    assert found["advice_codes"][:4] == ["compress_on_load"] * 2 + ["smaller_checkpoint"] * 2
    for line, flags in zip(lines, ("-q int4", "-q int8", "--precision fp8", "--precision int4"), strict=False):
        assert line.startswith(f"try: weft plan meta-llama/Llama-3.1-70B --gpus 1xH100 {flags} (")
    assert not any("not run" in line for line in lines[:4])


def test_advice_says_that_weft_does_not_run_the_architecture() -> None:
    """In every precision: neither what it would compress itself nor a checkpoint in one that it computes in."""
    words = "google/gemma-2-27b-it --gpus 1xRTX4090"
    found = plan(words)[1]
    assert {"compress_on_load", "smaller_checkpoint"} <= {*found["advice_codes"]}
    for engine, runs in (("weft", False), ("vllm", True)):
        found = plan(f"{words} --engine {engine}")[1]
        lines = [line for line in found["advice"] if line.startswith("try: ")]
        assert lines and {"does not run it yet" not in line for line in lines} == {runs}
    fits = plan("google/gemma-2-9b-it --gpus 1xH100")[1]
    (fewer,) = [line for code, line in zip(fits["advice_codes"], fits["advice"], strict=True) if code == "fewer_bits"]
    assert "does not run it yet" in fewer
    for line in plan("Llama-3.1-70B --gpus 1xH100 --engine vllm")[1]["advice"]:
        assert "GGUF" not in line and "not run" not in line


@pytest.mark.parametrize(
    ("words", "code", "figures"),
    [
        ("Qwen2.5-72B --gpus 2xRTX4090 --precision int4 --engine vllm", "padded_columns", "29,696"),
        ("Qwen2.5-72B --gpus 2xRTX4090 --precision int4 --engine weft", "int4_is_a_checkpoint", ""),
        ("Qwen2.5-72B --gpus 4xH100 --precision bf16 --engine vllm -tp 2", None, ""),
        ("Llama-3.1-70B --gpus 2xRTX4090 --precision int4 --engine vllm", None, ""),
        ("Qwen3-30B-A3B --gpus 4xRTX4090 --precision int4 --engine vllm -tp 4", "padded_columns", "768"),
        ("Qwen3-30B-A3B --gpus 4xRTX4090 --precision int4 --engine vllm -tp 4 -ep", None, ""),
        ("Meta-Llama-3-8B --gpus 1xH100 --input-len 9000", "request_too_long", "9,001"),
        ("Meta-Llama-3-8B --gpus 1xH100 --input-len 8000", None, ""),
    ],
)
def test_notes(words: str, code: str | None, figures: str) -> None:
    found = plan(words)[1]
    notes = {it: note for it, note in zip(found["note_codes"], found["notes"], strict=True) if it != "checkpoint"}
    assert list(notes) == [code] * (code is not None)
    if code is not None:
        assert figures in notes[code] and f"note: {notes[code]}" in run(*words.split())[1]


def test_the_flags_choices_are_the_planner_s() -> None:
    assert set(plan_flags.ENGINES) == set(engine_names())
    assert get_args(plan_flags.Objective) == OBJECTIVES
