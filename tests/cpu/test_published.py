"""Checkpoints of GPTQ, AWQ and compressed-tensors: kept bit for bit, in every layout, or said to be in 16 bits."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu import published
from tests.cpu.layouts import logits_of, plan_for
from tests.cpu.published import RECIPES, Recipe
from tests.refusals import has_values, refuses
from weft import LLM, SamplingParams
from weft.checkpoint.architectures.published import ORDERED
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.quantised.precision import held_precision, sum_by_kind
from weft.errors import ModelError
from weft.plan.fills import rank_fills
from weft.plan.plan import Plan
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.weights.load import allocate_parameters, fill_target, load_weights

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 165,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
PROMPT = list(range(3, 60))


@pytest.fixture(scope="module", params=RECIPES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def truth(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return written(folder / name, RECIPES[name])


def written(folder: Path, recipe: Recipe, **config: Any) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    shape = resolve(str(folder), load_format="dummy").shape
    return published.write(folder, shape, recipe, CONFIG | config)


def held(plan: Plan, truth: dict[str, torch.Tensor]) -> set[str]:
    """The tensors that the ranks hold quantised. All that they hold is the truth, in no more bytes than planned."""
    found = set()
    for place in plan.places:
        room = allocate_parameters(plan, place, CPU)
        load_weights(plan, place, room)
        assert sum(part.nbytes for part in room.values()) == plan.weight_bytes(place.rank)
        for fill in rank_fills(plan.shape, place):
            want = truth[fill.source][fill.rows.start : fill.rows.stop]
            want = want if fill.cols is None else want[:, fill.cols.start : fill.cols.stop]
            part = fill_target(room, fill)
            if isinstance(part, QuantisedWeight):
                found.add(fill.source)
                assert torch.equal(part.dequantise(), want), fill.source
            else:
                assert torch.equal(part, want.to(part.dtype)), fill.source
    return found


@pytest.mark.parametrize("layout", ["whole", "tp2", "tp 2:1", "pp2"])
def test_weights_are_kept_bit_for_bit(folder: Path, name: str, truth: dict[str, torch.Tensor], layout: str) -> None:
    recipe = RECIPES[name]
    plan = plan_for(folder / name, layout)
    assert plan.dtype == "bfloat16"
    wanted = {source for source in truth if recipe.quantises(source)}
    if recipe.left:  # one part of a merged parameter would keep the others
        assert 0 < len(wanted) < 14 + recipe.head
    assert held(plan, truth) == (set() if recipe.ordered else wanted)
    assert plan.quantization == ("none" if recipe.ordered else recipe.method)


@pytest.mark.parametrize("layout", ["whole", "tp 2:1"])
def test_dequantised_where_that_is_asked_for(
    folder: Path, name: str, truth: dict[str, torch.Tensor], layout: str
) -> None:
    plan = plan_for(folder / name, layout, quantization="none", dtype="float32")
    assert held(plan, truth) == set() and plan.quantization == "none"


def test_the_tensors_are_those_that_the_config_declares(
    folder: Path, name: str, truth: dict[str, torch.Tensor]
) -> None:
    """So a plan from afar counts what the engine will hold, and a dummy holds as much."""
    real, dummy = resolve(str(folder / name)), resolve(str(folder / name), load_format="dummy")
    assert real.shape == dummy.shape and real.quantised == dummy.quantised
    plan = plan_for(folder / name, "tp2")
    hollow = msgspec.structs.replace(plan, load_format="dummy")
    for place in plan.places:
        room = allocate_parameters(hollow, place, CPU)
        load_weights(hollow, place, room)
        assert sum(part.nbytes for part in room.values()) == plan.weight_bytes(place.rank)
        for part in room.values():
            if isinstance(part, QuantisedWeight):
                assert 0.01 < float(part.dequantise().std()) < 0.03
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_unordered_groups_are_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(folder / "told", RECIPES["gptq-ordered"])
    caplog.set_level(logging.INFO, "weft")
    plan = plan_for(folder / "told", "whole")
    (line,) = [record.message for record in caplog.records]
    has_values(line, "14 of 14", "bfloat16", "desc_act", "14 of INT4_64")
    assert plan.shape.published and plan.shape.published.scheme == "INT4_64" + ORDERED


def reference(truth: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of Transformers with the same weights, dequantised, in float32."""
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).float().eval()
    model.load_state_dict(truth)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


def test_logits_are_those_of_the_dequantised_weights(folder: Path, name: str, truth: dict[str, torch.Tensor]) -> None:
    want = reference(truth)
    exact = logits_of(plan_for(folder / name, "whole", quantization="none", dtype="float32"), PROMPT)
    assert (exact - want).abs().max() <= 1e-4 * want.std()
    for layout in ("whole", "tp2", "pp2") if name in ("gptq", "awq") else ("tp 2:1",):
        got = logits_of(plan_for(folder / name, layout), PROMPT)
        # Activations are rounded to bf16, and to 8 bits where weights are quantised.
        assert (got - want).abs().mean() <= 0.06 * want.std(), layout
        assert (got - want).abs().max() <= 0.5 * want.std(), layout


