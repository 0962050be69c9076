"""bitsandbytes' and int-quantized checkpoints: held in every layout, and computed with as what they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu import integer_checkpoints
from tests.cpu.integer_checkpoints import RECIPES, Recipe
from tests.cpu.layouts import LAYOUTS, logits_of, plan_for
from tests.cpu.test_fp8 import MIXTURE, off, stacked
from tests.cpu.test_published import held
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.config import config_json
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.quantised.precision import held_precision, sum_by_kind, weight_bytes
from weft.errors import ConfigError, ModelError
from weft.plan.fills import rank_weight_bytes
from weft.ranks.weights.load import allocate_parameters, load_weights

pytestmark = pytest.mark.usefixtures("small_caches")

CPU = torch.device("cpu")
# Heads of 32 columns, of which some cuts fall inside blocks of 64.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 165,
    "hidden_size": 256,
    "intermediate_size": 448,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
# Rows of 288 and 352 columns: blocks of 64 numbers run over their ends.
UNEVEN = {"hidden_size": 288, "intermediate_size": 352}
PROMPT = list(range(3, 40))
TWO_LAYERS = [layout for layout in LAYOUTS if layout != "pp 1,3,1"]


@pytest.fixture(scope="module", params=RECIPES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("integers")


@pytest.fixture(scope="module")
def truth(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return written(folder / name, RECIPES[name])


def written(folder: Path, recipe: Recipe, **config: Any) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    shape = resolve(str(folder), load_format="dummy").shape
    return integer_checkpoints.write(folder, shape, recipe, CONFIG | config)


def reference(truth: dict[str, torch.Tensor], **config: Any) -> torch.Tensor:
    """Logits of Transformers with the same weights, dequantised, in float32."""
    import transformers

    if "num_experts" in config:
        wanted = transformers.Qwen3MoeConfig(**{**CONFIG, **config}, attn_implementation="eager")
        model: Any = transformers.Qwen3MoeForCausalLM(wanted)
        truth = stacked(truth, config["num_experts"])
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG | config))
    model.float().eval().load_state_dict(truth)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


@pytest.mark.each_value
@pytest.mark.parametrize("layout", TWO_LAYERS)
def test_numbers_are_held_everywhere(folder: Path, name: str, truth: dict[str, torch.Tensor], layout: str) -> None:
    recipe = RECIPES[name]
    plan = plan_for(folder / name, layout)
    assert held(plan, truth) == {source for source in truth if recipe.quantises(source)}
    assert plan.quantization == recipe.method and plan.dtype == "bfloat16"
    precision = "int4" if recipe.table else "int8"
    for place in plan.places:
        assert plan.weight_bytes(place.rank) == sum_by_kind(plan.shape, held_precision(precision), place).total


@pytest.mark.parametrize("layout", ["whole", "tp 2:1"])
def test_dequantised_where_that_is_asked_for(
    folder: Path, name: str, truth: dict[str, torch.Tensor], layout: str
) -> None:
    plan = plan_for(folder / name, layout, quantization="none", dtype="float32")
    assert held(plan, truth) == set() and plan.quantization == "none"


def test_the_config_alone_tells_as_much(folder: Path, name: str, truth: dict[str, torch.Tensor]) -> None:
    """A dummy holds as much as the engine will; both plan the same."""
    real, dummy = resolve(str(folder / name)), resolve(str(folder / name), load_format="dummy")
    recipe = RECIPES[name]
    if recipe.block == 64:  # which a config cannot tell
        assert real.shape == dummy.shape and real.quantised == dummy.quantised
    plan = msgspec.structs.replace(plan_for(folder / name, "tp3"), load_format="dummy")
    for place in plan.places:
        room = allocate_parameters(plan, place, CPU)
        load_weights(plan, place, room)
        assert sum(part.nbytes for part in room.values()) == plan.weight_bytes(place.rank)
        assert all(0.01 < float(part.dequantise().std()) < 0.03 for part in room.values() if hasattr(part, "scheme"))


def test_bytes_in_the_file() -> None:
    """Blocks of 64 numbers in 4 bits have 4 bytes of a scale each, or one byte and 4 for 256 of them."""
    shape = {}
    for nested in (False, True):
        config = RECIPES["nf4"].quantization_config | {"bnb_4bit_use_double_quant": nested}

        fields = Fields(CONFIG | {"quantization_config": config, "torch_dtype": "bfloat16"}, "config.json")
        shape[nested] = config_json.shape_from_config(fields)
    numbers = 2 * 256 * (256 * 2 + 128 * 2 + 448 * 3)
    wide = weight_bytes(msgspec.structs.replace(shape[False], published=None), "bf16")
    assert weight_bytes(shape[False], "int4") == wide - 2 * numbers + numbers // 2 + numbers // 16
    assert weight_bytes(shape[True], "int4") == pytest.approx(
        wide - 1.5 * numbers + numbers / 64 * (1 + 1 / 64), abs=64
    )


def test_logits_are_those_of_the_dequantised_weights(folder: Path, name: str, truth: dict[str, torch.Tensor]) -> None:
    """Nothing is lost but in activations, which are bfloat16 by default; in float32, next to nothing."""
    want, recipe = reference(truth), RECIPES[name]
    for layout in TWO_LAYERS:
        plan = plan_for(folder / name, layout, quantization=recipe.method, dtype="float32")
        assert len(plan.schemes) == sum(map(recipe.quantises, truth))
        assert (logits_of(plan, PROMPT) - want).abs().max() <= 1e-4 * want.std(), layout
        assert off(logits_of(plan_for(folder / name, layout), PROMPT), want) < 0.01, layout


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["whole", "tp 2:1", "pp2"])
@pytest.mark.parametrize("recipe", ["nf4-nested", "fp4", "fp4-nested-long", "llm-int8"])
def test_blocks_that_run_over_the_ends_of_rows(folder: Path, recipe: str, layout: str) -> None:
    """Scales are repeated for the parts of such blocks: nothing else changes."""
    path = folder / f"uneven-{recipe}"
    truth = written(path, RECIPES[recipe], **UNEVEN)
    plan = plan_for(path, layout)
    assert held(plan, truth) == {source for source in truth if RECIPES[recipe].quantises(source)}
    held_as = "SIGNED8_ROW" if recipe == "llm-int8" else f"{recipe[:3].upper()}_32"
    assert plan.schemes["model.layers.1.mlp.down_proj.weight"] == held_as
    for place in plan.places:
        assert plan.weight_bytes(place.rank) == rank_weight_bytes(plan.shape, place, "bfloat16", plan.schemes)


def test_columns_that_kernels_do_not_take(tmp_path: Path) -> None:
    """An MLP of 177 columns, of which some rows begin in the middle of a byte, is held in 16 bits."""
    recipe = RECIPES["nf4-nested"]
    truth = written(tmp_path, recipe, intermediate_size=177)
    wanted = {source for source in truth if recipe.quantises(source) and "down_proj" not in source}
    assert held(plan_for(tmp_path, "tp2"), truth) == wanted


@pytest.mark.parametrize("recipe", ["nf4", "llm-int8"])
def test_experts(folder: Path, recipe: str) -> None:
    path = folder / f"experts-{recipe}"
    truth = written(path, RECIPES[recipe], **MIXTURE)
    want = reference(truth, **MIXTURE)
    for cut in ({}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True}):
        plan = plan_for(path, "whole", quantization="bitsandbytes", dtype="float32", **cut)
        held(plan, truth)
        assert any(".experts." in source for source in plan.schemes)
        assert (logits_of(plan, PROMPT) - want).abs().max() <= 1e-4 * want.std()


def test_tokens_are_the_same_in_every_executor(folder: Path) -> None:
    written(folder / "run", RECIPES["nf4-nested"])
    few = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 20, "dtype": "float32"}
    tokens = []
    for how in (
        {"tensor_parallel_size": 2, "executor": "processes", "quantization": "bitsandbytes"},
        {"executor": "inline", "quantization": "none"},
    ):
        with LLM(str(folder / "run"), **options, **how) as llm:
            tokens.append(llm.generate({"prompt_token_ids": PROMPT[:8]}, few, use_tqdm=False)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


# --- load_in_8bit ---


@pytest.mark.parametrize(("word", "quantization"), [("load_in_8bit", "int8"), ("load_in_4bit", "int4")])
def test_weights_rounded_at_load(folder: Path, word: str, quantization: str) -> None:
    """Seed 001's keyword: weights are rounded as they are read, as --quantization has them."""
    path = folder / "wide"
    written(path, Recipe(left=("proj",)))
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"skip_tokenizer_init": True, "executor": "inline", "kv_cache_memory_bytes": 1 << 20}
    plans = []
    for how in ({word: True}, {"quantization": quantization}, {word: False}, {word: True, "quantization": "auto"}):
        with LLM(str(path), **options, **how) as llm:
            plans.append((llm.plan.quantization, llm.plan.schemes))
    assert plans[0] == plans[1] == plans[3] and plans[0][0] == quantization and plans[0][1]
    assert plans[2] == ("none", {})
    with refuses(ConfigError, "two-quantizations", word, "none"):
        LLM(str(path), **options, **{word: True, "quantization": "none"})


