"""Metadata of llama.cpp's GGUF files as a ModelShape, and metadata without a true shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.pure.gguf_files import GGML, ggml_name, metadata_of, write, write_model
from tests.pure.shapes import dense_shape, figures, repeated, windows, with_attention, with_ffn
from tests.refusals import refusals, refuses
from weft.checkpoint.architectures.shape import Experts, LatentAttention, ModelShape, Rope
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.files import gguf
from weft.checkpoint.gguf import shape as gguf_shape
from weft.checkpoint.tensor_index import expected_tensors
from weft.errors import ModelError

LLAMA = dense_shape(
    architecture="LlamaForCausalLM",
    layers=2,
    hidden=12,
    q_heads=6,
    kv_heads=2,
    head_dim=8,
    ffn=20,
    vocab=10,
    max_positions=64,
    norm_eps=0.5,
    rope=Rope(theta=500000.0),
    dtype="float32",
)
QWEN2 = msgspec.structs.replace(with_attention(LLAMA, bias=True), architecture="Qwen2ForCausalLM", tied=True)
QWEN3 = msgspec.structs.replace(with_attention(LLAMA, qk_norm="head"), architecture="Qwen3ForCausalLM")
BIASED = with_ffn(with_attention(LLAMA, bias=True, out_bias=True), bias=True)


@pytest.mark.parametrize("shape", [LLAMA, QWEN2, QWEN3, BIASED], ids=lambda shape: shape.architecture)
def test_a_shape_survives_a_gguf_header(tmp_path: Path, shape: ModelShape) -> None:
    write_model(tmp_path / "m.gguf", shape)
    checkpoint = resolve(str(tmp_path / "m.gguf"))
    assert checkpoint.shape == shape
    interleaved = {name: info.interleaved for name, info in checkpoint.tensors().items() if info.interleaved}
    rotated = [name for name, _ in expected_tensors(shape) if ".q_proj." in name or ".k_proj." in name]
    assert interleaved == (dict.fromkeys(rotated, 8) if shape.architecture == "LlamaForCausalLM" else {})


def header(
    path: Path, change: dict[str, Any], tensors: dict[str, np.ndarray] | None = None, shape: ModelShape = LLAMA
) -> gguf.Gguf:
    """Header of a file with other metadata (None: without) and more tensors. Its keys stand for the architecture's."""
    arch = GGML[shape.architecture]
    changes = {
        key if "." in key and key.split(".")[0] in ("general", "tokenizer") else f"{arch}.{key}": value
        for key, value in change.items()
    }
    metadata = {key: value for key, value in (metadata_of(shape) | changes).items() if value is not None}
    embedding = {"token_embd.weight": np.zeros((shape.vocab, shape.hidden), dtype=np.float32)}
    write(path / "m.gguf", arch, metadata, embedding | (tensors or {}))
    return gguf.read_gguf(path / "m.gguf")


def fails(path: Path, change: dict[str, Any], code: str, *values: str, **more: Any) -> None:
    with refuses(ModelError, code, *values):
        gguf_shape.shape_from_gguf(header(path, change, **more))


def test_defaults(tmp_path: Path) -> None:
    absent = ["attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count"]
    shape = gguf_shape.shape_from_gguf(header(tmp_path, dict.fromkeys([*absent, "rope.freq_base"])))
    assert (shape.kv_heads, shape.mixers[0].head_dim, shape.mixers[0].rope.theta) == (6, 2, 10000.0)


def test_tokens(tmp_path: Path) -> None:
    ids = {"bos": 1, "eos": 2, "eot": 5, "eom": 2}
    shape = gguf_shape.shape_from_gguf(
        header(tmp_path, {f"tokenizer.ggml.{key}_token_id": value for key, value in ids.items()})
    )
    assert (shape.bos, shape.eos) == (1, (2, 5))


@pytest.mark.parametrize("none", [2**32 - 1, np.int32(-1)])
def test_ids_of_no_token(tmp_path: Path, none: Any) -> None:
    changes = {f"tokenizer.ggml.{key}_token_id": none for key in ("bos", "eos", "eom")}
    shape = gguf_shape.shape_from_gguf(header(tmp_path, changes | {"tokenizer.ggml.eot_token_id": 5}))
    assert (shape.bos, shape.eos) == (None, (5,))


