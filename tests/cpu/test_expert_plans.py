"""Plans of mixtures of experts: the bytes that weft plan tells are those that ranks hold, and a plan's file runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.test_expert_layouts import make_mixture
from tests.pure.commands import weft_json
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.errors import ConfigError, PlanError

PROMPTS = [[3, 5, 7], [11, 13, 17, 19], [23, 29], [31, 37, 41, 43, 47]]
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ep2": ("-tp 2 -ep", {"tensor_parallel_size": 2}),
    "dp2 x ep2": ("-tp 1 -dp 2 -ep", {"data_parallel_size": 2}),
    "dp2 x tp2 x ep4": ("-tp 2 -dp 2 -ep", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    "dp2 x moe-tp2": (
        "-tp 1 -dp 2 -ep --expert-parallel-size 1",
        {"data_parallel_size": 2, "expert_parallel_size": 1},
    ),
    "dp2 x tp2 x ep2": (
        "-tp 2 -dp 2 -ep --expert-parallel-size 2",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "expert_parallel_size": 2},
    ),
    "pp2 x ep2": ("-tp 2 -pp 2 -ep", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "pp2 x dp2 x ep2": ("-tp 1 -pp 2 -dp 2 -ep", {"pipeline_parallel_size": 2, "data_parallel_size": 2}),
    "ep 2:1": ("--tensor-split 2,1 -ep", {"tensor_split": (2, 1)}),
    "dp2 x ep 2:1": ("--tensor-split 2,1 -dp 2 -ep", {"tensor_split": (2, 1), "data_parallel_size": 2}),
}
# Of the rows of LLM.layout() and of the ranks of a plan.
SPANS = ("first_layer", "layers", "first_q_head", "q_heads", "first_kv_head", "kv_heads", "first_expert", "experts")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of five experts, which divide evenly among no ranks."""
    return make_mixture(tmp_path_factory.mktemp("mixtures"), "five", num_experts=5)


def planned(model: Path, words: str) -> dict[str, Any]:
    """The JSON of weft plan on this machine's CPU."""
    status, plan = weft_json("plan", str(model), "--precision", "fp32", *words.split())
    assert status == 0, plan
    return plan


def start(**options: Any) -> LLM:
    usual = {"executor": "inline", "skip_tokenizer_init": True, "device": "cpu"}
    return LLM(**{**usual, **options})


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_file_runs_the_layout_that_it_tells(model: Path, tmp_path: Path, layout: str) -> None:
    words, fields = LAYOUTS[layout]
    plan = planned(model, words)
    best, file = plan["best"], tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    with start(plan=str(file), model=str(model)) as llm:
        rows, told = llm.layout(), answers(llm)
    ranks = best["ranks"]
    assert [[row[name] for name in SPANS] for row in rows] == [[rank[name] for name in SPANS] for rank in ranks]
    assert [row["replica"] for row in rows] == [rank["replica"] for rank in ranks]
    assert [row["weight_bytes"] for row in rows] == [rank["weight_bytes"] for rank in ranks]
    assert [row["kv_bytes"] for row in rows] == [rank["kv_bytes"] for rank in ranks]
    size = best["kv_tokens"] // best["data_parallel"]
    assert all(rank["kv_bytes"] == size * rank["kv_bytes_per_token"] for rank in ranks)
    # The same cut by flags, without a file.
    flags = {"enable_expert_parallel": True, "dtype": "float32", "kv_cache_memory_bytes": 1 << 20, **fields}
    with start(model=str(model), **flags) as llm:
        assert [[row[name] for name in (*SPANS, "weight_bytes")] for row in llm.layout()] == [
            [row[name] for name in (*SPANS, "weight_bytes")] for row in rows
        ]
        assert answers(llm) == told


@pytest.mark.parametrize(
    ("words", "name", "parts"),
    [
        ("-tp 2 -ep", "TP 2 x EP 2, fp32", 2),
        ("-tp 1 -dp 2 -ep", "DP 2 x EP 2, fp32", 2),
        ("-tp 2 -dp 2 -ep", "TP 2 x DP 2 x EP 4, fp32", 4),
        ("-tp 1 -dp 2 -ep --expert-parallel-size 1", "DP 2 x MoE TP 2, fp32", 1),
        ("-tp 2 -dp 2 -ep --expert-parallel-size 2", "TP 2 x DP 2 x EP 2 x MoE TP 2, fp32", 2),
        ("-tp 2", "TP 2, fp32", 1),
        ("-tp 1 -dp 2", "DP 2, fp32", 1),
    ],
)
def test_names_and_sizes_of_cuts(model: Path, words: str, name: str, parts: int) -> None:
    best = planned(model, words)["best"]
    assert (best["name"], best["expert_parallel"]) == (name, parts)
    assert best["enable_expert_parallel"] == ("-ep" in words)


def test_flags_that_contradict_a_plan_file(model: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps(planned(model, "-tp 1")))
    two.write_text(json.dumps(planned(model, "-tp 1 -dp 2 -ep")))
    for fields in (
        {"plan": str(one), "data_parallel_size": 2, "enable_expert_parallel": True},
        {"plan": str(one), "enable_expert_parallel": True},
        {"plan": str(two), "data_parallel_size": 3, "enable_expert_parallel": True},
        {"plan": str(two), "enable_expert_parallel": True, "expert_parallel_size": 1},
    ):
        with refuses(ConfigError, "flag-contradicts-plan"):
            start(model=str(model), **fields)


def test_a_plan_file_whose_experts_lie_elsewhere(model: Path, tmp_path: Path) -> None:
    plan = planned(model, "-tp 2 -ep")
    assert [rank["experts"] for rank in plan["best"]["ranks"]] == [3, 2]
    plan["best"]["ranks"][0]["experts"] = 2
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    with refuses(PlanError, "plan-spans-differ", "experts", "0-1", "0-2"):
        start(model=str(model), plan=str(file))


def test_an_engine_tells_its_attention_groups(model: Path) -> None:
    flags = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 20, "enable_expert_parallel": True}
    with start(model=str(model), data_parallel_size=2, expert_parallel_size=1, **flags) as llm:
        assert "data_parallel_size=2, expert_parallel_size=1" in repr(llm)
    with start(model=str(model), dtype="float32", kv_cache_memory_bytes=1 << 20) as llm:
        assert "expert_parallel_size" not in repr(llm) and "data_parallel_size" not in repr(llm)
