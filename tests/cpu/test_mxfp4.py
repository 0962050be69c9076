"""Experts in MXFP4, as gpt-oss is published: kept in 4 bits, with the numbers of the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu import checkpoints
from tests.cpu.layouts import LAYOUTS, logits_of, plan_for
from tests.cpu.test_parity import NEW, PROMPTS, greedy
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.quantised.schemes import MXFP4_VALUES
from weft.errors import ModelError
from weft.plan.fills import rank_weight_bytes

KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def round_to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks [..., groups, 16] and scales [..., groups] uint8 of a weight [..., cols], and what they stand for."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    values = torch.tensor(MXFP4_VALUES)
    scaled = groups / torch.exp2(exponent)[..., None]
    number = (scaled[..., None] - values).abs().argmin(-1)
    blocks = (number[..., 0::2] | number[..., 1::2] << 4).to(torch.uint8)
    meant = (values[number] * torch.exp2(exponent)[..., None]).flatten(-2)
    return blocks, (exponent + 127).to(torch.uint8), meant


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same checkpoint with experts in MXFP4 and in bfloat16."""
    return publish_mxfp4(checkpoints.make("gpt-oss-mxfp4", tmp_path_factory.mktemp("mxfp4")))


def publish_mxfp4(wide: Path) -> tuple[Path, Path]:
    """Round the experts of a checkpoint of gpt-oss: a checkpoint with them in MXFP4, and `wide` with what they stand
    for."""
    small = wide.with_name("published")
    small.mkdir()
    tensors, packed = load_file(wide / "model.safetensors"), {}
    for name, value in list(tensors.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales, meant = round_to_mxfp4(value.mT)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = meant.mT.contiguous()
        else:
            packed[name] = tensors[name] = value.bfloat16()
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, small / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((wide / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}
    (small / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return small, wide


def test_transformers_reads_the_same_weights(folders: tuple[Path, Path]) -> None:
    """The file is as gpt-oss is published."""
    small, wide = (checkpoints.reference(folder, torch.bfloat16).state_dict() for folder in folders)
    assert small.keys() == wide.keys()
    assert all(torch.equal(small[name], wide[name]) for name in wide)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_agree_in_every_layout(folders: tuple[Path, Path], layout: str) -> None:
    """In float32, which expands the experts, and in bfloat16, which keeps them."""
    small, wide = folders
    exact, rounded = (transformers_logits(wide, dtype) for dtype in (torch.float32, torch.bfloat16))
    got = logits_of(plan_for(small, layout, dtype="float32"), PROMPTS[1])
    assert (got - exact).abs().max() <= 1e-4 * exact.std()
    plan = plan_for(small, layout)
    assert plan.dtype == "bfloat16" and set(plan.schemes.values()) == {"MXFP4"} and plan.quantization == "mxfp4"
    ours, theirs = (logits_of(plan, PROMPTS[1]) - exact).abs(), (rounded - exact).abs()
    assert ours.mean() <= 2 * theirs.mean() and ours.median() <= 1.5 * theirs.median()


def test_bytes_are_those_of_the_file(folders: tuple[Path, Path]) -> None:
    small, _ = folders
    plan = plan_for(small, "whole")
    stored = sum(tensor.nbytes for tensor in load_file(small / "model.safetensors").values())
    assert plan.weight_bytes(0) == stored == rank_weight_bytes(plan.shape, plan.places[0], "bfloat16", plan.schemes)


def test_tokens_equal(folders: tuple[Path, Path]) -> None:
    small, wide = folders
    model = checkpoints.reference(wide)
    truth = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    with LLM(str(small), dtype="float32", skip_tokenizer_init=True, executor="inline") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == truth


EXPERTS = "model.layers.2.mlp.experts."


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        ({"gate_up_proj_scales": None}, "matrix-without-scales", ["gate_up_proj_scales"]),
        ({"gate_up_proj_blocks": None}, "missing-tensor", [EXPERTS + "gate_up_proj", [6, 64, 192]]),
        ({"down_proj_scales": []}, "packed-part-of-other-dims", [EXPERTS + "down_proj"]),
        ({"down_proj_blocks": [6, 64, 2, 16]}, "packed-part-of-other-dims", [[6, 64, 2, 16], [6, 64, 3, 16]]),
        (
            {"down_proj_blocks": [5, 64, 3, 16], "down_proj_scales": [5, 64, 3]},
            "tensor-of-other-dims",
            [EXPERTS + "down_proj", [5, 64, 96], [6, 64, 96]],
        ),
        ({"down_proj_bias": [6, 63]}, "tensor-of-other-dims", [EXPERTS + "down_proj_bias", [6, 63], [6, 64]]),
    ],
    ids=str,
)
def test_experts_that_are_missing_or_misshapen(
    folders: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], code: str, values: list[object]
) -> None:
    tensors = load_file(folders[0] / "model.safetensors")
    for name, dims in change.items():
        old = tensors.pop(EXPERTS + name)
        if dims is not None:
            tensors[EXPERTS + name] = torch.zeros(dims, dtype=old.dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    with refuses(ModelError, code, *values):
        resolve(str(tmp_path))


def test_a_layer_without_experts_is_not_among_stacks(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The config says that a layer is dense, and the checkpoint has experts there."""
    config = json.loads((folders[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [1]}))
    (tmp_path / "model.safetensors").symlink_to(folders[1] / "model.safetensors")
    with refuses(ModelError, "missing-tensor", "model.layers.1.mlp.gate_proj.weight"):
        resolve(str(tmp_path))


def transformers_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = checkpoints.reference(folder, dtype)(torch.tensor([PROMPTS[1]])).logits[0]
    return logits.float()
