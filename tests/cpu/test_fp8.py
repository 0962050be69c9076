"""Checkpoints in FP8: held number by number in 8 bits, in every layout, and computed with as what they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.cpu import fp8_checkpoints
from tests.cpu.fp8_checkpoints import DEEPSEEK, RECIPES, Recipe
from tests.cpu.layouts import LAYOUTS, logits_of, plan_for
from tests.cpu.test_published import held
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.quantised.precision import held_precision, sum_by_kind, weight_bytes
from weft.errors import ModelError, PlanError
from weft.plan.plan import Plan
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.weights.load import allocate_parameters, load_weights

pytestmark = pytest.mark.usefixtures("small_caches")
CPU = torch.device("cpu")
# Rows and columns that are no multiple of 128, in heads of 32: cuts fall inside blocks both ways.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 165,
    "hidden_size": 320,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PROMPT = list(range(3, 40))
TWO_LAYERS = [layout for layout in LAYOUTS if layout != "pp 1,3,1"]


@pytest.fixture(scope="module", params=RECIPES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


@pytest.fixture(scope="module")
def truth(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return written(folder / name, RECIPES[name])


def written(folder: Path, recipe: Recipe, **config: Any) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    shape = resolve(str(folder), load_format="dummy").shape
    return fp8_checkpoints.write(folder, shape, recipe, CONFIG | config)


def reference(truth: dict[str, torch.Tensor], **config: Any) -> torch.Tensor:
    """Logits of Transformers with the same weights, dequantised, in float32."""
    if "num_experts" in config:
        wanted = transformers.Qwen3MoeConfig(**{**CONFIG, **config}, attn_implementation="eager")
        model: Any = transformers.Qwen3MoeForCausalLM(wanted)
        truth = stacked(truth, config["num_experts"])
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG | config))
    model.float().eval().load_state_dict(truth)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


def stacked(truth: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """The weights of experts one after the other, as Transformers' modules have them."""
    whole = {name: value for name, value in truth.items() if ".experts." not in name}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        each = [
            {part: truth[f"{prefix}{expert}.{part}.weight"] for part in ("gate_proj", "up_proj", "down_proj")}
            for expert in range(experts)
        ]
        whole[prefix + "gate_up_proj"] = torch.stack([torch.cat((one["gate_proj"], one["up_proj"])) for one in each])
        whole[prefix + "down_proj"] = torch.stack([one["down_proj"] for one in each])
    return whole


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Size of the error, as a share of the logits."""
    return float((got - want).norm() / want.norm())


@pytest.mark.each_value
@pytest.mark.parametrize("layout", TWO_LAYERS)
def test_numbers_are_held_in_8_bits_everywhere(
    folder: Path, name: str, truth: dict[str, torch.Tensor], layout: str
) -> None:
    recipe = RECIPES[name]
    plan = plan_for(folder / name, layout)
    assert held(plan, truth) == {source for source in truth if recipe.quantises(source)}
    assert plan.quantization == recipe.config["quant_method"] and plan.dtype == "bfloat16"
    for place in plan.places:
        assert plan.weight_bytes(place.rank) == sum_by_kind(plan.shape, held_precision("fp8"), place).total


@pytest.mark.parametrize("layout", ["whole", "tp 2:1"])
def test_dequantised_where_that_is_asked_for(
    folder: Path, name: str, truth: dict[str, torch.Tensor], layout: str
) -> None:
    plan = plan_for(folder / name, layout, quantization="none", dtype="float32")
    assert held(plan, truth) == set() and plan.quantization == "none"


def test_the_config_alone_tells_as_much(folder: Path, name: str, truth: dict[str, torch.Tensor]) -> None:
    """A plan from afar counts the bytes of the file, and a dummy holds as much as the engine will."""
    real, dummy = resolve(str(folder / name)), resolve(str(folder / name), load_format="dummy")
    assert real.shape == dummy.shape and real.quantised == dummy.quantised
    stored = load_file(folder / name / "model.safetensors")
    inputs = sum(tensor.nbytes for source, tensor in stored.items() if source.endswith("input_scale"))
    scales = sum(tensor.numel() * (4 - tensor.itemsize) for key, tensor in stored.items() if "weight_scale" in key)
    assert weight_bytes(real.shape, "fp8") == sum(tensor.nbytes for tensor in stored.values()) - inputs + scales
    plan = msgspec.structs.replace(plan_for(folder / name, "tp3"), load_format="dummy")
    for place in plan.places:
        room = allocate_parameters(plan, place, CPU)
        load_weights(plan, place, room)
        assert sum(part.nbytes for part in room.values()) == plan.weight_bytes(place.rank)
        for part in room.values():
            if isinstance(part, QuantisedWeight):
                assert 0.01 < float(part.dequantise().std()) < 0.03
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_logits_are_those_of_the_dequantised_weights(folder: Path, name: str, truth: dict[str, torch.Tensor]) -> None:
    """Nothing is lost but in activations, which are bfloat16 by default; in float32, next to nothing."""
    want = reference(truth)
    for layout in TWO_LAYERS:
        plan = plan_for(folder / name, layout, quantization="fp8", dtype="float32")
        assert len(plan.schemes) == sum(map(RECIPES[name].quantises, truth))
        assert (logits_of(plan, PROMPT) - want).abs().max() <= 1e-4 * want.std(), layout
    assert off(logits_of(plan_for(folder / name, "tp 2:1"), PROMPT), want) < 0.01


# --- experts ---

EXPERTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tp2": {"tensor_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "ep2 x pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True},
}
MIXTURES = ("blocks", "tensor", "compressed-channel")


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = folder / f"mixture-{request.param}"
    return path, written(path, RECIPES[request.param], **MIXTURE)


def test_experts_are_computed_in_8_bits(mixture: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, truth = mixture
    want = reference(truth, **MIXTURE)
    for layout, cut in EXPERTS.items():
        plan = plan_for(path, "whole", quantization="fp8", dtype="float32", **cut)
        held(plan, truth)
        assert any(".experts." in source for source in plan.schemes)
        assert (logits_of(plan, PROMPT) - want).abs().max() <= 1e-4 * want.std(), layout
    assert off(logits_of(plan_for(path, "whole"), PROMPT), want) < 0.02


GROUPS: list[dict[str, Any]] = [{}, {"tensor_parallel_size": 2}, {"expert_parallel_size": 1}]


def test_attention_groups_share_experts(mixture: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """dp2 x ep2, dp2 x tp2 x ep4 and dp2 x moe-tp2 beside one rank."""
    path, _ = mixture
    prompts = [PROMPT, PROMPT[5:20], PROMPT[::2]]
    found = []
    both = {"data_parallel_size": 2, "enable_expert_parallel": True}
    for cut in ({}, *(both | more for more in GROUPS)):
        options: dict[str, Any] = {"quantization": "fp8", "dtype": "float32", "executor": "inline", **cut}
        with LLM(str(path), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22, **options) as llm:
            outputs = llm.generate(
                prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False
            )
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[1:] == [found[0]] * len(GROUPS)


# --- made while loading ---


def test_made_while_loading(tmp_path: Path) -> None:
    """With a scale for each row, whoever has which columns of it."""
    truth = written(tmp_path, Recipe({}, left=("proj",)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    want = reference(truth)
    found = []
    for layout in ("whole", "tp 2:1"):
        plan = plan_for(tmp_path, layout, quantization="fp8", dtype="float32")
        assert set(plan.schemes.values()) == {"FP8_ROW"} and len(plan.schemes) == 14
        found.append(logits_of(plan, PROMPT))
        narrow = plan_for(tmp_path, layout, quantization="fp8")
        for place in narrow.places:
            assert narrow.weight_bytes(place.rank) == sum_by_kind(plan.shape, held_precision("fp8"), place).total
    assert 0.01 < off(found[0], want) < 0.1
    assert off(found[1], found[0]) < 1e-4


# --- what is refused ---

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "code", "values"),
    [
        ("blocks", {"_scale_inv": None}, "matrix-without-scales", [QUERY, QUERY + "_scale_inv"]),
        ("tensor", {"_scale": None}, "matrix-without-scales", [QUERY, QUERY + "_scale"]),
        (
            "blocks",
            {"_scale_inv": torch.ones(3, 3)},
            "packed-part-of-other-dims",
            [QUERY, [256, 320], "F32", [3, 3], [256, 1], [2, 3]],
        ),
        ("tensor", {"_scale": torch.ones(2)}, "packed-part-of-other-dims", [QUERY, [2], [1], [256, 1]]),
        ("fbgemm", {"_scale": torch.ones(320, 1)}, "packed-part-of-other-dims", [QUERY, [320, 1], [256, 1]]),
        ("fbgemm", {"_scale": torch.ones(256, 1).int()}, "packed-part-of-other-dims", [QUERY, "I32", "F32 or BF16"]),
        ("tensor", {"": torch.ones(320, 320).to(torch.float8_e4m3fn)}, "tensor-of-other-dims", [QUERY, [320, 320]]),
        ("tensor", {"": torch.ones(256, 320).to(torch.float8_e5m2)}, "tensor-type-not-read", [QUERY, "F8_E5M2"]),
    ],
)
def test_matrices_that_are_misshapen(
    tmp_path: Path, name: str, change: dict[str, torch.Tensor | None], code: str, values: list[object]
) -> None:
    written(tmp_path, RECIPES[name])
    tensors = load_file(tmp_path / "model.safetensors")
    for suffix, value in change.items():
        if value is None:
            del tensors[QUERY + suffix]
        else:
            tensors[QUERY + suffix] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with refuses(ModelError, code, tmp_path / "model.safetensors", *values):
        resolve(str(tmp_path))


def test_a_weight_that_is_no_number(tmp_path: Path) -> None:
    written(tmp_path, RECIPES["tensor"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[QUERY].view(torch.uint8)[7, 9] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, "tp2")
    with refuses(ModelError, "weight-not-a-number", tmp_path / "model.safetensors", QUERY):
        for place in plan.places:
            load_weights(plan, place, allocate_parameters(plan, place, CPU))


def test_numbers_without_a_config(tmp_path: Path) -> None:
    written(tmp_path, RECIPES["tensor"])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with refuses(ModelError, "tensor-type-not-read", "q_proj.weight", "F8_E4M3"):
        resolve(str(tmp_path))


def test_a_cut_off_the_grid_names_the_sizes_that_work(tmp_path: Path) -> None:
    """Heads of 16: three ranks would have 48, 48 and 32 columns of o_proj."""
    narrow = {"head_dim": 16, "num_key_value_heads": 8}
    written(tmp_path, Recipe(DEEPSEEK), **narrow)
    with refuses(PlanError, "quantised-columns-off-grid", "o_proj.weight", "32", "--tensor-parallel-size 1,2,4"):
        plan_for(tmp_path, "tp3")
