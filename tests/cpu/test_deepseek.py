"""DeepSeek's models and Kimi-K2: what Transformers' classes leave out, cuts of their heads, the cache of latents."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu import checkpoints, deepseek, layouts
from tests.cpu.layouts import logits_of, plan_for
from tests.cpu.test_parity import NEW, PROMPTS, greedy, reference_logits
from tests.log_events import logged
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.checkpoint.architectures.shape import LatentAttention
from weft.checkpoint.checkpoint import resolve
from weft.errors import ConfigError, ModelError

PARAMS = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
# Recipes, and fields of config.json that Transformers' classes do not read.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "V2, normalised": ("deepseek-v2", {"norm_topk_prob": True}),
    "V2, every second layer": ("deepseek-v2", {"moe_layer_freq": 2}),
    "V3": ("deepseek-v3", {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    "Kimi-K2": ("deepseek-v3", deepseek.KIMI),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "heads 3+2+1": {"tensor_split": (3, 2, 1)},
    "heads 3+2+1, pp 1,3,1": {"tensor_split": (3, 2, 1), "pipeline_split": (1, 3, 1)},
    "dp2 x ep2": {"data_parallel_size": 2, "enable_expert_parallel": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepseek")


@pytest.fixture(scope="module")
def third(folder: Path) -> Path:
    return checkpoints.make("deepseek-v3", folder)


@pytest.fixture(scope="module")
def lite(folder: Path) -> Path:
    return checkpoints.make("deepseek-v2-lite", folder)


def drop_unused(folder: Path) -> None:
    """Leave out experts of layers that have none, and give these layers an MLP."""
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        if layer % config.get("moe_layer_freq", 1):
            prefix = f"model.layers.{layer}.mlp."
            tensors = {name: value for name, value in tensors.items() if not name.startswith(prefix)}
            tensors |= {
                name.replace("layers.0.", f"layers.{layer}."): value.roll(layer)
                for name, value in tensors.items()
                if name.startswith("model.layers.0.mlp.")
            }
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, metadata={"format": "pt"})


def tokens_of(path: Path, **options: Any) -> list[list[int]]:
    with LLM(str(path), **{"dtype": "float32", "skip_tokenizer_init": True, "executor": "inline", **options}) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def truth_of(path: Path) -> list[list[int]]:
    model = checkpoints.reference(path)
    return [greedy(model, prompt, NEW) for prompt in PROMPTS]


OFTEN = ("whole", "tp2 x pp2")


@pytest.mark.parametrize("case", PUBLISHED)
@pytest.mark.parametrize(
    "layouts", [OFTEN, pytest.param([name for name in layouts.LAYOUTS if name not in OFTEN], marks=pytest.mark.long)]
)
def test_what_is_published_is_computed(tmp_path: Path, case: str, layouts: Sequence[str]) -> None:
    recipe, fields = PUBLISHED[case]
    path = deepseek.edit_config(checkpoints.make(recipe, tmp_path), **fields)
    drop_unused(path)
    prompt = PROMPTS[1]
    exact = torch.from_numpy(deepseek.Reference(path).logits(prompt))
    for layout in layouts:
        got = logits_of(plan_for(path, layout, dtype="float32"), prompt)
        assert (got - exact).abs().max() <= 1e-4 * exact.std(), layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_cut_unevenly(lite: Path, layout: str) -> None:
    with LLM(str(lite), dtype="float32", skip_tokenizer_init=True, executor="inline", **LAYOUTS[layout]) as llm:
        heads = [row["q_heads"] for row in llm.layout() if row["stage"] == 0]
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert heads == ([6, 6] if "dp2" in layout else [3, 2, 1])
    assert [output.outputs[0].token_ids for output in outputs] == truth_of(lite)


@pytest.mark.parametrize("heads", [1, 4])
def test_long_prompts_are_expanded_a_few_heads_at_a_time(
    lite: Path, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dims,) = plan_for(lite, "whole").shape.mixers
    assert isinstance(dims, LatentAttention)
    head_bytes = max(map(len, PROMPTS)) * 2 * (dims.nope_dim + dims.rope_dim) * 4
    monkeypatch.setattr("weft.plan.memory.EXPANDED_BYTES", heads * head_bytes)
    assert tokens_of(lite) == truth_of(lite)


def test_ranks_in_processes(third: Path) -> None:
    assert tokens_of(third, executor="processes", tensor_parallel_size=2) == truth_of(third)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_rounded_while_loading(folder: Path, quantization: str) -> None:
    """Nearly the same numbers in two ranks. What leads from latents to keys and values stays as it is."""
    path = checkpoints.make("deepseek-v3-wide", folder / quantization)
    plan = plan_for(path, "whole", quantization=quantization, dtype="float32")
    held = {name.split("self_attn.")[1] for name in plan.schemes if "self_attn" in name}
    assert held == {f"{name}.weight" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")}
    prompt = PROMPTS[1]
    options = {"quantization": quantization, "dtype": "float32"}
    whole, halves = (logits_of(plan_for(path, layout, **options), prompt) for layout in ("whole", "tp2"))
    rounding = (whole - reference_logits(path, torch.float32, prompt)).abs().mean()
    # The importance of columns, by which weights are rounded to 4 bits, differs in the last bits.
    assert 0 < rounding < whole.std() and (halves - whole).abs().mean() <= 0.2 * rounding


def test_latents_lie_whole_on_every_rank(third: Path) -> None:
    shape = plan_for(third, "whole").shape
    (latent,) = shape.mixers
    assert isinstance(latent, LatentAttention)
    per_token = (latent.kv_lora_rank + latent.rope_dim) * 4
    for layout, layers in {"whole": [5], "tp3": [5] * 3, "pp 1,3,1": [1, 3, 1]}.items():
        plan = plan_for(third, layout, dtype="float32")
        assert [plan.block_bytes(rank) for rank in range(len(layers))] == [
            plan.block_size * per_token * count for count in layers
        ]
    options = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 40_000}
    with LLM(str(third), dtype="float32", skip_tokenizer_init=True, executor="inline", **options) as llm:
        assert llm.num_blocks == 40_000 // llm.plan.block_bytes(0)
        assert [row["kv_bytes"] for row in llm.layout()] == [llm.num_blocks * llm.plan.block_bytes(0)] * 2


def test_the_layer_that_predicts_a_further_token_is_not_read(
    third: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its weights are there as published, and named once; a further layer of another kind is not the config's model."""
    tensors = load_file(third / "model.safetensors")
    last = {name: value for name, value in tensors.items() if name.startswith("model.layers.4.")}
    further = {name.replace("layers.4.", "layers.5."): value.clone() for name, value in last.items()}
    own = {"model.layers.5.eh_proj.weight": torch.zeros(48, 96), "model.layers.5.enorm.weight": torch.zeros(48)}
    config = (third / "config.json").read_text()
    for name, extra in {"published": further | own, "wrong": further}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        save_file(tensors | extra, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, "weft"):
        assert tokens_of(tmp_path / "published", tensor_parallel_size=2) == truth_of(third)
    assert logged(caplog, "layer-not-read") == [{"path": str(tmp_path / "published"), "layer": 5}]
    with refuses(ModelError, "more-layers-than-config", tmp_path / "wrong", "model.layers.5.", 5):
        resolve(str(tmp_path / "wrong"))


def test_a_cache_that_latents_cannot_have(third: Path) -> None:
    with refuses(ConfigError, "kv-cache-dtype-not-supported", "DeepseekV3ForCausalLM", "fp8", "--kv-cache-dtype"):
        plan_for(third, "whole", kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"topk_method": "best"}, ("topk_method", "best", "greedy")),
        ({"scoring_func": "tanh"}, ("scoring_func", "tanh", "sigmoid")),
        ({"n_group": 4}, ("n_group", 4, "6 experts")),
        ({"n_group": 6}, ("n_group", 6, "2 or more")),
        ({"topk_group": 4}, ("topk_group", 4, 3)),
        ({"topk_group": 1}, ("topk_group", 1, "2 experts", "takes 3")),
        ({"qk_rope_head_dim": 7}, ("qk_rope_head_dim", 7, "even")),
    ],
    ids=str,
)
def test_configs_that_cannot_be(
    tmp_path: Path, third: Path, fields: dict[str, Any], values: tuple[object, ...]
) -> None:
    (tmp_path / "config.json").write_text((third / "config.json").read_text())
    with refuses(ModelError, "wrong-field-value", *values):
        resolve(str(deepseek.edit_config(tmp_path, **fields)), load_format="dummy")
