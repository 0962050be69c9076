"""Models in the mixes of GGUF's types that llama.cpp makes: held in few bits, in every layout, with the logits of what
is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cpu.layouts import logits_of, plan_for
from tests.cpu.test_weights import SHAPE
from tests.pure.gguf_files import write_model
from tests.pure.shapes import repeated, with_attention, with_experts, with_ffn
from weft import LLM, SamplingParams
from weft.checkpoint.architectures.parameters import model_parameters
from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import Experts, ModelShape
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.files.gguf_types import gguf_type
from weft.checkpoint.quantised.precision import held_precision, sum_by_kind
from weft.checkpoint.tensor_index import expected_tensors

PROMPT = list(range(3, 60))
# Whose rows are whole super-blocks, which layouts cut, and whose are not.
WIDE = repeated(with_ffn(with_attention(SHAPE, bias=False, out_bias=False), bias=False), 3)
NARROW = msgspec.structs.replace(
    with_ffn(with_attention(WIDE, heads=6, kv_heads=3, head_dim=32), width=320), hidden=192
)
LAYOUTS = {
    "whole": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp 3:1": {"tensor_split": (3, 1)},
    "pp 2,1": {"pipeline_split": (2, 1)},
    "pp 1,2, tp 2:1": {"pipeline_split": (1, 2), "tensor_split": (2, 1)},
}


def mixture(shape: ModelShape, architecture: str, **fields: Any) -> ModelShape:
    """The shape with experts in each layer, of this architecture."""
    known = find_architecture(architecture)
    experts = Experts(count=5, top_k=2, width=512, shared_gate=known.config.shared_gate, **fields)
    shape = with_attention(shape, bias=known.config.bias != "none", out_bias=known.config.bias == "all")
    return msgspec.structs.replace(with_experts(shape, experts), architecture=architecture)


MIXTURES = {
    "mixtral": mixture(WIDE, "MixtralForCausalLM"),
    "qwen2-moe": mixture(WIDE, "Qwen2MoeForCausalLM", shared=1, shared_width=256, normalised=False),
    "gpt-oss": mixture(
        with_attention(WIDE, sinks=True), "GptOssForCausalLM", bias=True, gain=1.702, limit=7.0, up_offset=1.0
    ),
}


def types_of(shape: ModelShape, mix: str) -> dict[str, str]:
    experts = range(shape.experts.count) if shape.experts else (None,)
    return {
        part.source.format(layer=layer, expert=expert): gguf_type(shape, mix, parameter, part, layer or 0)
        for parameter, layer in model_parameters(shape)
        for part in parameter.parts
        for expert in (experts if parameter.role == "expert" else (None,))
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixes")


@pytest.mark.parametrize(
    ("mix", "shape"),
    [
        ("q4_k_m", WIDE),
        ("q4_k_m", NARROW),
        ("q5_k_m", WIDE),
        ("q6_k", WIDE),
        ("q3_k_m", WIDE),
        ("q2_k", WIDE),
        ("iq4_xs", WIDE),
        ("iq4_nl", NARROW),
        ("q5_1", NARROW),
    ],
    ids=lambda it: it if isinstance(it, str) else f"{it.hidden} columns",
)
def test_logits_are_those_of_what_is_stored(folder: Path, mix: str, shape: ModelShape) -> None:
    path = folder / f"{mix}-{shape.hidden}.gguf"
    write_model(path, shape, "F32", others=types_of(shape, mix), std=0.06)
    want = logits_of(plan_for(path, "whole", quantization="none", dtype="float32"), PROMPT)
    assert want.isfinite().all()
    for name in LAYOUTS if mix == "q4_k_m" else ("whole", "pp 1,2, tp 2:1"):
        plan = plan_for(path, "whole", **LAYOUTS[name])
        assert plan.quantization == "gguf"
        assert len(plan.schemes) == sum(len(dims) == 2 for _, dims in expected_tensors(shape)), (
            "nothing is left in 16 bits"
        )
        for place in plan.places:
            assert plan.weight_bytes(place.rank) == sum_by_kind(shape, held_precision(mix), place).total
        got = logits_of(plan, PROMPT)
        # Activations are rounded to bf16, and to 8 bits.
        assert (got - want).abs().mean() <= 0.06 * want.std(), name
        assert (got - want).abs().max() <= 0.5 * want.std(), name


@pytest.mark.each_value
@pytest.mark.parametrize("model", MIXTURES)
@pytest.mark.parametrize("mix", ["q4_0", "q8_0", "q4_k_m", "q6_k", "mxfp4_moe"])
def test_experts_are_held_as_they_are_stored(folder: Path, model: str, mix: str) -> None:
    shape, path = MIXTURES[model], folder / f"{mix}-{model}.gguf"
    write_model(path, shape, "F32", others=types_of(shape, mix), std=0.06)
    want = logits_of(plan_for(path, "whole", quantization="none", dtype="float32"), PROMPT)
    assert want.isfinite().all()
    matrices = {
        part.source.format(layer=layer, expert=0)
        for parameter, layer in model_parameters(shape)
        for part in parameter.parts
        if part.cols is not None and parameter.role != "router"
    }
    for name in ("whole", "tp 3:1", "pp 1,2, tp 2:1"):
        plan = plan_for(path, "whole", **LAYOUTS[name])
        assert plan.quantization == "gguf" and set(plan.schemes) == matrices
        for place in plan.places:
            assert plan.weight_bytes(place.rank) == sum_by_kind(shape, held_precision(mix), place).total
        got = logits_of(plan, PROMPT)
        # Where rounding changes the choice of an expert, a position differs by far more than the others.
        assert (got - want).abs().median() <= 0.06 * want.std(), name


def test_an_engine_answers_with_them(folder: Path) -> None:
    """The same tokens from one rank and from stages."""
    path = folder / "answers.gguf"
    write_model(path, WIDE, "Q4_K", others={"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K"}, std=0.06)
    assert set(resolve(str(path)).quantised.values()) == {"Q4_K", "Q6_K"}

    def tokens(**how: object) -> list[int]:
        engine = {"max_model_len": 64, "executor": "inline", "kv_cache_memory_bytes": 1 << 22, "device": "cpu"}
        with LLM(str(path), skip_tokenizer_init=True, **engine, **how) as llm:  # type: ignore[arg-type]
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            (answer,) = llm.generate([{"prompt_token_ids": PROMPT[:9]}], params, use_tqdm=False)
            return answer.outputs[0].token_ids

    assert tokens() == tokens(pipeline_split=(2, 1))