def test_fields_that_say_what_is_computed_anyway(tmp_path: Path) -> None:
    """The same number for each layer, and factors of one."""
    arrays = {"attention.head_count": [6, 6], "attention.head_count_kv": [2, 2], "feed_forward_length": [20, 20]}
    factors = {"embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0, "attention.scale": 8**-0.5}
    plain = gguf_shape.shape_from_gguf(header(tmp_path, {}))
    assert gguf_shape.shape_from_gguf(header(tmp_path, arrays | factors)) == plain


def test_sliding_window(tmp_path: Path) -> None:
    for window, expected in ((16, (16, 16)), (0, ())):
        shape = gguf_shape.shape_from_gguf(header(tmp_path, {"attention.sliding_window": window}))
        assert windows(shape) == expected


def test_dtype_is_the_embeddings_or_bfloat16(tmp_path: Path) -> None:
    for type, dtype in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")):
        write_model(tmp_path / "m.gguf", LLAMA, type)
        assert gguf_shape.shape_from_gguf(gguf.read_gguf(tmp_path / "m.gguf")).dtype == dtype
    wide = msgspec.structs.replace(with_ffn(with_attention(LLAMA, heads=4), width=32), hidden=32)
    write_model(tmp_path / "m.gguf", wide, "Q8_0")
    assert gguf_shape.shape_from_gguf(gguf.read_gguf(tmp_path / "m.gguf")).dtype == "bfloat16"


def test_sampling(tmp_path: Path) -> None:
    values = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.5}
    assert gguf_shape.recommended_sampling(header(tmp_path, values)) == {
        "temperature": 0.5,
        "top_k": 20,
        "repetition_penalty": 1.5,
    }


SCALED = {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}


@pytest.mark.parametrize(
    ("change", "rope"),
    [
        ({"rope.scaling.type": "none"}, Rope(theta=5e5)),
        ({"rope.scaling.type": "linear", **SCALED}, Rope(theta=5e5, kind="linear", factor=4.0)),
        ({"rope.scale_linear": 2.0}, Rope(theta=5e5, kind="linear", factor=2.0)),
        ({"rope.scaling.type": "yarn", **SCALED}, Rope(theta=5e5, kind="yarn", factor=4.0, original_max_positions=16)),
        (
            {
                "rope.scaling.type": "yarn",
                **SCALED,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
                "rope.scaling.yarn_attn_factor": 1.5,
            },
            Rope(
                theta=5e5,
                kind="yarn",
                factor=4.0,
                original_max_positions=16,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=1.5,
            ),
        ),
        (
            {"rope.scaling.type": "yarn", **SCALED, "rope.scaling.attn_factor": 0.5},
            Rope(
                theta=5e5,
                kind="yarn",
                factor=4.0,
                original_max_positions=16,
                attention_factor=0.5 * (0.1 * math.log(4) + 1),
            ),
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, change: dict[str, Any], rope: Rope) -> None:
    shape = gguf_shape.shape_from_gguf(header(tmp_path, change))
    assert shape.mixers[0].rope == rope
    assert shape.max_positions == 64


def test_yarn_reaches_further_than_the_model_was_trained(tmp_path: Path) -> None:
    change = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "context_length": 32}
    assert gguf_shape.shape_from_gguf(header(tmp_path, change)).max_positions == 128


def test_llama3s_divisors(tmp_path: Path) -> None:
    divisors = np.array([1, 1.5, 4, 8], dtype=np.float32)
    shape = gguf_shape.shape_from_gguf(header(tmp_path, {}, {"rope_freqs.weight": divisors}))
    assert shape.mixers[0].rope == Rope(theta=5e5, kind="llama3", factors=(1.0, 1.5, 4.0, 8.0))
    fails(
        tmp_path,
        {},
        "bad-rope-factors",
        "rope_freqs.weight",
        "F32 of [3]",
        "F32 of [4]",
        tensors={"rope_freqs.weight": divisors[:3]},
    )
    fails(tmp_path, {}, "rope-factor-not-positive", tensors={"rope_freqs.weight": divisors * 0})
    both = {"rope.scaling.type": "linear", **SCALED}
    fails(
        tmp_path,
        both,
        "two-rope-scalings",
        "rope_freqs.weight",
        "rope.scaling.type",
        tensors={"rope_freqs.weight": divisors},
    )


def test_longropes_divisors(tmp_path: Path) -> None:
    short, long = np.array([1, 1.5, 2, 3], dtype=np.float32), np.array([2, 3, 4, 8], dtype=np.float32)
    both = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    change = {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.25}
    shape = gguf_shape.shape_from_gguf(header(tmp_path, change, both))
    assert shape.mixers[0].rope == Rope(
        theta=5e5,
        kind="longrope",
        original_max_positions=16,
        attention_factor=1.25,
        short_factors=(1.0, 1.5, 2.0, 3.0),
        long_factors=(2.0, 3.0, 4.0, 8.0),
    )
    del both["rope_factors_short.weight"]
    fails(tmp_path, change, "bad-rope-factors", "rope_factors_short.weight", "missing", "F32 of [4]", tensors=both)


MIXED = {"expert_count": 4, "expert_used_count": 2}
# A change of the metadata, the code of what is wrong with it, and values of the message.
WRONG: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"block_count": None}, "missing-field", ("block_count",)),
    ({"block_count": "2"}, "wrong-field-value", ("block_count", "'2'")),
    ({"attention.layer_norm_rms_epsilon": None}, "missing-field", ("attention.layer_norm_rms_epsilon",)),
    ({"attention.head_count_kv": [2, 1]}, "gguf-field-per-layer", ("llama.attention.head_count_kv",)),
    ({"attention.value_length": 4}, "wrong-field-value", ("attention.value_length", "4", "8")),
    ({"rope.dimension_count": 4}, "wrong-field-value", ("rope.dimension_count", "4", "8")),
    ({"expert_count": 8}, "missing-field", ("expert_used_count",)),
    ({"expert_count": 2, "expert_used_count": 3}, "wrong-field-value", ("expert_used_count", "3", "2")),
    (MIXED | {"expert_gating_func": 2}, "wrong-field-value", ("llama", "expert_gating_func", 2)),
    (MIXED | {"expert_weights_scale": 2.5}, "wrong-field-value", ("llama", "expert_weights_scale", 2.5)),
    (MIXED | {"expert_weights_norm": False}, "wrong-field-value", ("llama", "expert_weights_norm", False)),
    ({"attention.scale": 0.5}, "gguf-feature-not-computed", ("llama.attention.scale",)),
    ({"embedding_scale": 2.0}, "gguf-feature-not-computed", ("llama.embedding_scale",)),
    ({"logit_scale": 0.5}, "gguf-feature-not-computed", ("llama.logit_scale",)),
    ({"rope.scaling.type": "longrope"}, "wrong-field-value", ("rope.scaling.type", "'longrope'")),
    ({"rope.scaling.type": "linear"}, "missing-field", ("rope.scaling.factor",)),
    ({"general.architecture": "mamba"}, "unknown-architecture", ("'mamba'", "llama, phi3, qwen2")),
    ({"general.architecture": "gemma2"}, "architecture-not-run", ("gemma2",)),
]


