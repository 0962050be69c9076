"""DeepSeek-V3 as it is published: latent attention, experts, and every large matrix in FP8 blocks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu import checkpoints, deepseek, fp8_checkpoints
from tests.cpu.layouts import LAYOUTS, logits_of, plan_for
from weft import LLM, SamplingParams

RECIPE = fp8_checkpoints.RECIPES["blocks"]
FIELDS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
PROMPT = list(range(3, 40))
GROUPS: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
OFTEN = ("whole", "tp3", "tp2 x pp2")


class Published(NamedTuple):
    """A checkpoint in FP8, and one in float32 that has the numbers which it stands for."""

    path: Path
    plain: Path


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    made = checkpoints.make("deepseek-v3-wide", tmp_path_factory.mktemp("published"))
    plain = made.with_name("plain")
    shutil.copytree(made, plain)
    stored: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(made / "model.safetensors").items():
        if "_proj" in name and tensor.dim() == 2:
            parts = fp8_checkpoints.parts(name, tensor, RECIPE)
            stored |= parts
            exact[name] = fp8_checkpoints.read(name, parts, RECIPE)
        else:
            stored[name] = exact[name] = tensor
    save_file(stored, made / "model.safetensors", metadata={"format": "pt"})
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | FIELDS))
    (made / "config.json").write_text(json.dumps(config | FIELDS | {"quantization_config": RECIPE.config}))
    return Published(made, plain)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.long] * (name not in OFTEN)) for name in LAYOUTS]
)
def test_logits_are_those_of_the_dequantised_weights(published: Published, layout: str) -> None:
    plan = plan_for(published.path, layout, dtype="float32", quantization="fp8")
    exact = torch.from_numpy(deepseek.Reference(published.plain).logits(PROMPT))
    error = (logits_of(plan, PROMPT) - exact).norm() / exact.norm()
    assert error <= 0.01
    # What leads from latents to keys and values is held in 16 bits or more, all else in 8.
    held = {name.rpartition("layers.")[2].partition(".")[2] for name in plan.schemes}
    assert not any("kv_b_proj" in name for name in held)
    assert any("kv_a_proj" in name for name in held) and any("experts" in name for name in held)


@pytest.mark.parametrize(
    "cut",
    [
        {},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"expert_parallel_size": 1}, marks=pytest.mark.long),
        pytest.param({"data_parallel_size": 1, "tensor_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=["dp2 x ep2", "dp2 x tp2 x ep4", "dp2 x moe-tp2", "ep2"],
)
def test_attention_groups_answer_as_one_rank_does(published: Published, cut: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers: list[list[list[int]]] = []
    for options in ({}, GROUPS | cut):
        settings = {"dtype": "float32", "quantization": "fp8", "skip_tokenizer_init": True, "executor": "inline"}
        with LLM(str(published.path), **settings, **options) as llm:
            outputs = llm.generate([PROMPT, [5, 6, 7]], params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
