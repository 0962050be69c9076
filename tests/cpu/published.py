"""Checkpoints as GPTQ, AWQ and compressed-tensors publish them, and what they stand for.

They are packed number by number, and read again by the formulas of those who publish them, so that neither is what Weft
does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weft.checkpoint.architectures.published import ROW
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.tensor_index import expected_tensors

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # awq/modules/linear/gemm.py: which of eight numbers comes i-th


@dataclass(frozen=True)
class Recipe:
    """Quantisation of a model. `left` are parts of the names of unquantised layers; `ordered`: with desc_act."""

    method: str
    bits: int = 4
    group: int = 128  # -1 is a row
    symmetric: bool = False
    version: int = 1  # of GPTQ's format
    ordered: bool = False
    head: bool = False
    left: tuple[str, ...] = ()
    scales: torch.dtype = torch.float16
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        return ROW if self.group == -1 else self.group

    @property
    def offset(self) -> int:
        """Number that GPTQ's first format subtracts from zero points."""
        return int(self.version == 1)

    def quantises(self, name: str) -> bool:
        if not name.endswith("_proj.weight"):
            return self.head and name == "lm_head.weight"
        return not any(part in name for part in self.left)

    @property
    def quantization_config(self) -> dict[str, Any]:
        if self.method == "gptq":
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": self.group,
                "sym": self.symmetric,
                "desc_act": self.ordered,
                "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[self.version],
                "lm_head": self.head,
                "dynamic": {f"-:.*{part}.*": {} for part in self.left},
            } | self.config
        if self.method == "awq":
            return {
                "quant_method": "awq",
                "bits": self.bits,
                "group_size": self.group,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": list(self.left) or None,
            } | self.config
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if self.group == -1 else "group",
            "group_size": None if self.group == -1 else self.group,
            "actorder": "group" if self.ordered else None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"], "input_activations": None}},
            "ignore": [f"re:.*{part}.*" for part in self.left] + ([] if self.head else ["lm_head"]),
        } | self.config


RECIPES = {
    "gptq": Recipe("gptq", symmetric=True),
    "gptq-zeros": Recipe("gptq", group=32),
    "gptq-v2": Recipe("gptq", group=64, version=2),
    "gptq-rows": Recipe("gptq", group=-1),
    "gptq-int8": Recipe("gptq", bits=8, symmetric=True, head=True),
    "gptq-int8-zeros": Recipe("gptq", bits=8, group=32, left=("layers.1.mlp",)),
    "gptq-ordered": Recipe("gptq", group=64, ordered=True),
    "awq": Recipe("awq", left=("o_proj",)),
    "awq-32": Recipe("awq", group=32),
    "compressed": Recipe("compressed-tensors", symmetric=True, scales=torch.bfloat16),
    "compressed-zeros": Recipe("compressed-tensors", group=32, head=True, left=("down_proj",)),
    "compressed-int8": Recipe("compressed-tensors", bits=8, group=-1, symmetric=True, scales=torch.bfloat16),
    "compressed-int8-zeros": Recipe("compressed-tensors", bits=8, group=-1),
    "compressed-ordered": Recipe("compressed-tensors", group=128, symmetric=True, ordered=True),
}


