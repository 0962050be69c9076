"""Precision: bytes as published checkpoints have them, and as the formats' definitions give them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.shapes import SMOLLM2
from tests.refusals import refuses
from weft.checkpoint.architectures.place import Span, whole
from weft.checkpoint.files.gguf_types import BITS, MIXES
from weft.checkpoint.names import catalogue
from weft.checkpoint.quantised.precision import (
    FP8_BLOCKS,
    INT4,
    INT8,
    MXFP4,
    NAMES,
    NVFP4,
    canonical,
    weight_bytes,
    weights_by_kind,
)
from weft.errors import ConfigError
from weft.plan.places import cut_places

# GB of 10^9 bytes. int4: the facts that this project began with. GGUF, MXFP4 and FP8: sizes of published files, from
# memory; a GGUF file has at most 8 MB of metadata beside its tensors.
PUBLISHED = [
    ("Qwen2.5-72B", "int4", 41.46, 0.01),
    ("Qwen2.5-14B", "int4", 9.98, 0.01),
    ("Llama-3.1-8B", "int4", 5.73, 0.01),
    ("Llama-3.1-70B", "int4", 39.77, 0.01),
    ("Llama-3.1-405B", "int4", 217.1, 0.05),
    ("Qwen-7B-Chat", "int4", 5.86, 0.01),
    ("Qwen-14B-Chat", "int4", 9.67, 0.01),
    ("Qwen-72B-Chat", "int4", 41.25, 0.01),
    ("Llama-3-8B", "q4_k_m", 4.92, 0.01),
    ("Llama-3-8B", "q8_0", 8.54, 0.01),
    ("Llama-3-8B", "q6_k", 6.60, 0.02),
    ("Llama-3-8B", "q5_k_m", 5.73, 0.01),
    ("Llama-3-8B", "q2_k", 3.18, 0.01),
    ("Llama-3-70B", "q4_k_m", 42.52, 0.01),
    ("gpt-oss-120b", "mxfp4", 65.2, 0.3),
    ("gpt-oss-20b", "mxfp4", 13.8, 0.1),
    ("DeepSeek-R1", "fp8", 673.2, 0.5),
]


@pytest.mark.parametrize(("model", "precision", "gigabytes", "tolerance"), PUBLISHED)
def test_published_checkpoints(model: str, precision: str, gigabytes: float, tolerance: float) -> None:
    assert weight_bytes(catalogue.find(model).shape, precision) / 1e9 == pytest.approx(gigabytes, abs=tolerance)


def test_the_demo_file_to_the_byte() -> None:
    """All tensors of SmolLM2-135M-Instruct.Q4_1.gguf, its embedding in Q8_0 since 576 is no multiple of 256."""
    assert weight_bytes(SMOLLM2, "q4_1") == 96_576_768


def test_fp8_halves_the_matrices_and_nothing_else() -> None:
    shape = catalogue.find("Llama-3.1-70B").shape
    full, half = weights_by_kind(shape, "bf16"), weights_by_kind(shape, "fp8")
    assert half.linear * 2 == full.linear
    assert (half.embedding, half.head, half.others) == (full.embedding, full.head, full.others)
    assert half.embedding == 2 * 128256 * 8192


def test_deepseeks_fp8_has_a_scale_for_each_block() -> None:
    shape = catalogue.find("DeepSeek-R1").shape
    matrix = 7168 * 2048
    experts = 58 * 256 * 3 * (matrix + matrix // 128 // 128 * 4)
    assert weights_by_kind(shape, "fp8").expert == experts
    # 576 rows of latents are four and a half blocks, which take the scales of five.
    assert FP8_BLOCKS.nbytes(Span(0, 576), Span(0, 7168)) == 576 * 7168 + 5 * 56 * 4


@pytest.mark.parametrize(("model", "total"), [("gpt-oss-20b", 13_761_264_768), ("gpt-oss-120b", 65_248_815_744)])
def test_gpt_oss_to_the_byte(model: str, total: int) -> None:
    """The total_size of the index of its safetensors, from memory."""
    assert weight_bytes(catalogue.find(model).shape, "mxfp4") == total


def test_gpt_oss_keeps_attention_in_16_bits() -> None:
    shape = catalogue.find("gpt-oss-120b").shape
    full, small = weights_by_kind(shape, "bf16"), weights_by_kind(shape, "mxfp4")
    assert small.linear == full.linear
    assert small.expert < full.expert / 3.7


@pytest.mark.parametrize(
    ("format", "per_number"),
    [(INT8, 8 + 24 / 128), (INT4, 4 + 20 / 128), (MXFP4, 4 + 8 / 32), (NVFP4, 4 + 8 / 16)],
)
def test_bits_per_number(format: object, per_number: float) -> None:
    assert format.nbytes(Span(0, 256), Span(0, 1024)) * 8 == 256 * 1024 * per_number  # type: ignore[attr-defined]


def test_a_cut_through_a_group_duplicates_its_scale() -> None:
    left, right = INT4.nbytes(Span(0, 8), Span(0, 192)), INT4.nbytes(Span(0, 8), Span(192, 256))
    assert left + right == INT4.nbytes(Span(0, 8), Span(0, 256)) + 8 * 2.5


@given(st.sampled_from(NAMES), st.integers(1, 8))
def test_even_ranks_together_weigh_little_more_than_the_model(precision: str, ranks: int) -> None:
    shape = catalogue.find("Qwen3-8B").shape
    total = sum(weight_bytes(shape, precision, place) for place in cut_places(shape, [1.0] * ranks, [36]))
    assert weight_bytes(shape, precision) <= total <= 1.01 * weight_bytes(shape, precision)


@given(st.sampled_from(NAMES), st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_stages_weigh_what_the_model_weighs(precision: str, cuts: list[int]) -> None:
    shape = catalogue.find("Qwen3-8B").shape
    stages = [*cuts, len(shape.layers) - sum(cuts)] if sum(cuts) < len(shape.layers) else [len(shape.layers)]
    parts = cut_places(shape, [1.0], stages)
    assert sum(weight_bytes(shape, precision, place) for place in parts) == weight_bytes(shape, precision)


def test_a_tied_head_is_held_again_on_a_stage_without_the_embedding() -> None:
    first, last = cut_places(SMOLLM2, [1.0], [15, 15])
    assert weights_by_kind(SMOLLM2, "bf16", whole(SMOLLM2)).head == 0
    assert weights_by_kind(SMOLLM2, "bf16", first).head == 0
    assert weights_by_kind(SMOLLM2, "bf16", last).head == weights_by_kind(SMOLLM2, "bf16", first).embedding


def test_mixes_are_in_order_of_their_bits() -> None:
    shape = catalogue.find("Llama-3-8B").shape
    sizes = [weight_bytes(shape, mix) for mix in ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_m")]
    assert sizes == sorted(sizes)
    assert set(MIXES.values()) <= set(BITS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BF16", "bf16"),
        ("FP16", "fp16"),
        ("F16", "fp16"),
        ("float32", "fp32"),
        ("GPTQ-Int4", "int4"),
        ("GPTQ-Int8", "int8"),
        ("AWQ", "int4"),
        ("4-bit", "int4"),
        ("8bit", "int8"),
        ("Int4", "int4"),
        ("NVFP4", "nvfp4"),
        ("MXFP4/FP8", "mxfp4"),
        ("Q4_K_M", "q4_k_m"),
        (" q8_0 ", "q8_0"),
        ("Q4_K", "q4_k_m"),
    ],
)
def test_names_that_people_write(name: str, expected: str) -> None:
    assert canonical(name) == expected


@pytest.mark.parametrize(("name", "hint"), [("fp9", "fp8"), ("q4_k_x", "q4_k_"), ("", "known")])
def test_unknown_names(name: str, hint: str) -> None:
    with refuses(ConfigError, "unknown-precision", repr(name), hint):
        canonical(name)
    with refuses(ConfigError, "unknown-precision"):
        weight_bytes(SMOLLM2, name)
