"""config.json and generation_config.json: what Transformers 4 and 5 write, and what no file should say.

That the defaults are Transformers' own is tested against Transformers in tests/cpu.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pure.shapes import figures, windows
from tests.refusals import refusals, refuses
from weft.checkpoint.architectures.shape import Attention, Dense, Experts, ModelShape, Rope
from weft.checkpoint.config import config_json
from weft.checkpoint.files.fields import Fields
from weft.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"]}
GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 32}


def shape(config: dict[str, Any]) -> ModelShape:
    return config_json.shape_from_config(Fields(config, "config.json"))


def fails(config: dict[str, Any], code: str, *values: str) -> None:
    with refuses(ModelError, code, "config.json", *values) as caught:
        shape(config)
    assert str(caught.value).startswith("config.json")


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "short_factor": [1, 1.5, 2, 3],
    "long_factor": [2, 3, 4, 8.0],
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 16, "beta_slow": 2, "truncate": False}


@pytest.mark.parametrize(
    ("kind", "values", "rope"),
    [
        ("default", {}, Rope(theta=5e5)),
        ("linear", {"factor": 2}, Rope(theta=5e5, kind="linear", factor=2.0)),
        ("dynamic", {"factor": 2.5}, Rope(theta=5e5, kind="dynamic", factor=2.5, original_max_positions=512)),
        (
            "llama3",
            LLAMA3,
            Rope(
                theta=5e5,
                kind="llama3",
                factor=8.0,
                original_max_positions=64,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
        ),
        (
            "yarn",
            YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "attention_factor": 1.25},
            Rope(
                theta=5e5,
                kind="yarn",
                factor=4.0,
                original_max_positions=256,
                beta_fast=16.0,
                beta_slow=2.0,
                mscale=0.7,
                mscale_all_dim=0.5,
                attention_factor=1.25,
                truncate=False,
            ),
        ),
        (
            "longrope",
            LONGROPE,
            Rope(
                theta=5e5,
                kind="longrope",
                original_max_positions=64,
                short_factors=(1.0, 1.5, 2.0, 3.0),
                long_factors=(2.0, 3.0, 4.0, 8.0),
            ),
        ),
    ],
)
def test_rope_as_versions_4_and_5_write_it(kind: str, values: dict[str, Any], rope: Rope) -> None:
    nothing = {"rope_theta": 500000, "rope_scaling": None}
    old = nothing if kind == "default" else {"rope_theta": 500000, "rope_scaling": {"type": kind, **values}}
    newer = nothing if kind == "default" else {"rope_theta": 500000, "rope_scaling": {"rope_type": kind, **values}}
    five = {"rope_parameters": {"rope_type": kind, "rope_theta": 500000.0, **values}}
    per_type = {"rope_parameters": {"full_attention": five["rope_parameters"]}}
    for words in (old, newer, five, per_type):
        assert shape(LLAMA | words).mixers[0].rope == rope


def test_the_rotated_share_of_heads() -> None:
    five = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.75}}
    for words in ({"partial_rotary_factor": 0.75}, five):
        rope = shape(PHI3 | words).mixers[0].rope
        assert (rope.rotated, rope.rotated_dims(8)) == (0.75, 6)
    for share in (0.4, 1.5):
        fails(PHI3 | {"partial_rotary_factor": share}, "wrong-field-value", "partial_rotary_factor", str(share))


def test_yarn_reaches_further_than_the_model_was_trained() -> None:
    """Qwen's documentation has users add the scaling to a config that says the length before it."""
    before = QWEN2 | {"max_position_embeddings": 256, "rope_scaling": {"type": "yarn", **YARN}}
    after = QWEN2 | {"max_position_embeddings": 1024, "rope_scaling": {"type": "yarn", **YARN}}
    assert shape(before).max_positions == shape(after).max_positions == 1024
    untold = {"type": "yarn", "factor": 2.0}
    assert shape(QWEN2 | {"rope_scaling": untold}).mixers[0].rope.original_max_positions == 512


