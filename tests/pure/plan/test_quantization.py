"""Tensors that a plan holds quantised, their bytes, and the cuts that they forbid."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.log_events import logged
from tests.pure.machines import H100, NOTHING, checkpoint, host, rig
from tests.pure.shapes import SMOLLM2, with_attention
from tests.refusals import has_values, refuses
from weft.checkpoint.architectures.parameters import model_parameters
from weft.checkpoint.architectures.place import Span, whole
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.checkpoint import Checkpoint
from weft.checkpoint.files import gguf_types
from weft.checkpoint.files.tensor import ENCODINGS
from weft.checkpoint.names import catalogue
from weft.checkpoint.quantised.precision import held_precision, sum_by_kind, weight_bytes
from weft.checkpoint.quantised.schemes import GGUF_SCHEMES, ONLINE_QUANTIZATIONS, SCHEMES, scheme_for_types
from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError
from weft.plan.layout import build_plan
from weft.plan.plan import Plan
from weft.plan.quantization import precision_of
from weft.planner.execution.execution import plan_to_run

MATRICES = [
    f"self_attn.{name}_proj.weight" if name in "qkvo" else f"mlp.{name}_proj.weight"
    for name in ("q", "k", "v", "o", "gate", "up", "down")
]
EMBEDDING = "model.embed_tokens.weight"


def stored(kind: str, embedding: str = "Q8_0", **others: str) -> dict[str, str]:
    """The tensors of a GGUF file whose matrices are of `kind`, but for `others` by the last part of their names."""
    found = {EMBEDDING: embedding}
    for layer in range(len(SMOLLM2.layers)):
        for name in MATRICES:
            found[f"model.layers.{layer}.{name}"] = others.get(name.split(".")[1].removesuffix("_proj"), kind)
    return found


def plan(quantised: dict[str, str] | None = None, *, shape: ModelShape = SMOLLM2, gpus: int = 0, **flags: Any) -> Plan:
    kind: Any = "gguf" if quantised else "safetensors"
    checkpoint = Checkpoint(model="m", path="/m", format=kind, shape=shape, generation={}, quantised=quantised or {})
    return build_plan(EngineConfig(model="m", **flags), checkpoint, host(gpus))


def test_a_file_is_held_as_it_lies_by_default() -> None:
    got = plan(stored("Q4_1"))
    assert got.quantization == "gguf" and got.schemes == stored("Q4_1")
    # All of the file but its norms, which are computed in 16 bits.
    norms = 61 * 576
    assert got.weight_bytes(0) == weight_bytes(SMOLLM2, "q4_1") - 2 * norms
    assert msgspec.json.decode(msgspec.json.encode(got), type=Plan) == got


@pytest.mark.parametrize(
    "flags",
    [
        {"quantization": "none"},
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"attention_backend": "torch"},
        {"gpus": 1, "attention_backend": "torch"},
        {"gpus": 1, "dtype": "float32"},
    ],
    ids=str,
)
def test_or_in_what_is_computed_in(flags: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weft")
    got = plan(stored("Q4_1"), **flags)
    assert got.quantization == "none" and not got.schemes
    assert got.weight_bytes(0) == weight_bytes(SMOLLM2, "fp32" if got.dtype == "float32" else "bf16")
    # What nobody asked for is said.
    told = [] if flags == {"quantization": "none"} else [{"dtype": got.dtype}]
    assert logged(caplog, "weights-dequantised") == told and len(caplog.records) == len(told)


@pytest.mark.parametrize(
    "flags", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"attention_backend": "triton"}], ids=str
)
def test_gpus_hold_a_file_as_it_lies_too(flags: dict[str, Any]) -> None:
    """On a card that is too old for bfloat16 as well."""
    got = plan(stored("Q4_0"), gpus=2, tensor_parallel_size=3, device_ids=(0, 1, 0), **flags)
    assert got.quantization == "gguf" and got.schemes == stored("Q4_0")


def test_parts_of_a_parameter_are_held_alike(caplog: pytest.LogCaptureFixture) -> None:
    """q, k and v are multiplied together: in a scheme that has room for each of them."""
    caplog.set_level(logging.INFO, "weft")
    got = plan(stored("Q4_K", v="Q6_K", down="Q5_0"))
    kinds = {"q": "Q8_MIN", "k": "Q8_MIN", "v": "Q8_MIN", "o": "Q4_K", "gate": "Q4_K", "up": "Q4_K", "down": "Q8_0"}
    for name in MATRICES:
        kind = name.split(".")[1].removesuffix("_proj")
        assert got.schemes[f"model.layers.7.{name}"] == kinds[kind]
    (line,) = [record.message for record in caplog.records]
    mixed = ("60 of Q4_K as Q8_MIN", "30 of Q5_0 as Q8_0", "30 of Q6_K as Q8_MIN")
    has_values(line, "120 of 211", ", ".join(mixed))


def test_beside_parts_in_16_bits_they_have_16_bits(caplog: pytest.LogCaptureFixture) -> None:
    there = {name: kind for name, kind in stored("Q4_1").items() if ".v_proj." not in name}
    got = plan(there)
    assert {name.split(".")[-2] for name in got.schemes} == {
        "embed_tokens",
        *(["o_proj", "gate_proj", "up_proj", "down_proj"]),
    }
    (line,) = [record.message for record in caplog.records]
    has_values(line, "60 of 181", "bfloat16", "60 of Q4_1")


def test_the_wording_of_what_is_held_otherwise(
    caplog: pytest.LogCaptureFixture, golden: Callable[[str, str], None]
) -> None:
    caplog.set_level(logging.INFO, "weft")
    plan(stored("Q4_K", v="Q6_K", down="Q5_0"))
    plan({name: kind for name, kind in stored("Q4_1").items() if ".v_proj." not in name})
    golden("quantization.txt", "".join(f"{record.message}\n" for record in caplog.records))


@pytest.mark.parametrize(
    ("types", "scheme"),
    [
        ("Q4_0", "Q4_0"),
        ("Q4_0 Q4_1", "Q4_1"),
        ("Q4_K", "Q4_K"),
        ("Q4_K Q4_1", "Q4_1"),
        ("Q5_0", "Q8_0"),
        ("Q5_0 Q8_0", "Q8_0"),
        ("Q5_1", "Q8_MIN"),
        ("Q5_K", "Q8_MIN"),
        ("Q4_K Q8_0", "Q8_MIN"),
        ("IQ4_XS IQ4_NL", "Q8_0"),
        ("Q3_K", "Q4_16"),
        ("Q2_K", "Q4_16_MIN"),
        ("Q3_K Q4_K", "Q4_16_MIN"),
        ("Q3_K Q6_K", "Q8_0"),
        ("Q2_K Q5_K", "Q8_MIN"),
        ("Q4_1 F16", None),
        ("", None),
    ],
)
def test_schemes_of_the_types(types: str, scheme: str | None) -> None:
    assert scheme_for_types(types.split() or [""]) == scheme


@pytest.mark.parametrize("mix", gguf_types.MIXES)
def test_a_mix_is_planned_as_it_is_held(mix: str) -> None:
    """To the byte, in whole layers and in parts of them, of a model whose rows are super-blocks, and of one whose rows
    are not; and it is found again in what was planned."""
    for shape in (SMOLLM2, catalogue.find("Llama-3.1-8B").shape):
        types = {
            part.source.format(layer=layer): gguf_types.gguf_type(shape, mix, parameter, part, layer or 0)
            for parameter, layer in model_parameters(shape)
            for part in parameter.parts
        }
        there = {name: kind for name, kind in types.items() if kind in GGUF_SCHEMES}
        got = plan(
            there,
            shape=shape,
            pipeline_split=(7, len(shape.layers) - 7),
            tensor_parallel_size=3 - (len(shape.layers) == 32),
        )
        assert got.quantization == "gguf" and len(got.schemes) == len(there)
        for place in got.places:
            assert got.weight_bytes(place.rank) == sum_by_kind(shape, held_precision(mix), place).total
        found = precision_of(shape, got.quantization, got.schemes, got.dtype)
        assert sum_by_kind(shape, held_precision(found), got.places[0]) == sum_by_kind(
            shape, held_precision(mix), got.places[0]
        )


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("asked", ONLINE_QUANTIZATIONS)
def test_made_at_load_it_takes_what_the_planner_says(asked: str, gpus: int) -> None:
    """From whatever the checkpoint is."""
    precision, others_only = ONLINE_QUANTIZATIONS[asked], asked in ("int8", "fp8")
    want = weight_bytes(SMOLLM2, precision)
    if asked == "fp8":  # a file has no scale for each row
        want = sum_by_kind(SMOLLM2, held_precision(precision), whole(SMOLLM2)).total
    in_16_bits = 0 if others_only else 2 * 61 * 576
    for quantised in (None, stored("Q4_0", embedding="Q4_0")):
        got = plan(quantised, quantization=asked, gpus=gpus)
        assert got.quantization == asked
        assert got.weight_bytes(0) == want - in_16_bits
        assert (EMBEDDING in got.schemes) != others_only


def test_int8_cuts_whole_groups_of_an_mlp() -> None:
    got = plan(quantization="int8", tensor_parallel_size=5, shape=with_attention(SMOLLM2, heads=10, kv_heads=5))
    assert [len(place.ffn) % 128 for place in got.places] == [0] * 5
    one = plan(quantization="int8", tensor_parallel_size=3)
    # Heads of 64 part a group of 128: both ranks hold its scale.
    assert sum(one.weight_bytes(rank) for rank in range(3)) > plan(quantization="int8").weight_bytes(0)


def test_bytes_of_what_is_cut() -> None:
    int8 = SCHEMES["INT8"]
    assert int8.nbytes(10, Span(0, 576)) == 10 * (576 + 5 * 3)
    assert int8.nbytes(10, Span(192, 384)) == 10 * (192 + 2 * 3)
    for name in ("Q4_0", "Q4_1", "Q8_0"):
        encoding = ENCODINGS[name]
        assert SCHEMES[name].nbytes(7, Span(32, 320)) == 7 * 9 * encoding.nbytes


def test_cuts_within_what_is_multiplied_at_once() -> None:
    narrow = msgspec.structs.replace(with_attention(SMOLLM2, heads=6, kv_heads=6, head_dim=80), hidden=704)
    with refuses(PlanError, "quantised-columns-off-grid", "0", "240", "o_proj.weight", "32", "--tensor"):
        plan(shape=narrow, quantization="int8", tensor_parallel_size=2)
    assert plan(shape=narrow, quantization="int8", pipeline_parallel_size=3).schemes
    assert plan(shape=narrow, quantization="none", tensor_parallel_size=2).stages == 1


def test_rows_that_are_no_multiple_stay_in_16_bits() -> None:
    odd = msgspec.structs.replace(SMOLLM2, hidden=600)
    got = plan(shape=odd, quantization="int8")
    assert {name.split(".")[-2] for name in got.schemes} == {"o_proj", "down_proj"}
    assert got.weight_bytes(0) == weight_bytes(odd, "int8")


def test_a_search_over_gpus_counts_what_will_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.probes.stored_speeds.load_speeds", lambda _: NOTHING)
    there, where = checkpoint("Llama-3.3-70B-Instruct"), rig(H100)
    with refuses(PlanError, "nothing-fits", "bf16", "143.3 GB", "141.1 GB"):
        plan_to_run(EngineConfig(model="m"), there, where)
    got = plan_to_run(EngineConfig(model="m", quantization="int8"), there, where)
    assert (got.stages, got.tensor_parallel, got.quantization) == (1, 1, "int8")


def test_impossible_quantizations() -> None:
    names = "auto, none, int8, int4, fp8, q4_0, q4_1, q8_0, gptq, awq, compressed"
    cases: tuple[tuple[dict[str, Any], str, tuple[str, ...]], ...] = (
        ({"quantization": "fp9"}, "unknown-choice", ("quantization", "'fp9'", names)),
        ({"quantization": "fbgemm_fp8"}, "checkpoint-quantised-already", ("fbgemm_fp8", "none of these")),
        ({"quantization": "awq_marlin"}, "checkpoint-quantised-already", ("awq_marlin", "none of these")),
        (
            {"quantization": "int4", "gpus": 1, "attention_backend": "torch"},
            "quantization-on-torch-backend",
            ("int4", "--attention-backend torch"),
        ),
        ({"quantization": "int4", "attention_backend": "torch"}, "quantization-on-torch-backend", ("int4",)),
        (
            {"quantization": "int8", "dtype": "float16"},
            "quantization-dtype-on-cpu",
            ("int8", "bfloat16 or float32", "float16"),
        ),
    )
    for flags, code, values in cases:
        with refuses(ConfigError, code, *values):
            plan(**flags)
