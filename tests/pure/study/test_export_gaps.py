"""Differences between the plan that the user asked for and the exported plan: each is a Note with a code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pure.commands import parsed
from weft.checkpoint.architectures.registry import RUNNABLE
from weft.cli.plan import emit, plan
from weft.planner.note import Note
from weft.study.export.choice import choose_plan
from weft.study.export.targets import TARGETS

SLICE = "memory: 20GB, bandwidth: 777GB/s, tflops: {bf16: 121}, capability: 8.0"
COMMANDS = {
    "ollama Qwen2.5-32B-Instruct --gpus 4xRTX4090 --precision int4 -tp 1 -pp 2 -dp 2": ["precision_substituted"],
    "weft Llama-3.1-8B-Instruct --gpus 1xRTX3090 --kv-cache-dtype fp8": ["kv_cache_widened"],
    'vllm Qwen3-8B --gpus 1xRTX4090 --speculative-config {"model":"Qwen3-0.6B"}': ["speculation_left_out"],
    "vllm Qwen3-14B --gpus 1xRTX4090+1xRTX3060 --tensor-split 3,1 --max-model-len 2048": ["plan_replaced"],
    "vllm Qwen3-14B --gpus 1xRTX4090+1xRTX3060": ["uneven_cut_left_out"],
    "transformers Llama-3.3-70B-Instruct --gpus 4xA100 -tp 4": ["plan_replaced"],
    "weft gemma-2-2b-it --gpus 1xH100": ["planned_only"],
    "weft Qwen3-0.6B --gpus SLICE": ["mig_slice_unnamed"],
    "weft Qwen3-8B --gpus 1xRTX4090": [],
}


def exported_gaps(command: str) -> list[Note]:
    """The gaps of `weft plan --emit`; the first word of `command` is the target."""
    target, *words = command.split()
    arguments = parsed(["plan", *words, "--emit", target])
    model = plan.find_model(arguments.model, arguments.subject.source)
    choice = choose_plan(plan.build_question(arguments.subject, model), TARGETS[target])
    return list(emit.named_deployment(arguments, TARGETS[target], model, None, choice).gaps)


@pytest.fixture
def slice_file(tmp_path: Path) -> str:
    """A hardware file with one MIG slice."""
    file = tmp_path / "slice.yaml"
    file.write_text(f"nodes:\n- gpus:\n  - {{name: A100 MIG 3g.20gb, {SLICE}}}\n")
    return str(file)


def test_gaps_have_codes_and_wording(slice_file: str, golden: Callable[[str, str], None]) -> None:
    lines = []
    for command, codes in COMMANDS.items():
        gaps = exported_gaps(command.replace("SLICE", slice_file))
        assert [gap.code for gap in gaps] == codes, command
        lines += [f"$ weft plan --emit {command}", *(f"  {gap.code}: {gap}" for gap in gaps)]
    golden("gaps.txt", "\n".join(lines).replace(", ".join(RUNNABLE), "RUNNABLE") + "\n")
