"""What the planner says that ranks hold, beside what the engine's own allocate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu import tiny
from weft.config import EngineConfig
from weft.errors import PlanError
from weft.executors.inline import InlineExecutor
from weft.facts import host
from weft.facts.checkpoint import resolve
from weft.facts.cluster import parse_gpus
from weft.planner.deployment import Workload, deploy
from weft.planner.footprint import activation_bytes, footprint
from weft.planner.layout import layout
from weft.planner.profiles import profile

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp 3:1": {"tensor_split": (3, 1)},
    "tp3": {"tensor_parallel_size": 3},
    "pp2": {"pipeline_parallel_size": 2},
}


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
    path = str(tiny.write(tmp_path / "tiny"))
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
        with pytest.raises(PlanError, match=r"columns 0 to 16 .* cut in multiples of 32"):
            layout(config, checkpoint, host.probe())
        return
    plan = layout(config, checkpoint, host.probe())
    threads = torch.get_num_threads()
    executor = InlineExecutor()
    try:
        real = executor.start(plan).ranks
    finally:
        executor.close()
        torch.set_num_threads(threads)

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
    cluster, weft = parse_gpus(f"{len(plan.places)}xL4"), profile("weft")
    planned = footprint(plan.shape, same, cluster, weft, Workload(max_model_len=plan.max_model_len)).ranks
    for mine, theirs, place in zip(planned, real, plan.places, strict=True):
        assert mine.weights.total == theirs.weight_bytes
        assert mine.kv_bytes_per_token * plan.block_size == theirs.block_bytes
        width = {"fp32": 4, "bf16": 2}[kv]
        assert activation_bytes(plan.shape, place, 256, 32, weft, width) == pytest.approx(
            theirs.activation_bytes, rel=0.1
        )