def test_dtype() -> None:
    assert shape(LLAMA | {"torch_dtype": "float16"}).dtype == "float16"
    assert shape(LLAMA | {"dtype": "float32"}).dtype == "float32"
    own = config_json.shape_from_config(Fields(LLAMA | {"torch_dtype": "auto"}, "config.json"), "float16")
    assert own.dtype == "float16"
    fails(
        LLAMA | {"dtype": "float8_e4m3fn"},
        "wrong-field-value",
        "dtype",
        "'float8_e4m3fn'",
        "bfloat16, float16 or float32",
    )


def test_biases() -> None:
    def biases(model: ModelShape) -> tuple[bool, bool, bool]:
        known = figures(model)
        return known["qkv_bias"], known["out_bias"], known["mlp_bias"]

    asked = {"attention_bias": True, "mlp_bias": True}
    assert biases(shape(LLAMA)) == (False, False, False)
    assert biases(shape(LLAMA | asked)) == (True, True, True)
    assert biases(shape(MISTRAL | asked)) == (False, False, False)
    assert biases(shape(QWEN2 | asked)) == (True, False, False)
    assert biases(shape(LLAMA | asked | {"architectures": ["Qwen3ForCausalLM"]})) == (True, True, False)


def test_windows() -> None:
    sliding = {"sliding_window": 32, "use_sliding_window": True}
    assert windows(shape(LLAMA | sliding)) == ()
    assert windows(shape(MISTRAL | {"sliding_window": 32})) == (32,) * 4
    assert windows(shape(MISTRAL | {"sliding_window": None})) == ()
    assert windows(shape(QWEN2 | sliding | {"max_window_layers": 3})) == (None, None, None, 32)
    assert windows(shape(QWEN2 | sliding)) == ()
    assert windows(shape(QWEN2 | {"sliding_window": 32, "max_window_layers": 0})) == ()
    types = ["sliding_attention", "full_attention"] * 2
    assert windows(shape(QWEN2 | sliding | {"layer_types": types})) == (32, None, 32, None)
    fails(
        QWEN2 | sliding | {"layer_types": types[:3]},
        "layer-types-of-other-length",
        "layer_types",
        "3",
        "4",
        "num_hidden_layers",
    )
    fails(QWEN2 | sliding | {"layer_types": [{}] * 4}, "wrong-field-value", "layer_types")


@pytest.mark.parametrize(
    "model", [MISTRAL, GEMMA3, QWEN2 | {"use_sliding_window": True}], ids=lambda it: it["architectures"][0]
)
def test_a_window_of_nothing(model: dict[str, Any]) -> None:
    for window in (0, -1, 1.5, "wide"):
        fails(model | {"sliding_window": window}, "wrong-field-value", "sliding_window", str(window), "1 ")
    # Where no layer has one, it does not matter.
    assert windows(shape(QWEN2 | {"sliding_window": 0})) == windows(shape(LLAMA | {"sliding_window": 0})) == ()


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention", "conv"])
def test_a_kind_of_layer_that_has_no_block(kind: str) -> None:
    types = ["full_attention", kind] * 2
    fails(GEMMA3 | {"layer_types": types}, "layer-type-not-run", kind, "full_attention or sliding_attention")


def test_architecture() -> None:
    by_type = {key: value for key, value in LLAMA.items() if key != "architectures"} | {"model_type": "qwen3"}
    assert shape(by_type).architecture == "Qwen3ForCausalLM"
    known = "LlamaForCausalLM, MistralForCausalLM"
    fails(LLAMA | {"architectures": ["TapirForCausalLM"]}, "unknown-architecture", "'TapirForCausalLM'", known)
    fails(LLAMA | {"architectures": None, "model_type": "mamba"}, "unknown-architecture", "'mamba'", known)
    fails(LLAMA | {"architectures": "Llama"}, "wrong-field-value", "architectures", "'Llama'")


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
@pytest.mark.parametrize("value", ["64", 64.0, True, 0, -1, [64]])
def test_sizes_of_the_wrong_type(key: str, value: object) -> None:
    fails(LLAMA | {key: value}, "wrong-field-value", key)
    fails({name: old for name, old in LLAMA.items() if name != key}, "missing-field", key)


