"""What the planner says that ranks hold, beside what the engine's own allocate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu import checkpoints, tiny
from tests.refusals import refuses
from weft.config import EngineConfig
from weft.errors import PlanError
from weft.executors.inline import InlineExecutor
from weft.formats.checkpoint import resolve
from weft.hardware import host
from weft.hardware.cluster import parse_gpus
from weft.hardware.cpu import CpuSpeed
from weft.plan.layout import build_plan
from weft.plan.memory import Capacity, kv_blocks
from weft.plan.plan import Plan
from weft.planner.deployment import Workload, deploy
from weft.planner.execution import plan_to_run
from weft.planner.footprint import activation_bytes, footprint
from weft.planner.forecast import forecast_plan
from weft.planner.profiles import load_profile
from weft.probes.speeds import Speeds

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp 3:1": {"tensor_split": (3, 1)},
    "tp3": {"tensor_parallel_size": 3},
    "pp2": {"pipeline_parallel_size": 2},
}


def started(plan: Plan) -> Sequence[Capacity]:
    """What the ranks of a plan report."""
    threads = torch.get_num_threads()
    executor = InlineExecutor()
    try:
        return executor.start(plan).ranks
    finally:
        executor.close()
        torch.set_num_threads(threads)


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


@pytest.mark.parametrize("recipe", ["qwen3-moe", "qwen3-moe-biased", "gemma3", "gemma3-vision"])
@pytest.mark.parametrize("cut", LAYOUTS)
def test_planned_bytes_of_mixed_layers_are_the_allocated_ones(tmp_path: Path, cut: str, recipe: str) -> None:
    agree(str(checkpoints.make(recipe, tmp_path)), cut, "bfloat16", "none", "bf16")


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
        **LAYOUTS[cut],
    )
    checkpoint = resolve(path, load_format="dummy")
    if cut == "tp3" and quantization != "none":
        # Heads of 16: two ranks would share what is multiplied at once.
        with refuses(PlanError, "quantised-columns-off-grid", "columns 0 to 16", "32"):
            build_plan(config, checkpoint, host.probe_host())
        return
    plan = build_plan(config, checkpoint, host.probe_host())
    real = started(plan)
    kv = "fp32" if dtype == "float32" else "bf16"
    same = deploy(
        plan.shape,
        tensor_weights=LAYOUTS[cut].get("tensor_split", (1.0,) * plan.tensor_parallel),
        stage_layers=[len(place.layers) for place in plan.places if place.tp_rank == 0],
        gpus=range(len(plan.places)),
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
        assert activation_bytes(plan.shape, place, 256, 32, weft, width) == pytest.approx(
            theirs.activation_bytes, rel=0.1
        )


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