def test_a_layer_with_bits_of_its_own(tmp_path: Path) -> None:
    """GPTQModel's "dynamic": the tensors tell."""
    eight = Recipe("gptq", bits=8, group=64)
    truth = written(tmp_path, Recipe("gptq", group=64, config={"dynamic": {"+:.*down.*": {"bits": 8}}}))
    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(1)
    for layer in range(2):
        source = f"model.layers.{layer}.mlp.down_proj.weight"
        made = published.parts(truth[source], eight, generator)
        tensors |= {source.removesuffix("weight") + key: value.contiguous() for key, value in made.items()}
        truth[source] = published.read(made, eight, truth[source].shape)
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, "tp2")
    assert len(held(plan, truth)) == 14
    assert set(plan.schemes.values()) == {"INT4_64", "INT8_64"}


def test_columns_that_kernels_do_not_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An MLP of 176 columns is not cut in multiples of 32: it stays in 16 bits, and the planner counts it so."""
    recipe = Recipe("compressed-tensors", group=-1, symmetric=True)
    truth = written(tmp_path, recipe, intermediate_size=176)
    plan = plan_for(tmp_path, "tp2")
    assert held(plan, truth) == {name for name in truth if recipe.quantises(name) and "down_proj" not in name}
    (line,) = [record.message for record in caplog.records]
    has_values(line, "2 of 14", "bfloat16", "32", "2 of INT4_ROW_SYM")
    for place in plan.places:
        assert sum_by_kind(plan.shape, held_precision("int4"), place).total == plan.weight_bytes(place.rank)


def test_groups_that_were_never_set(tmp_path: Path) -> None:
    """compressed-tensors fills weight_g_idx with -1."""
    truth = written(tmp_path, Recipe("compressed-tensors", symmetric=True))
    tensors = load_file(tmp_path / "model.safetensors")
    source = "model.layers.0.mlp.down_proj."
    cols = truth[source + "weight"].shape[1]
    save_file(tensors | {source + "weight_g_idx": torch.full((cols,), -1).int()}, tmp_path / "model.safetensors")
    assert len(held(plan_for(tmp_path, "tp2"), truth)) == 14


@pytest.mark.parametrize("number", [-2, 4, 1 << 30])
def test_a_column_of_no_group(tmp_path: Path, number: int) -> None:
    written(tmp_path, Recipe("gptq", group=64))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.g_idx"][7] = number
    save_file(tensors, tmp_path / "model.safetensors")
    with refuses(ModelError, "column-group-out-of-range", "layers.1.self_attn.q_proj", number, "4 groups"):
        resolve(str(tmp_path))


def test_the_names_of_old_repositories(tmp_path: Path) -> None:
    """AutoGPTQ's quantize_config.json, beside a config.json that says nothing."""
    recipe = Recipe("gptq", group=64)
    truth = written(tmp_path, recipe)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "float16"}))
    names = ("self_attn.q_proj.qweight", "q_proj.weight", "quantization_config")
    with refuses(ModelError, "tensor-packed-differently", *names):
        resolve(str(tmp_path))
    own = {"bits": 4, "group_size": 64, "desc_act": False, "sym": False}
    (tmp_path / "quantize_config.json").write_text(json.dumps(own))
    assert len(held(plan_for(tmp_path, "whole"), truth)) == 14


def test_scales_that_float16_does_not_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe("compressed-tensors", group=64, symmetric=True, scales=torch.bfloat16)
    written(tmp_path, recipe)
    tensors = load_file(tmp_path / "model.safetensors")
    scale = tensors["model.layers.1.mlp.down_proj.weight_scale"]
    scale[3, 1] = 3.3e-6
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, "whole")
    caplog.clear()
    load_weights(plan, plan.places[0], allocate_parameters(plan, plan.places[0], CPU))
    (line,) = [record.message for record in caplog.records]
    has_values(line, "model.layers.1.mlp.down_proj.weight")
    scale[3, 1] = 1e6
    save_file(tensors, tmp_path / "model.safetensors")
    with refuses(ModelError, "scale-beyond-float16", "down_proj.weight", "999424", "65,504", "--quantization none"):
        load_weights(plan, plan.places[0], allocate_parameters(plan, plan.places[0], CPU))


def test_zero_points_that_are_not_in_the_middle(tmp_path: Path) -> None:
    written(tmp_path, Recipe("gptq", symmetric=False, config={"sym": True}))
    plan = plan_for(tmp_path, "whole")
    with refuses(ModelError, "uneven-zero-points", "q_proj.weight", "8", "sym"):
        load_weights(plan, plan.places[0], allocate_parameters(plan, plan.places[0], CPU))


def test_an_engine_runs_it(tmp_path: Path) -> None:
    """To the tokens of the weights dequantised, as far as those are likelier than others."""
    written(tmp_path, RECIPES["awq"])
    few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    common: dict[str, Any] = {"skip_tokenizer_init": True, "executor": "inline", "kv_cache_memory_bytes": 1 << 20}
    found = []
    for how in (
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"quantization": "none", "dtype": "float32"},
    ):
        with LLM(str(tmp_path), **common, **how) as llm:
            assert llm.plan.quantization == how.get("quantization", "awq")
            found.append(llm.generate({"prompt_token_ids": PROMPT[:8]}, few, use_tqdm=False)[0].outputs[0].token_ids)
    assert found[0] == found[1]