# A change of the config, the code of what is wrong with it, and values of the message.
WRONG: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"hidden_size": 65}, "uneven-hidden-size", ("hidden_size", "65", "8", "num_attention_heads")),
    ({"rms_norm_eps": "1e-6"}, "wrong-field-value", ("rms_norm_eps", "'1e-6'")),
    ({"rms_norm_eps": float("nan")}, "wrong-field-value", ("rms_norm_eps",)),
    ({"tie_word_embeddings": "yes"}, "wrong-field-value", ("tie_word_embeddings", "'yes'")),
    ({"eos_token_id": "</s>"}, "wrong-field-value", ("eos_token_id", "'</s>'")),
    ({"eos_token_id": [2, -1]}, "wrong-field-value", ("eos_token_id",)),
    ({"hidden_act": "gelu"}, "wrong-field-value", ("hidden_act", "'gelu'")),
    ({"rope_scaling": {"type": "3d"}}, "wrong-field-value", ("rope_scaling", "'3d'")),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": 1.0}},
        "wrong-field-value",
        ("rope_scaling", "short_factor"),
    ),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 3}},
        "bad-rope-factors",
        ("long_factor", "3", "4"),
    ),
    ({"rope_scaling": {"type": "linear"}}, "missing-field", ("rope_scaling",)),
    ({"rope_scaling": "yarn"}, "wrong-field-value", ("rope_scaling", "'yarn'")),
    (
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
        "wrong-field-value",
        ("low_freq_factor",),
    ),
    ({"partial_rotary_factor": 0.5}, "wrong-field-value", ("partial_rotary_factor", "0.5")),
    (
        {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
        "wrong-field-value",
        ("rope_parameters", "full_attention"),
    ),
    ({"quantization_config": {"quant_method": "hqq"}}, "quantization-not-read", ("hqq",)),
]


@pytest.mark.parametrize(("change", "code", "values"), WRONG)
def test_impossible_configs(change: dict[str, Any], code: str, values: tuple[str, ...]) -> None:
    fails(LLAMA | change, code, *values)


def test_the_wording_of_what_cannot_be(golden: Callable[[str, str], None]) -> None:
    golden("config_json.txt", refusals(lambda change: shape(LLAMA | change), [change for change, *_ in WRONG]))


