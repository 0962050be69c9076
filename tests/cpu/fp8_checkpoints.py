"""Checkpoints in FP8 as they are published, and what they stand for, by the formulas of those who publish them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.tensor_index import expected_tensors

LARGEST = 448.0  # of E4M3
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """FP8 weights. `block`: rows and columns that share a scale; 0 stands for all of them.

    `suffix` is that of the scales' names, `dims` what a scale per tensor or row is stored as; `inputs` adds scales of
    static activations; `left` are parts of the names of unquantised layers.
    """

    config: dict[str, Any]
    block: tuple[int, int] = (128, 128)
    suffix: str = "_scale_inv"
    dims: str = "two"  # "none" or "one" for a scale per tensor
    scales: torch.dtype = torch.float32
    inputs: bool = False
    left: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)

    def quantises(self, name: str) -> bool:
        return name.endswith("_proj.weight") and not any(part in name for part in self.left)


def compressed(strategy: str, inputs: dict[str, Any] | None, ignore: list[str], **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    activations = inputs and {"num_bits": 8, "type": "float", "symmetric": True, **inputs}
    group = {"weights": weights, "input_activations": activations, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
RECIPES = {
    "blocks": Recipe(DEEPSEEK),
    "blocks-left": Recipe(
        DEEPSEEK | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]},
        scales=torch.bfloat16,
        left=("layers.1.mlp",),
    ),
    "blocks-powers": Recipe(DEEPSEEK | {"scale_fmt": "ue8m0"}, scales=torch.float8_e8m0fnu),
    "narrow-blocks": Recipe(DEEPSEEK | {"weight_block_size": [64, 32]}, block=(64, 32)),
    "tensor": Recipe(PER_TENSOR, (0, 0), "_scale", "none", inputs=True),
    "tensor-dynamic": Recipe(PER_TENSOR | {"activation_scheme": "dynamic"}, (0, 0), "_scale", "one"),
    "fbgemm": Recipe(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head", "o_proj"]},
        (1, 0),
        "_scale",
        left=("o_proj",),
    ),
    "compressed-tensor": Recipe(
        compressed("tensor", {"strategy": "tensor", "dynamic": False}, ["lm_head"]),
        (0, 0),
        "_scale",
        "one",
        torch.bfloat16,
        inputs=True,
    ),
    "compressed-channel": Recipe(
        compressed("channel", {"strategy": "token", "dynamic": True}, ["lm_head", "re:.*layers.0.*down_proj"]),
        (1, 0),
        "_scale",
        scales=torch.bfloat16,
        left=("layers.0.mlp.down_proj",),
    ),
    "compressed-block": Recipe(
        compressed("block", {"strategy": "group", "group_size": 128, "dynamic": True}, ["lm_head"])
        | {"kv_cache_scheme": None},
        suffix="_scale",
    ),
}


def write(folder: Path, shape: ModelShape, recipe: Recipe, config: dict[str, Any]) -> Tensors:
    """Random weights in FP8, with a config.json of `config`; what each tensor of the model stands for."""
    generator = torch.Generator().manual_seed(5)
    tensors, truth = {}, {}
    for number, (name, dims) in enumerate(expected_tensors(shape)):
        weight = torch.randn(dims, generator=generator) * (0.3 if name.endswith("bias") else 0.05)
        if name.endswith("norm.weight"):
            weight = weight + 1
        if recipe.quantises(name):
            # Parts of a merged parameter have scales of very different sizes.
            made = parts(name, weight * (1, 0.3, 2)[number % 3], recipe)
            tensors |= made
            truth[name] = read(name, made, recipe)
        else:
            tensors[name] = truth[name] = weight.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = config | {"torch_dtype": "bfloat16", "quantization_config": recipe.config}
    (folder / "config.json").write_text(json.dumps(written))
    return {name: values.float() for name, values in truth.items()}


def expanded(scales: torch.Tensor, rows: int, cols: int, block: tuple[int, int]) -> torch.Tensor:
    """Scales [blocks of rows, blocks of columns] for each number: [rows, cols]."""
    return scales.repeat_interleave(block[0] or rows, 0)[:rows].repeat_interleave(block[1] or cols, 1)[:, :cols]


def parts(name: str, weight: torch.Tensor, recipe: Recipe) -> Tensors:
    """The tensors that a matrix is stored in."""
    rows, cols = weight.shape
    tall, wide = recipe.block[0] or rows, recipe.block[1] or cols
    blocks = [[band[:, c : c + wide] for c in range(0, cols, wide)] for band in weight.split(tall)]
    scales = torch.tensor([[float(block.abs().max()) / LARGEST for block in line] for line in blocks])
    if recipe.scales == torch.float8_e8m0fnu:
        scales = torch.exp2(scales.log2().ceil())
    scales = scales.to(recipe.scales)
    numbers = (weight / expanded(scales.float(), rows, cols, recipe.block)).clamp(-LARGEST, LARGEST)
    stored = {"two": scales, "one": scales.flatten(), "none": scales.flatten()[0] if scales.numel() == 1 else scales}
    made = {name: numbers.to(torch.float8_e4m3fn), name + recipe.suffix: stored[recipe.dims].contiguous()}
    if recipe.inputs:
        made[name.removesuffix("weight") + "input_scale"] = torch.tensor([0.02], dtype=recipe.scales)
    return made


def read(name: str, made: Tensors, recipe: Recipe) -> torch.Tensor:
    """A matrix, [rows, cols] float32."""
    rows, cols = made[name].shape
    scales = made[name + recipe.suffix].float()
    if recipe.dims != "two":
        return made[name].float() * scales
    return made[name].float() * expanded(scales, rows, cols, recipe.block)
