"""Bytes that the planner predicts for ranks, beside those that the engine's ranks allocate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu import checkpoints, tiny
from tests.refusals import refuses
from weft.checkpoint.checkpoint import resolve
from weft.config import EngineConfig
from weft.engine.executors.inline import InlineExecutor
from weft.errors import PlanError
from weft.machine.hardware import host
from weft.machine.hardware.cluster import parse_gpus
from weft.machine.hardware.cpu import CpuSpeed
from weft.plan.layout import build_plan
from weft.plan.memory import Capacity, kv_blocks
from weft.plan.parallelism import Parallelism
from weft.plan.plan import Plan
from weft.planner.deployment import Workload, deploy
from weft.planner.execution.execution import plan_to_run
from weft.planner.execution.forecast import forecast_plan
from weft.planner.memory.activations import activation_bytes
from weft.planner.memory.footprint import footprint
from weft.planner.profiles import load_profile
from weft.probes.stored_speeds import Speeds

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp 3:1": {"tensor_split": (3, 1)},
    "tp3": {"tensor_parallel_size": 3},
    "pp2": {"pipeline_parallel_size": 2},
}
DEALT = {"enable_expert_parallel": True}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"tensor_parallel_size": 2, **DEALT},
    "dp2 x ep2": {"data_parallel_size": 2, **DEALT},
    "dp2 x tp2 x ep4": {"tensor_parallel_size": 2, "data_parallel_size": 2, **DEALT},
    "dp2 x moe-tp2": {"data_parallel_size": 2, "expert_parallel_size": 1, **DEALT},
    "pp2 x ep2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **DEALT},
    "dp2 x ep 2:1": {"tensor_split": (2, 1), "data_parallel_size": 2, **DEALT},
}


def started(plan: Plan) -> Sequence[Capacity]:
    """Reports of the ranks of a plan."""
    threads = torch.get_num_threads()
    executor = InlineExecutor()
    try:
        return executor.start(plan).ranks
    finally:
        executor.close()
        torch.set_num_threads(threads)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("dtype", "quantization", "precision"),
    [
        ("float32", "none", "fp32"),
        ("bfloat16", "none", "bf16"),
        ("bfloat16", "int8", "int8"),
        ("bfloat16", "int4", "q4_1"),
        ("bfloat16", "q4_0", "q4_0"),
        ("bfloat16", "q8_0", "q8_0"),
    ],
)
@pytest.mark.parametrize("cut", LAYOUTS)
def test_planned_bytes_are_the_allocated_ones(
    tmp_path: Path, cut: str, dtype: str, quantization: str, precision: str
) -> None:
    agree(str(tiny.write(tmp_path / "tiny")), cut, dtype, quantization, precision)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "recipe",
    ["qwen3-moe", "qwen3-moe-biased", "mixtral", "qwen2-moe", "gpt-oss", "gpt-oss-4", "gemma3", "gemma3-vision"],
)
@pytest.mark.parametrize("cut", LAYOUTS)
def test_planned_bytes_of_mixed_layers_are_the_allocated_ones(tmp_path: Path, cut: str, recipe: str) -> None:
    agree(str(checkpoints.make(recipe, tmp_path)), cut, "bfloat16", "none", "bf16")


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", ["qwen3-moe-biased", "mixtral-window", "qwen2-moe", "gpt-oss-4"])
@pytest.mark.parametrize("cut", EXPERT_LAYOUTS)
def test_planned_bytes_of_dealt_experts_are_the_allocated_ones(tmp_path: Path, cut: str, recipe: str) -> None:
    agree(str(checkpoints.make(recipe, tmp_path)), cut, "bfloat16", "none", "bf16")


@pytest.mark.parametrize("cut", [*LAYOUTS, *EXPERT_LAYOUTS])
def test_planned_bytes_of_experts_in_mxfp4_are_the_allocated_ones(tmp_path: Path, cut: str) -> None:
    folder = checkpoints.make("gpt-oss-mxfp4", tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    agree(str(folder), cut, "bfloat16", "auto", "mxfp4")


def agree(path: str, cut: str, dtype: str, quantization: str, precision: str) -> None:
    """Assert that ranks allocate what the planner says."""
    config = EngineConfig(
        model=path,
        load_format="dummy",
        dtype=dtype,
        quantization=quantization,
        device="cpu",
        kv_cache_memory_bytes=1 << 20,
        max_num_batched_tokens=256,
        max_num_seqs=32,
        **(LAYOUTS | EXPERT_LAYOUTS)[cut],
    )
    checkpoint = resolve(path, load_format="dummy")
    if cut == "tp3" and quantization not in ("none", "auto"):
        # Heads of 16: two ranks would share what is multiplied at once.
        with refuses(PlanError, "quantised-columns-off-grid", "columns 0 to 16", "32"):
            build_plan(config, checkpoint, host.probe_host())
        return
    plan = build_plan(config, checkpoint, host.probe_host())
    real = started(plan)
    kv = "fp32" if dtype == "float32" else "bf16"
    same = deploy(
        plan.shape,
        Parallelism(
            plan.tensor_parallel,
            expert_parallel=plan.expert_parallel,
            deals_experts=plan.data_parallel > 1,
            tensor_split=config.tensor_split or (),
            pipeline_split=tuple(
                len(place.layers) for place in plan.places[: plan.output_rank + 1 : plan.tensor_parallel]
            ),
            devices=tuple(range(len(plan.places))),
        ),
        precision=precision,
        kv_dtype=kv,
    )
    assert same.places == plan.places
    cluster, weft = parse_gpus(f"{len(plan.places)}xL4"), load_profile("weft")
    planned = footprint(plan.shape, same, cluster, weft, Workload(max_model_len=plan.max_model_len)).ranks
    for mine, theirs, place in zip(planned, real, plan.places, strict=True):
        assert mine.weights.total == theirs.weight_bytes
        assert mine.kv_block_bytes == theirs.block_bytes
        width = {"fp32": 4, "bf16": 2}[kv]
        mine_bytes = activation_bytes(plan.shape, place, 256, 32, weft, width, context=plan.max_model_len)
        assert mine_bytes == pytest.approx(theirs.activation_bytes, rel=0.1)


@pytest.mark.parametrize("how", ["ngram", "draft"])
@pytest.mark.parametrize("cut", ["whole", "tp2", "pp2"])
def test_planned_bytes_of_guessing_are_the_allocated_ones(tmp_path: Path, cut: str, how: str) -> None:
    """A draft model is held whole by the rank that samples, beside its share of the large one."""
    path = str(tiny.write(tmp_path / "tiny"))
    config = EngineConfig(
        model=path,
        load_format="dummy",
        dtype="float32",
        device="cpu",
        kv_cache_memory_bytes=1 << 20,
        max_num_batched_tokens=256,
        max_num_seqs=32,
        speculative_config={"method": "ngram"} if how == "ngram" else {"model": path},
        **LAYOUTS[cut],
    )
    here = host.probe_host()
    plan = plan_to_run(config, resolve(path, load_format="dummy"), here)
    found = forecast_plan(plan, here, Speeds(machine="", cpu=CpuSpeed(40e9, 0.3e12)))
    real = started(plan)
    assert found.weight_bytes == sum(rank.weight_bytes for rank in real)
    for planned, step, rank in zip(found.memory.ranks, found.step_bytes, real, strict=True):
        assert planned.kv_bytes_per_token * plan.block_size == rank.block_bytes
        assert planned.activation_bytes == step == pytest.approx(rank.activation_bytes, rel=0.1)
    assert found.kv_tokens == kv_blocks(plan, real) * plan.block_size