def test_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    assert config_json.read_shape(tmp_path, "bfloat16").eos == (2,)
    assert config_json.recommended_sampling(tmp_path) == {}
    generation = {"eos_token_id": [5, 2, 7], "temperature": 0.6, "top_k": 20, "do_sample": True, "pad_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert config_json.read_shape(tmp_path, "bfloat16").eos == (2, 5, 7)
    assert config_json.recommended_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20, "do_sample": True}
    (tmp_path / "generation_config.json").write_text('{"top_p": "all"}')
    with refuses(ModelError, "wrong-field-value", "top_p", "'all'"):
        config_json.recommended_sampling(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{}", b'{"vocab_size": 12'])
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with refuses(ModelError, "damaged-config", "config.json") as caught:
        config_json.read_shape(tmp_path, "bfloat16")
    assert "\n" not in str(caught.value)


def test_end_tokens_that_a_config_denies() -> None:
    assert shape(LLAMA).eos == (2,)
    assert shape(LLAMA | {"eos_token_id": None}).eos == ()
    assert shape(LLAMA | {"bos_token_id": None}).bos is None
    assert shape(QWEN2).eos == ()


def planned(config: dict[str, Any]) -> ModelShape:
    return config_json.shape_from_config(Fields(config, "config.json"), run=False)


MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"]}
# Latent attention.
LATENT = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def test_an_architecture_that_is_only_planned_for() -> None:
    planned_only = LLAMA | {"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    assert planned(planned_only).experts == Experts(count=8, top_k=2, width=96, scoring="sigmoid", correction=True)
    fails(planned_only, "architecture-not-run", "MiniMaxM2ForCausalLM", "Llama")
    assert planned(LLAMA) == shape(LLAMA)


@pytest.mark.parametrize("outer", ["Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"])
def test_the_language_model_inside_of_another(outer: str) -> None:
    inner = GEMMA3 if outer.startswith("Gemma") else MISTRAL
    text = {key: value for key, value in inner.items() if key != "architectures"}
    wrapped = {"architectures": [outer], "text_config": text, "vision_config": {"hidden_size": 9}, "eos_token_id": [7]}
    found = planned(wrapped)
    assert (found.architecture, found.eos) == (outer, (7,))
    for field in ("layers", "hidden", "vocab", "tied", "norm", "embedding_scale"):
        assert getattr(found, field) == getattr(planned(inner), field)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
        ),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({}, None),
    ],
)
def test_precision_of_quantised_checkpoints(method: dict[str, Any], expected: str | None) -> None:
    config = LLAMA | {"quantization_config": method}
    assert config_json.precision(Fields(config, "config.json")) == expected
    assert msgspec.structs.replace(planned(config), published=None) == planned(LLAMA)


def test_precisions_that_nobody_knows_the_bytes_of() -> None:
    for method in ({"quant_method": "aqlm"}, {"quant_method": "gptq", "bits": 3}, {"bits": "four"}):
        code = "wrong-field-value" if method.get("bits") == "four" else "unknown-quantization"
        with refuses(ModelError, code, "config.json"):
            config_json.precision(Fields({"quantization_config": method}, "config.json"))


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        ({"num_experts_per_tok": 9}, "wrong-field-value", ("num_experts_per_tok", "9")),
        ({"num_local_experts": 0}, "wrong-field-value", ("num_local_experts", "0")),
        ({"moe_intermediate_size": "wide"}, "wrong-field-value", ("moe_intermediate_size", "'wide'")),
        ({"kv_lora_rank": 4}, "missing-field", ("qk_nope_head_dim",)),
    ],
)
def test_mixtures_that_cannot_be(change: dict[str, Any], code: str, values: tuple[str, ...]) -> None:
    with refuses(ModelError, code, *values):
        planned(MIXTRAL | change)


OPT = {"architectures": ["OPTForCausalLM"], "hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4}
OPT |= {"num_hidden_layers": 2, "vocab_size": 100}


def test_opt_has_what_its_config_says() -> None:
    plain, small = planned(OPT), planned(OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False})
    assert (plain.embedding_dim, plain.final_norm, plain.layers[0].norms) == (None, True, "pre")
    assert (small.embedding_dim, small.final_norm, small.layers[0].norms) == (32, False, "residual")
    assert not planned(OPT | {"_remove_final_layer_norm": True}).final_norm
    galactica = planned(OPT | {"enable_bias": False, "activation_function": "gelu"}).layers[0]
    assert isinstance(galactica.mixer, Attention) and isinstance(galactica.ffn, Dense)
    assert (galactica.mixer.bias, galactica.mixer.out_bias, galactica.ffn.bias) == (False, False, False)
    assert galactica.ffn.activation == "gelu"


@pytest.mark.parametrize(
    ("field", "value"), [("activation_function", "quick_gelu"), ("layer_norm_elementwise_affine", False)]
)
def test_what_opt_does_not_compute(field: str, value: object) -> None:
    with refuses(ModelError, "wrong-field-value", field.replace("activation_function", "hidden_act")):
        shape(OPT | {field: value})
