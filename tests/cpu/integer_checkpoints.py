"""Checkpoints of bitsandbytes and of compressed-tensors' int-quantized, and what they stand for.

They are packed and read number by number, by the formulas of those who publish them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.tensor_index import expected_tensors

Tensors = dict[str, torch.Tensor]
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
# Sign, exponent and mantissa, of which the one below the smallest exponent is 1 / 16.
FP4 = [value / 12 * sign for sign in (1, -1) for value in (0, 1 / 16, 8, 12, 4, 6, 2, 3)]
TABLES = {"nf4": torch.tensor(NF4), "fp4": torch.tensor(FP4)}
NESTED_BLOCK = 256


@dataclass(frozen=True)
class Recipe:
    """Quantised weights. `table`: "nf4" or "fp4" in blocks of `block` numbers, whose scales may be `nested`; "" for 8
    bits, by `method`, of which `dims` are those of a matrix's scales. `left` are parts of the names of other layers."""

    method: str = "bitsandbytes"
    table: str = ""
    block: int = 64
    nested: bool = False
    dims: str = "channel"
    head: bool = False
    left: tuple[str, ...] = ()
    storage: torch.dtype = torch.uint8
    scales: torch.dtype = torch.float32
    config: dict[str, Any] = field(default_factory=dict)

    def quantises(self, name: str) -> bool:
        if not name.endswith("_proj.weight"):
            return self.head and name == "lm_head.weight"
        return not any(part in name for part in self.left)

    @property
    def quantization_config(self) -> dict[str, Any]:
        if self.method == "compressed-tensors":
            weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": self.dims, "dynamic": False}
            group = {"weights": weights, "targets": ["Linear"], **self.config}
            return {
                "quant_method": self.method,
                "format": "int-quantized",
                "config_groups": {"group_0": group},
                "ignore": ["lm_head", *(f"re:.*{part}.*" for part in self.left)],
            }
        skipped = [] if self.head else ["lm_head"]
        return {
            "quant_method": self.method,
            "load_in_4bit": bool(self.table),
            "load_in_8bit": not self.table,
            "bnb_4bit_quant_type": self.table or "fp4",
            "bnb_4bit_use_double_quant": self.nested,
            "llm_int8_threshold": 6.0,
            "llm_int8_skip_modules": [*skipped, *self.left] if self.left or self.head else None,
        } | self.config


TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
RECIPES = {
    "nf4": Recipe(table="nf4"),
    "nf4-nested": Recipe(table="nf4", nested=True, left=("o_proj",)),
    "fp4": Recipe(table="fp4", head=True),
    "fp4-nested-long": Recipe(table="fp4", nested=True, block=512, storage=torch.bfloat16),
    "llm-int8": Recipe(),
    "llm-int8-head": Recipe(head=True, left=("down_proj",)),
    "w8a8": Recipe("compressed-tensors", scales=torch.bfloat16, config={"input_activations": TOKEN}),
    "w8a8-tensor": Recipe(
        "compressed-tensors",
        dims="tensor",
        left=("layers.1.mlp",),
        config={"input_activations": TOKEN | {"strategy": "tensor", "dynamic": False}},
    ),
}


def write(folder: Path, shape: ModelShape, recipe: Recipe, config: dict[str, Any]) -> Tensors:
    """Random weights with a config.json of `config`; what each tensor of the model stands for."""
    generator = torch.Generator().manual_seed(5)
    tensors, truth = {}, {}
    for name, dims in expected_tensors(shape):
        weight = torch.randn(dims, generator=generator) * (0.3 if name.endswith("bias") else 0.05)
        if name.endswith("norm.weight"):
            weight = weight + 1
        if recipe.quantises(name):
            made = parts(name, weight, recipe)
            tensors |= made
            truth[name] = read(name, made, recipe, dims)
        else:
            tensors[name] = truth[name] = weight.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = config | {"torch_dtype": "bfloat16", "quantization_config": recipe.quantization_config}
    (folder / "config.json").write_text(json.dumps(written))
    return {name: values.float() for name, values in truth.items()}


def parts(name: str, weight: torch.Tensor, recipe: Recipe) -> Tensors:
    """The tensors that a matrix is stored in."""
    if recipe.table:
        return _four_bits(name, weight, recipe)
    layer = name.removesuffix("weight")
    most = weight.abs().amax(1, keepdim=True) if recipe.dims == "channel" else weight.abs().amax().view(1)
    if recipe.method == "bitsandbytes":
        numbers = (weight / most * 127).round().to(torch.int8)
        return {name: numbers, layer + "SCB": most[:, 0], layer + "weight_format": torch.tensor(0, dtype=torch.uint8)}
    scale = (most / 127).to(recipe.scales)
    numbers = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    made = {name: numbers, layer + "weight_scale": scale}
    if not recipe.config["input_activations"]["dynamic"]:
        made[layer + "input_scale"] = torch.tensor([0.02])
    return made


def _four_bits(name: str, weight: torch.Tensor, recipe: Recipe) -> Tensors:
    flat, table = weight.flatten(), TABLES[recipe.table]
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % recipe.block)).view(-1, recipe.block)
    absmax = blocks.abs().amax(1)
    state: dict[str, Any] = {
        "quant_type": recipe.table,
        "blocksize": recipe.block,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
    }
    made = {name + ".absmax": absmax, name + ".quant_map": table.clone()}
    if recipe.nested:
        offset = absmax.mean()
        coded = torch.linspace(-1, 1, 256)
        groups = (absmax - offset).split(NESTED_BLOCK)
        largest = torch.stack([group.abs().max() for group in groups])
        places = [
            (group / most).unsqueeze(1).sub(coded).abs().argmin(1) for group, most in zip(groups, largest, strict=True)
        ]
        made[name + ".absmax"] = torch.cat(places).to(torch.uint8)
        made |= {name + ".nested_absmax": largest, name + ".nested_quant_map": coded.clone()}
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(offset)}
    scales = _scales(name, made, state)
    numbers = (blocks / scales[:, None]).unsqueeze(2).sub(table).abs().argmin(2).flatten()[: len(flat)]
    octets = (numbers[0::2] << 4 | numbers[1::2]).to(torch.uint8)
    made[name] = octets.view(recipe.storage)[:, None]
    text = json.dumps(state).encode()
    made[f"{name}.quant_state.bitsandbytes__{recipe.table}"] = torch.tensor(list(text), dtype=torch.uint8)
    return made


def _scales(name: str, made: Tensors, state: dict[str, Any]) -> torch.Tensor:
    absmax = made[name + ".absmax"]
    if absmax.dtype == torch.float32:
        return absmax
    outer = made[name + ".nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(absmax)]
    return made[name + ".nested_quant_map"][absmax.long()] * outer + state["nested_offset"]


def read(name: str, made: Tensors, recipe: Recipe, dims: tuple[int, ...]) -> torch.Tensor:
    """[rows, cols] float32, each number by its own formula."""
    if recipe.table:
        text = bytes(made[f"{name}.quant_state.bitsandbytes__{recipe.table}"].tolist())
        state, octets = json.loads(text), made[name].view(torch.uint8).flatten()
        flat = torch.arange(dims[0] * dims[1])
        number = octets[flat // 2] >> (4 * (1 - flat % 2)).to(torch.uint8) & 15
        scale = _scales(name, made, state)[flat // state["blocksize"]]
        return (made[name + ".quant_map"][number.long()] * scale).view(dims)
    layer = name.removesuffix("weight")
    if recipe.method == "bitsandbytes":
        return made[name].float() * (made[layer + "SCB"] / 127)[:, None]
    return made[name].float() * made[layer + "weight_scale"].float()
