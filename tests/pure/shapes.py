"""Model shapes for tests: one that is real, and a hypothesis strategy for all that could be."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec.structs import replace

from weft.architectures.parameters import ARCHITECTURES, RUNNABLE
from weft.architectures.shape import Experts, Latent, ModelShape

SMOLLM2 = ModelShape(
    architecture="LlamaForCausalLM",
    layers=30,
    hidden=576,
    q_heads=9,
    kv_heads=3,
    head_dim=64,
    ffn=1536,
    vocab=49152,
    max_positions=8192,
    tied=True,
)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Small dense decoders of every kind: head_dim independent of hidden, odd vocabularies, all biases."""
    kv_heads = draw(st.integers(1, 6))
    return ModelShape(
        architecture=draw(st.sampled_from(RUNNABLE)),
        layers=draw(st.integers(1, 9)),
        hidden=draw(st.integers(1, 24)),
        q_heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 6)),
        ffn=draw(st.integers(30, 300)),
        vocab=draw(st.integers(30, 300)),
        max_positions=draw(st.integers(1, 4096)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelShape, tuple[float, ...], tuple[int, ...]]:
    """A shape with tensor weights and layers per stage that it can have."""
    shape = draw(shapes())
    ranks = draw(st.integers(1, min(8, shape.q_heads)))
    weights = draw(st.lists(st.floats(0.05, 20), min_size=ranks, max_size=ranks))
    borders = sorted(draw(st.sets(st.integers(1, shape.layers - 1), max_size=3))) if shape.layers > 1 else []
    stages = [b - a for a, b in zip([0, *borders], [*borders, shape.layers], strict=True)]
    return shape, tuple(weights), tuple(stages)


MIXED = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "MiniMaxM2ForCausalLM", "GptOssForCausalLM")
LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


@st.composite
def planned_shapes(draw: st.DrawFn) -> ModelShape:
    """Small models of every architecture that the planner knows, with experts and latent attention."""
    shape = draw(shapes())
    architecture = draw(st.sampled_from(ARCHITECTURES))
    experts, mla, head_dim = None, None, shape.head_dim
    if architecture in (*MIXED, *LATENT):
        count = draw(st.integers(1, 6))
        shared = draw(st.integers(0, 2)) if architecture in LATENT else 0
        ffn = draw(st.integers(8, 70))
        experts = Experts(
            count=count,
            top_k=draw(st.integers(1, count)),
            ffn=ffn,
            shared=shared,
            shared_ffn=shared * ffn,
            dense_layers=tuple(sorted(draw(st.sets(st.integers(0, shape.layers - 1), max_size=3)))),
        )
    if architecture in LATENT:
        nope, rope = draw(st.integers(1, 6)), 2 * draw(st.integers(1, 3))
        head_dim = nope + rope
        mla = Latent(
            kv_lora_rank=draw(st.integers(1, 9)),
            q_lora_rank=draw(st.none() | st.integers(1, 9)),
            nope_dim=nope,
            rope_dim=rope,
            v_dim=draw(st.integers(1, 6)),
        )
    return replace(
        shape,
        architecture=architecture,
        experts=experts,
        mla=mla,
        head_dim=head_dim,
        kv_heads=shape.q_heads if mla else shape.kv_heads,
        max_positions=shape.max_positions % 40 + 1,
    )


@st.composite
def planned_layouts(
    draw: st.DrawFn,
) -> tuple[ModelShape, tuple[float, ...], tuple[int, ...], tuple[int, int] | None]:
    """One of those with tensor weights, layers per stage and a way to deal experts out that it can have."""
    shape = draw(planned_shapes())
    most = min(6, shape.q_heads, shape.experts.ffn if shape.experts else 6)
    ranks = draw(st.integers(1, most))
    weights = draw(st.lists(st.floats(0.05, 20), min_size=ranks, max_size=ranks))
    borders = sorted(draw(st.sets(st.integers(1, shape.layers - 1), max_size=2))) if shape.layers > 1 else []
    stages = [b - a for a, b in zip([0, *borders], [*borders, shape.layers], strict=True)]
    replicas = shape.experts.count // ranks if shape.experts else 0
    group = None
    if replicas and draw(st.booleans()):
        count = draw(st.integers(1, replicas))
        group = draw(st.integers(0, count - 1)), count
    return shape, tuple(weights), tuple(stages), group
