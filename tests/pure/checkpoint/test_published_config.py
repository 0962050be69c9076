"""Configurations of GPTQ, AWQ and compressed-tensors: the bytes that are held, and the features that are not read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.pure.machines import host
from tests.refusals import has_values, refuses
from weft.checkpoint.architectures.published import ORDERED, PublishedQuantization
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.checkpoint import Checkpoint
from weft.checkpoint.config import config_json
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.precision import held_precision, sum_by_kind, weight_bytes
from weft.checkpoint.quantised.registry import join_matrices
from weft.checkpoint.quantised.schemes import PUBLISHED_SCHEMES
from weft.checkpoint.quantised.stored_types import stored_types
from weft.config import EngineConfig
from weft.errors import ConfigError, ModelError
from weft.plan.layout import build_plan
from weft.plan.plan import Plan
from weft.planner.memory.footprint import rank_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 640,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "tensor"}
WHOLE, PACKED = {"num_bits": 8}, {"format": "pack-quantized"}


def compressed(weights: dict[str, Any] | None = None, group: dict[str, Any] | None = None, **more: Any) -> Any:
    made = {"weights": WEIGHTS | (weights or {}), "targets": ["Linear"], "input_activations": None} | (group or {})
    own = {"format": "pack-quantized", "config_groups": {"group_0": made}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors"} | own | more


def shape(**quantization: Any) -> ModelShape:
    return config_json.shape_from_config(Fields(CONFIG | {"quantization_config": quantization}, "config.json"))


def published(**quantization: Any) -> PublishedQuantization:
    found = shape(**quantization).published
    assert found is not None
    return found


def plan(of: ModelShape, gpus: int = 0, **flags: Any) -> Plan:
    """Plan for a checkpoint with the quantisation that its config declares."""
    there = Checkpoint(model="m", path="/m", format="safetensors", shape=of, generation={}, quantised=stored_types(of))
    return build_plan(EngineConfig(model="m", **flags), there, host(gpus))


@pytest.mark.parametrize(
    ("method", "scheme"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "INT4_128_SYM"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False}, "INT8_32"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True}, "INT4_ROW_SYM"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}, "INT4_64_SYM" + ORDERED),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "static_groups": True}, "INT4_64_SYM"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}, "INT4_64"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, "INT4_128"),
        (compressed(), "INT4_128_SYM"),
        (compressed({"symmetric": False, "num_bits": 8}), "INT8_128"),
        (compressed({"strategy": "channel", "group_size": None}), "INT4_ROW_SYM"),
        (compressed({"actorder": "weight"}), "INT4_128_SYM"),
        (compressed({"actorder": "group"}), "INT4_128_SYM" + ORDERED),
    ],
)
def test_schemes_of_the_matrices(method: dict[str, Any], scheme: str) -> None:
    found = published(**method)
    assert found.scheme == scheme and not found.exceptions and found.zero_offset == (found.method == "gptq")
    assert config_json.precision(Fields({"quantization_config": method}, "c")) == found.precision
    assert (scheme in PUBLISHED_SCHEMES) == (ORDERED not in scheme)


def test_zero_points_of_the_second_format() -> None:
    assert published(quant_method="gptq", bits=4, checkpoint_format="gptq_v2").zero_offset == 0


@pytest.mark.parametrize(
    ("method", "left"),
    [
        ({"quant_method": "awq", "modules_to_not_convert": ["layers.1.mlp", "o_proj"]}, 3 + 3),
        (compressed(ignore=["lm_head", "model.layers.0.mlp.up_proj", "re:.*self_attn[.][qk]_proj$"]), 1 + 6),
        (compressed(group={"targets": ["re:.*mlp.*"]}), 12),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down.*": {}, "+:.*": {"bits": 4}}}, 3),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["self_attn.q_proj"]]}, 18),
    ],
)
def test_layers_that_are_left_in_16_bits(method: dict[str, Any], left: int) -> None:
    found = published(**method)
    assert {kind for _, kind in found.exceptions} == {""} and len(found.exceptions) == left


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "gptq", "bits": 8, "lm_head": True},
        compressed({"num_bits": 8}, ignore=[]),
    ],
)
def test_a_head_that_is_quantised_too(method: dict[str, Any]) -> None:
    found = shape(**method)
    assert found.published and found.published.exceptions == (("lm_head.weight", found.published.scheme),)
    held = plan(found)
    assert held.schemes["lm_head.weight"] == "INT8_128_SYM" and "model.embed_tokens.weight" not in held.schemes
    assert held.weight_bytes(0) == sum_by_kind(found, held_precision("int8"), held.places[0]).total


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False},
        {"quant_method": "gptq", "bits": 4, "group_size": 48},  # for which there are no kernels
        {"quant_method": "awq", "group_size": 32, "modules_to_not_convert": ["layers.1.mlp"]},
        compressed({"symmetric": False}, ignore=["lm_head", "model.layers.2.mlp.up_proj"]),
    ],
)
def test_the_planner_counts_what_is_held(method: dict[str, Any], gpus: int) -> None:
    of = shape(**method)
    assert of.published is not None
    for how in ({}, {"tensor_split": (3.0, 2.0)}, {"pipeline_split": (2, 1)}):
        got = plan(of, **how, **({"device_ids": (0, 0), "gpus": 1} if gpus and how else {"gpus": gpus}))
        assert got.dtype == ("float16" if gpus else "bfloat16")
        for place in got.places:
            held = sum_by_kind(of, held_precision(of.published.precision), place)
            assert got.weight_bytes(place.rank) == held.total
            assert held == rank_weights(of, held_precision(of.published.precision), place)
        kept = of.published.scheme in PUBLISHED_SCHEMES
        assert got.quantization == (of.published.method if kept else "none")


def test_bytes_in_the_file_are_those_of_its_tensors() -> None:
    """GPTQ's, of which 8 numbers or zero points are in 4 bytes, and what is in 16 bits."""
    matrices = 3 * (640 * (640 + 2 * 320) + 640 * 640 + 3 * 640 * 1408)
    others = 2 * (2 * 1000 * 640 + 7 * 640)
    of = shape(quant_method="awq", group_size=32)
    assert weight_bytes(of, "int4") == matrices // 2 + matrices // 32 * 5 // 2 + others
    assert weight_bytes(of, "bf16") == weight_bytes(msgspec.structs.replace(of, published=None), "bf16")