@pytest.mark.parametrize(("change", "code", "values"), WRONG)
def test_headers_without_a_true_shape(
    tmp_path: Path, change: dict[str, Any], code: str, values: tuple[str, ...]
) -> None:
    fails(tmp_path, change, code, *values)


def test_the_wording_of_what_has_no_shape(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    def shape(change: dict[str, Any]) -> ModelShape:
        return gguf_shape.shape_from_gguf(header(tmp_path, change))

    golden("gguf_shape.txt", refusals(shape, [change for change, *_ in WRONG], tmp_path))


def test_tensors_of_another_model_are_not_passed_over(tmp_path: Path) -> None:
    shape = repeated(LLAMA, 1)
    write_model(tmp_path / "m.gguf", shape)
    content = (tmp_path / "m.gguf").read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight")
    (tmp_path / "m.gguf").write_bytes(content)
    with refuses(ModelError, "foreign-tensor", "'blk.0.ffn_xx.weight'"):
        resolve(str(tmp_path / "m.gguf"))


PLANNED = [
    ("llama", MIXED, [], {"architecture": "MixtralForCausalLM", "experts": Experts(count=4, top_k=2, width=96)}),
    (
        "qwen3moe",
        MIXED | {"expert_feed_forward_length": 24},
        ["blk.0.attn_q_norm.weight"],
        {"experts": Experts(count=4, top_k=2, width=24), "qk_norm": True},
    ),
    (
        "gpt-oss",
        MIXED | {"expert_feed_forward_length": 24, "attention.sliding_window": 128},
        ["blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down_exps.bias"],
        {"windows": (128, None, 128), "qkv_bias": True, "out_bias": True, "mlp_bias": True},
    ),
    ("gemma2", {"attention.sliding_window": 7}, [], {"windows": (7, None, 7), "tied": True}),
    ("gemma3", {"attention.sliding_window": 7}, [], {"windows": (7, 7, 7)}),
    ("phi3", {"rope.dimension_count": 4}, ["output.weight"], {"tied": False, "head_dim": 8}),
    ("qwen", {}, ["blk.0.attn_qkv.bias"], {"ffn": 48, "qkv_bias": True}),
    ("minimax-m2", MIXED, [], {"experts": Experts(count=4, top_k=2, width=96)}),
]
LATENT = MIXED | {
    "expert_feed_forward_length": 24,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "attention.kv_lora_rank": 16,
    "attention.q_lora_rank": 12,
    "rope.dimension_count": 4,
    "attention.head_count_kv": 1,
}
LENGTHS = [
    {"attention.key_length": 10, "attention.value_length": 6, "attention.head_count_kv": 8},
    {
        "attention.key_length": 20,
        "attention.value_length": 16,
        "attention.key_length_mla": 10,
        "attention.value_length_mla": 6,
    },
]


def planned(folder: Path, arch: str, change: dict[str, Any], tensors: list[str]) -> ModelShape:
    """The planner's model for such a file."""
    base = {
        "block_count": 3,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    metadata = {f"{arch}.{key}": value for key, value in (base | change).items()}
    values = {name: np.zeros((1, 1), np.float32) for name in tensors} | {
        "token_embd.weight": np.zeros((32, 64), np.float32)
    }
    return gguf_shape.shape_from_gguf(gguf.read_gguf(write(folder / "m.gguf", arch, metadata, values)), run=False)


@pytest.mark.parametrize(("arch", "change", "tensors", "expected"), PLANNED, ids=lambda value: str(value)[:20])
def test_shapes_for_the_planner(
    tmp_path: Path, arch: str, change: dict[str, Any], tensors: list[str], expected: dict[str, Any]
) -> None:
    found = planned(tmp_path, arch, change, tensors)
    known = figures(found) | {name: getattr(found, name) for name in ("architecture", "experts", "tied", "ffn")}
    assert {key: known[key] for key in expected} == expected
    assert (len(found.layers), found.hidden, found.q_heads, found.kv_heads, found.vocab) == (3, 64, 8, 2, 32)


@pytest.mark.parametrize("lengths", LENGTHS, ids=["old", "new"])
def test_latent_attention_in_files_old_and_new(tmp_path: Path, lengths: dict[str, Any]) -> None:
    found = planned(tmp_path, "deepseek2", LATENT | lengths, [])
    assert found.architecture == "DeepseekV2ForCausalLM"
    assert found.mixers[0] == LatentAttention(
        heads=8, kv_lora_rank=16, q_lora_rank=12, nope_dim=6, rope_dim=4, v_dim=6, scale=10**-0.5
    )
    assert (found.mixers[0].head_dim, found.kv_heads) == (10, 8)
    assert found.experts == Experts(count=4, top_k=2, width=24, shared=2, shared_width=48, normalised=False)
    assert [layer.has_experts for layer in found.layers] == [False, True, True]
    third = planned(tmp_path, "deepseek2", LATENT | lengths, ["blk.1.exp_probs_b.bias"])
    assert third.architecture == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize(
    ("bias", "change", "values"),
    [
        (False, {"expert_group_count": 3, "expert_group_used_count": 1}, ("expert_group_count", 3, "4 experts")),
        (True, {"expert_group_count": 4, "expert_group_used_count": 2}, ("expert_group_count", 4, "2 or more")),
        (False, {"expert_group_count": 2, "expert_group_used_count": 3}, ("expert_group_used_count", 3, 2)),
        (False, {"expert_group_count": 4, "expert_group_used_count": 1}, ("expert_group_used_count", "takes 2")),
    ],
    ids=str,
)
def test_latent_files_that_cannot_be(
    tmp_path: Path, bias: bool, change: dict[str, Any], values: tuple[object, ...]
) -> None:
    with refuses(ModelError, "wrong-field-value", *values):
        planned(tmp_path, "deepseek2", LATENT | LENGTHS[0] | change, ["blk.1.exp_probs_b.bias"] * bias)


def test_a_layer_beyond_those_of_the_file_s_shape_is_refused(tmp_path: Path) -> None:
    """Its rows would be ordered by the heads of a layer that the shape does not have."""
    longer = msgspec.structs.replace(LLAMA, layers=(*LLAMA.layers, LLAMA.layers[0]))
    tensors = {
        ggml_name(name, LLAMA.architecture): np.zeros(dims, np.float32) for name, dims in expected_tensors(longer)
    }
    write(tmp_path / "m.gguf", GGML[LLAMA.architecture], metadata_of(LLAMA), tensors)
    with refuses(ModelError, "more-layers-than-config", "model.layers.2.", 2):
        resolve(str(tmp_path / "m.gguf"))