def write(folder: Path, shape: ModelShape, recipe: Recipe, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights, quantised, with a config.json of `config`; what each tensor of the model stands for."""
    generator = torch.Generator().manual_seed(5)
    tensors, truth = {}, {}
    for name, dims in expected_tensors(shape):
        weight = torch.randn(dims, generator=generator) * (0.3 if name.endswith("bias") else 0.15)
        if name.endswith("norm.weight"):
            weight = weight + 1
        if recipe.quantises(name):
            made = parts(weight, recipe, generator)
            tensors |= {name.removesuffix("weight") + key: value.contiguous() for key, value in made.items()}
            truth[name] = read(made, recipe, dims)
        else:
            tensors[name] = truth[name] = weight.to(recipe.scales)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    dtype = str(recipe.scales).removeprefix("torch.")
    written = config | {"torch_dtype": dtype, "quantization_config": recipe.quantization_config}
    (folder / "config.json").write_text(json.dumps(written))
    return {name: values.float() for name, values in truth.items()}


def parts(weight: torch.Tensor, recipe: Recipe, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors that a matrix is stored in, by the last part of their names."""
    rows, cols = weight.shape
    most, width = 2**recipe.bits - 1, min(recipe.columns, cols)
    order = torch.arange(cols) // width
    if recipe.ordered and recipe.group != -1:
        order = order[torch.randperm(cols, generator=generator)]
    groups = int(order.max()) + 1
    numbers = torch.zeros(rows, cols, dtype=torch.int32)
    scales, zeros = torch.zeros(rows, groups), torch.zeros(rows, groups, dtype=torch.int32)
    for group in range(groups):
        some = weight[:, order == group]
        low, high = some.amin(1).clamp(max=0), some.amax(1).clamp(min=0)
        scale = (2 * some.abs().amax(1) if recipe.symmetric else high - low) / most
        scales[:, group] = scale = scale.to(recipe.scales).float()
        zero = torch.full_like(scale, 2 ** (recipe.bits - 1)) if recipe.symmetric else (-low / scale).round()
        zeros[:, group] = zero.clamp(0, most).int()
        numbers[:, order == group] = (some / scale[:, None] + zeros[:, group, None]).round().clamp(0, most).int()
    scales, bits = scales.to(recipe.scales), recipe.bits
    if recipe.method == "awq":
        return {
            "qweight": packed(numbers.T, bits, AWQ_ORDER),
            "qzeros": packed(zeros.T, bits, AWQ_ORDER),
            "scales": scales.T,
        }
    if recipe.method == "gptq":
        stored = zeros - recipe.offset & most
        return {
            "qweight": packed(numbers, bits).T,
            "qzeros": packed(stored.T, bits),
            "scales": scales.T,
            "g_idx": order.int(),
        }
    made = {"weight_packed": packed(numbers, bits), "weight_scale": scales, "weight_shape": torch.tensor([rows, cols])}
    if not recipe.symmetric:
        made["weight_zero_point"] = packed(zeros.T, bits).T
    if recipe.ordered:
        made["weight_g_idx"] = order.int()
    return made


def packed(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] to [n, m * bits / 32] int32: of each number after the other, by `order` where there is one. The last
    integer is filled up with zeros."""
    each = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % each))
    out = torch.zeros(numbers.shape[0], numbers.shape[1] // each, dtype=torch.int64)
    for word in range(out.shape[1]):
        for place in range(each):
            out[:, word] |= numbers[:, word * each + (order[place] if order else place)].long() << (bits * place)
    return out.where(out < 2**31, out - 2**32).int()


def read(made: dict[str, torch.Tensor], recipe: Recipe, dims: tuple[int, ...]) -> torch.Tensor:
    """[rows, cols] float32, each number by its own formula."""
    bits, each, most = recipe.bits, 32 // recipe.bits, 2**recipe.bits - 1
    row, col = torch.arange(dims[0])[:, None], torch.arange(dims[1])[None, :]
    group = col // min(recipe.columns, dims[1])
    if recipe.method == "compressed-tensors":
        # Numbers of a sign, stored with half their range added.
        half = 2 ** (bits - 1)
        number = (made["weight_packed"][row, col // each] >> bits * (col % each) & most) - half
        group = made["weight_g_idx"][col].long() if "weight_g_idx" in made else group
        zero = torch.zeros_like(number)
        if "weight_zero_point" in made:
            zero = (made["weight_zero_point"][row // each, group] >> bits * (row % each) & most) - half
        return (number - zero).float() * made["weight_scale"].float()[row, group]
    if recipe.method == "awq":
        place = torch.tensor([AWQ_ORDER.index(i) for i in range(8)])[row % 8]
        number = made["qweight"][col, row // 8] >> 4 * place & 15
        zero = made["qzeros"][group, row // 8] >> 4 * place & 15
        return (number - zero).float() * made["scales"].float()[group, row]
    group = made["g_idx"][col].long()
    number = made["qweight"][col // each, row] >> bits * (col % each) & most
    zero = (made["qzeros"][group, row // each] >> bits * (row % each)) + recipe.offset & most
    return (number - zero).float() * made["scales"].float()[group, row]
