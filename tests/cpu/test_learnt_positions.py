"""OPT and GPT-2: their files' names, the layouts in which they are served elsewhere, lengths, plans and bad input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu import checkpoints
from tests.cpu.layouts import LAYOUTS, plan_for
from tests.cpu.test_parity import NEW, PROMPTS, greedy
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.quantised.precision import weight_bytes
from weft.errors import ConfigError, ModelError

pytestmark = pytest.mark.usefixtures("small_caches")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("positions")


@pytest.fixture(scope="module")
def gpt2(folder: Path) -> Path:
    return checkpoints.make("gpt2", folder)


@pytest.fixture(scope="module")
def opt(folder: Path) -> Path:
    return checkpoints.make("opt", folder)


def rewrite(path: Path, to: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """A checkpoint like that of `path` with these tensors, and `config` over its own."""
    to.mkdir()
    save_file({name: value.contiguous() for name, value in tensors.items()}, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | config))
    return to


def tokens_of(path: Path, **layout: Any) -> list[list[int]]:
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True, executor="inline", **layout) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
        planned = [llm.plan.weight_bytes(row["rank"]) for row in llm.layout()]
        assert [row["weight_bytes"] for row in llm.layout()] == planned
    return [output.outputs[0].token_ids for output in outputs]


def truth_of(path: Path) -> list[list[int]]:
    model = checkpoints.reference(path)
    return [greedy(model, prompt, NEW) for prompt in PROMPTS]


def test_opt_on_four_ranks(opt: Path) -> None:
    assert tokens_of(opt, tensor_parallel_size=4) == truth_of(opt)


def test_gpt2_on_four_ranks_in_two_stages(gpt2: Path) -> None:
    assert tokens_of(gpt2, tensor_parallel_size=4, pipeline_parallel_size=2) == truth_of(gpt2)


@pytest.mark.parametrize("layout", ["tp2 x pp2", "pp 1,3,1"])
def test_opt_with_norms_of_the_residual_and_a_projected_embedding(tmp_path: Path, layout: str) -> None:
    path = checkpoints.make("opt-post-norm", tmp_path)
    assert tokens_of(path, **LAYOUTS[layout]) == truth_of(path)


def test_gpt2_as_it_was_published_has_no_prefix_and_a_mask_in_each_layer(gpt2: Path, tmp_path: Path) -> None:
    tensors = load_file(gpt2 / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128).tril() for layer in range(checkpoints.LAYERS)}
    path = rewrite(gpt2, tmp_path / "bare", bare | masks)
    assert tokens_of(path, tensor_parallel_size=2) == truth_of(gpt2)


def test_opt_without_the_outer_module(opt: Path, tmp_path: Path) -> None:
    tensors = load_file(opt / "model.safetensors")
    path = rewrite(opt, tmp_path / "inner", {name.removeprefix("model."): value for name, value in tensors.items()})
    assert resolve(str(path)).shape == resolve(str(opt)).shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_planner_counts_every_byte(folder: Path, opt: Path, gpt2: Path, layout: str) -> None:
    for path in (opt, gpt2, checkpoints.make("opt-post-norm", folder / layout)):
        plan = plan_for(path, layout, dtype="bfloat16")
        for place in plan.places:
            assert weight_bytes(plan.shape, "bf16", place) == plan.weight_bytes(place.rank)


def test_no_text_is_longer_than_the_table(opt: Path, gpt2: Path) -> None:
    for path in (opt, gpt2):
        with refuses(ConfigError, "beyond-model-length", "129", "128"):
            plan_for(path, "whole", max_model_len=129)


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("transformer.wpe.weight", (127, 48)),
        ("transformer.h.1.attn.c_attn.weight", (144, 48)),  # not transposed
        ("transformer.h.2.mlp.c_fc.bias", (191,)),
    ],
)
def test_a_tensor_of_other_dims(gpt2: Path, tmp_path: Path, name: str, dims: tuple[int, ...]) -> None:
    tensors = load_file(gpt2 / "model.safetensors") | {name: torch.zeros(dims)}
    path = rewrite(gpt2, tmp_path / "wrong", tensors)
    own = name.removeprefix("transformer.")
    with refuses(ModelError, "tensor-of-other-dims", path / "model.safetensors", own, list(dims)):
        resolve(str(path))


def test_a_missing_tensor(opt: Path, tmp_path: Path) -> None:
    tensors = load_file(opt / "model.safetensors")
    name = "model.decoder.embed_positions.weight"
    del tensors[name]
    with refuses(ModelError, "missing-tensor", name):
        resolve(str(rewrite(opt, tmp_path / "less", tensors)))


@pytest.mark.parametrize(
    ("field", "value"),
    [("activation_function", "quick_gelu"), ("scale_attn_by_inverse_layer_idx", True), ("scale_attn_weights", False)],
)
def test_what_gpt2_does_not_compute(gpt2: Path, tmp_path: Path, field: str, value: object) -> None:
    path = rewrite(gpt2, tmp_path / "other", load_file(gpt2 / "model.safetensors"), **{field: value})
    with refuses(ModelError, "wrong-field-value", path / "config.json"):
        resolve(str(path))