def test_groups_of_an_mlp_are_not_cut() -> None:
    for size in (32, 64, 128):
        got = plan(shape(quant_method="awq", group_size=size), tensor_split=(2.0, 1.0))
        assert [place.ffn.stop % size for place in got.places] == [0, 1408 % size]
    rows = plan(shape(quant_method="gptq", group_size=-1), tensor_split=(2.0, 1.0))
    assert [place.ffn.stop % 32 for place in rows.places] == [0, 0]


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq in 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq in the format marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "gptq in the format marlin"),
        ({"quant_method": "awq", "bits": 8}, "awq in 8 bits"),
        ({"quant_method": "awq", "version": "gemv"}, "awq in the format gemv"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 in the number format e5m2"),
        ({"quant_method": "fp8", "activation_scheme": "block"}, "fp8 with activation_scheme block"),
        ({"quant_method": "fp8", "weight_block_size": [128, 100]}, "fp8 in FP8 blocks of 128 x 100"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "fp8 in FP8 blocks of 128"),
        ({"quant_method": "fp8", "weight_block_size": [True, 128, 1]}, "blocks of [True, 128, 1]"),
        (compressed(FLOAT), "compressed-tensors in the format pack-quantized"),
        (compressed(FLOAT | {"strategy": "attn_head"}, format="float-quantized"), "a scale for each attn_head"),
        (
            compressed(FLOAT | {"strategy": "block", "block_structure": [128, 8]}, format="float-quantized"),
            "blocks of 128 x 8",
        ),
        (
            compressed(FLOAT, {"input_activations": {"num_bits": 8, "type": "int"}}, format="float-quantized"),
            "activations in 8 bits (int)",
        ),
        (
            compressed(
                format="float-quantized",
                config_groups={"a": {"weights": WEIGHTS | FLOAT}, "b": {"weights": WEIGHTS | WHOLE, **PACKED}},
            ),
            "whole and in floating-point numbers",
        ),
        ({"bits": 4}, "an unknown method"),
        (compressed(format="float-quantized"), "compressed-tensors in the format float-quantized"),
        (compressed(group={"format": "nvfp4-pack-quantized"}), "the format nvfp4-pack-quantized"),
        (compressed({"num_bits": 3}), "in 3 bits"),
        (
            compressed(config_groups={name: {"weights": WEIGHTS | {"num_bits": int(name)}} for name in "48"}),
            "in 4 and 8 bits, one here and one there",
        ),
        (compressed({"strategy": "block"}), "a scale for each block"),
        (compressed(group={"input_activations": {"num_bits": 8}}), "activations are quantised as well"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "the format sparse-24-bitmask"),
        ({"quant_method": "compressed-tensors", "format": "dense"}, "without config_groups"),
    ],
)
def test_features_that_are_not_read_are_named(method: dict[str, Any], named: str) -> None:
    with refuses(ModelError, "quantization-not-read", named, "GGUF"):
        shape(**method)
    # It can be planned for all the same.
    fields = Fields(CONFIG | {"quantization_config": method}, "config.json")
    assert config_json.shape_from_config(fields, run=False).published is None