def test_both_words_at_once(folder: Path) -> None:
    with refuses(ConfigError, "two-quantizations", "load_in_8bit", "load_in_4bit"):
        LLM(str(folder), load_in_8bit=True, load_in_4bit=True)
    with refuses(ConfigError, "invalid-argument", "load_in_8bit", "'yes'"):
        LLM(str(folder), load_in_8bit="yes")


# --- bad input ---

DOWN = "model.layers.1.mlp.down_proj.weight"
STATE = DOWN + ".quant_state.bitsandbytes__nf4"


def text(**change: Any) -> torch.Tensor:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [256, 448]} | change
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("recipe", "change", "code", "values"),
    [
        ("nf4", {STATE: None}, "matrix-without-quant-state", (DOWN,)),
        ("nf4", {STATE: text()[:-1]}, "bad-quant-state", (DOWN,)),
        ("nf4", {STATE: text(blocksize=48)}, "bad-quant-state", (DOWN, 48, 64)),
        ("nf4", {STATE: text(quant_type="af4")}, "bad-quant-state", (DOWN, "af4")),
        ("nf4", {STATE: text(shape=[256, 449])}, "packed-part-of-other-dims", (DOWN, "57,344", [256, 449])),
        ("nf4", {STATE: text(shape=[448, 256])}, "tensor-of-other-dims", (DOWN, [448, 256], [256, 448])),
        ("nf4", {DOWN + ".absmax": None}, "matrix-without-scales", (DOWN + ".absmax",)),
        ("nf4", {DOWN + ".absmax": torch.zeros(3)}, "packed-part-of-other-dims", (DOWN + ".absmax", [3], [1792])),
        ("nf4", {DOWN + ".absmax": None, STATE: None}, "matrix-without-scales", (DOWN,)),
        ("nf4", {DOWN + ".quant_map": torch.zeros(8)}, "packed-part-of-other-dims", (DOWN + ".quant_map", [8], [16])),
        ("nf4", {DOWN: None}, "missing-tensor", (DOWN,)),
        ("nf4-nested", {DOWN + ".nested_absmax": None}, "matrix-without-scales", (DOWN + ".nested_absmax",)),
        ("nf4-nested", {STATE: text()}, "bad-quant-state", (DOWN, "nested_blocksize")),
        ("llm-int8", {DOWN[:-6] + "SCB": None}, "matrix-without-scales", (DOWN, "down_proj.SCB")),
        ("llm-int8", {DOWN[:-6] + "SCB": torch.zeros(7)}, "packed-part-of-other-dims", ("SCB", [7], [256])),
        ("llm-int8", {DOWN[:-6] + "weight_format": torch.tensor(2).byte()}, "weight-format-not-read", ("down_proj", 2)),
        ("llm-int8", {DOWN: torch.zeros(256, 447).char()}, "tensor-of-other-dims", (DOWN, [256, 447], [256, 448])),
        ("w8a8", {DOWN + "_scale": None}, "matrix-without-scales", (DOWN, "down_proj.weight_scale")),
        (
            "w8a8",
            {DOWN + "_scale": torch.zeros(256).int()},
            "packed-part-of-other-dims",
            ("weight_scale", "I32", [256]),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parts_that_do_not_fit_together(
    folder: Path, tmp_path: Path, recipe: str, change: dict[str, Any], code: str, values: tuple[object, ...]
) -> None:
    written(folder / f"bad-{recipe}", RECIPES[recipe])
    tensors = load_file(folder / f"bad-{recipe}" / "model.safetensors")
    for source, value in change.items():
        tensors.pop(source)
        if value is not None:
            tensors[source] = value
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / f"bad-{recipe}" / "config.json").read_text())
    with refuses(ModelError, code, str(tmp_path / "model.safetensors"), *values):
        resolve(str(tmp_path))


def test_a_table_of_another_type(folder: Path, tmp_path: Path) -> None:
    written(tmp_path, RECIPES["nf4"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[DOWN + ".quant_map"] = integer_checkpoints.TABLES["fp4"]
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, "whole")
    with refuses(ModelError, "other-table", DOWN, "nf4"):
        load_weights(plan, plan.places[0], allocate_parameters(plan, plan.places[0], CPU))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, "af4"),
        (RECIPES["w8a8"].quantization_config | {"config_groups": {"g": {"weights": {"num_bits": 4}}}}, "4 bits"),
        (
            RECIPES["w8a8"].quantization_config
            | {"config_groups": {"g": {"weights": {"num_bits": 8, "strategy": "channel", "symmetric": False}}}},
            "zero points",
        ),
        (
            RECIPES["w8a8"].quantization_config
            | {"config_groups": {"g": {"weights": {"num_bits": 8, "strategy": "group"}}}},
            "a scale for each group",
        ),
    ],
)
def test_features_that_are_not_read(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    with refuses(ModelError, "quantization-not-read", named):
        resolve(str(tmp_path), load_format="dummy")
