"""Model shapes for tests: one that is real, and a hypothesis strategy for all that could be."""

from __future__ import annotations

from hypothesis import strategies as st

from weft.facts.parameters import RUNNABLE
from weft.facts.shape import ModelShape

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