@pytest.mark.parametrize(
    ("method", "code", "values"),
    [
        (
            {"quant_method": "awq", "modules_to_not_convert": "o_proj"},
            "wrong-field-value",
            ("modules_to_not_convert", "'o_proj'"),
        ),
        ({"quant_method": "gptq", "bits": "four"}, "wrong-field-value", ("bits", "'four'")),
        ({"quant_method": "gptq", "group_size": 0}, "wrong-field-value", ("group_size", "0")),
        ({"quant_method": "gptq", "sym": "yes"}, "wrong-field-value", ("sym", "'yes'")),
        (compressed(ignore=["re:(("]), "bad-regular-expression", ("'re:(('", "quantization_config")),
    ],
)
def test_fields_that_are_wrong(method: dict[str, Any], code: str, values: tuple[str, ...]) -> None:
    with refuses(ModelError, code, *values):
        shape(**method)


def info(type: str, *dims: int) -> TensorInfo:
    return TensorInfo(file="/m/model.safetensors", type=type, dims=dims, offset=0, nbytes=0)


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        ({"scales": None}, "matrix-without-scales", ("a.b.scales",)),
        ({"qzeros": None}, "matrix-without-zero-points", ("a.b.qzeros",)),
        ({"scales": info("I8", 5, 96)}, "packed-part-of-other-dims", ("I8", "[5, 96]", "F16 or BF16 or F32")),
        ({"scales": info("F16", 7, 96), "qzeros": info("I32", 7, 12)}, "scales-do-not-divide-rows", ("7", "640")),
        ({"qzeros": info("I32", 5, 9)}, "packed-bits-not-read", ("3", "4 and 8")),
        ({"qweight": info("I32", 80, 95)}, "packed-part-of-other-dims", ("I32", "[80, 95]", "[80, 96]")),
        ({"g_idx": info("I64", 640)}, "column-groups-of-other-dims", ("I64", "[640]", "I32")),
    ],
)
def test_parts_that_do_not_fit_together(change: dict[str, Any], code: str, values: tuple[str, ...]) -> None:
    there = {"qweight": info("I32", 80, 96), "scales": info("F16", 5, 96), "qzeros": info("I32", 5, 12)}
    index = {f"a.b.{name}": it for name, it in (there | change).items() if it is not None}
    with refuses(ModelError, code, "/m/model.safetensors: a.b", *values):
        join_matrices(index, PublishedQuantization(method="gptq", bits=4, group=128, symmetric=False))


def test_the_dtype_of_the_computation_is_told(
    caplog: pytest.LogCaptureFixture, golden: Callable[[str, str], None]
) -> None:
    caplog.set_level(logging.INFO, "weft")
    of = shape(quant_method="gptq", bits=4)
    assert plan(of, gpus=1).dtype == "float16" and not caplog.records
    assert plan(of).dtype == "bfloat16"
    assert plan(of, dtype="float16").quantization == "none"
    computed, held = (record.message for record in caplog.records)
    has_values(computed, "bfloat16", "int4", "float16")
    has_values(held, "float16", "float16")
    golden("published.txt", f"{computed}\n{held}\n")


def test_the_words_of_vllm() -> None:
    gptq = shape(quant_method="gptq", bits=8)
    for word in ("gptq", "gptq_marlin", "int8"):
        assert plan(gptq, quantization=word).schemes == plan(gptq).schemes
        assert plan(gptq, quantization=word).quantization == "gptq"
    assert set(plan(gptq, quantization="int4").schemes.values()) == {"Q4_1", "Q8_0"}
    with refuses(ConfigError, "checkpoint-quantised-already", "awq", "gptq"):
        plan(gptq, quantization="awq")
    assert plan(gptq, dtype="float32").quantization == "none"


def test_the_requested_quantization_is_held_or_refused() -> None:
    """int8 of a checkpoint that is in int8 as of any other."""
    gptq = shape(quant_method="gptq", bits=8)
    assert plan(gptq, quantization="int8", dtype="float32").schemes == plan(gptq).schemes
    with refuses(ConfigError, "quantization-on-torch-backend", "--attention-backend"):
        plan(gptq, quantization="int8", attention_backend="torch")
    with refuses(ConfigError, "quantization-dtype-on-cpu", "int8", "bfloat16", "float32", "float16"):
        plan(gptq, quantization="int8", dtype="float16")
