"""Int4 and Int8 checkpoints of Qwen v1, as GPTQ packs them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cpu import published, qwen_v1
from tests.cpu.layouts import logits_of, plan_for
from tests.cpu.test_published import PROMPT, held
from weft.checkpoint.checkpoint import resolve

CONFIG = qwen_v1.CONFIG | {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "kv_channels": 32,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "torch_dtype": "float16",
}


@dataclass(frozen=True)
class Recipe(published.Recipe):
    """Quantisation of all matrices of the layers."""

    def quantises(self, name: str) -> bool:
        return name.endswith(".weight") and (".c_" in name or ".w1" in name or ".w2" in name)


RECIPES = {
    "int4": Recipe("gptq", group=32, symmetric=True),
    "int8": Recipe("gptq", bits=8, group=32, symmetric=True),
}


@pytest.fixture(scope="module", params=RECIPES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint, and what its tensors stand for."""
    path = tmp_path_factory.mktemp("gptq") / request.param
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    shape = resolve(str(path), load_format="dummy").shape
    return path, published.write(path, shape, RECIPES[request.param], CONFIG)


@pytest.mark.parametrize("layout", ["whole", "tp2", "tp 2:1", "pp2"])
def test_matrices_are_held_as_they_are_packed(checkpoint: tuple[Path, dict[str, torch.Tensor]], layout: str) -> None:
    path, truth = checkpoint
    plan = plan_for(path, layout)
    assert held(plan, truth) == {name for name in truth if RECIPES["int4"].quantises(name)}
    assert plan.quantization == "gptq"


@pytest.mark.parametrize("layout", ["whole", "tp2"])
def test_logits_are_those_of_what_is_packed(checkpoint: tuple[Path, dict[str, torch.Tensor]], layout: str) -> None:
    path, truth = checkpoint
    tensors = {name: value.numpy() for name, value in truth.items()}
    exact = qwen_v1.Reference(path, len(PROMPT), tensors).logits(PROMPT)
    got = logits_of(plan_for(path, layout, quantization="none", dtype="float32"), PROMPT).numpy()
    assert np.abs(got - exact).max() <= 1e-4 * exact.std()
    packed = logits_of(plan_for(path, layout, dtype="bfloat16"), PROMPT).numpy()
    assert np.corrcoef(packed.ravel(), exact.ravel())[0, 1] >= 0.999
