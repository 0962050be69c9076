"""Hypothesis strategies for shapes and layouts. They lie apart from tests/pure/shapes.py, which processes import that
need no hypothesis: it takes half a second."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st
from msgspec.structs import replace

from tests.pure.shapes import dense_shape
from weft.checkpoint.architectures.registry import ARCHITECTURES, find_architecture
from weft.checkpoint.architectures.shape import Attention, Dense, Experts, LatentAttention, LayerSpec, ModelShape

DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Small dense decoders of every kind: head_dim independent of hidden, odd vocabularies, all biases."""
    kv_heads = draw(st.integers(1, 6))
    return dense_shape(
        architecture=draw(st.sampled_from(DENSE)),
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
def with_other_heads(draw: st.DrawFn, shape: ModelShape) -> ModelShape:
    """The shape with other numbers of heads, of another length, in every second layer."""
    kv_heads = draw(st.integers(1, 6))
    heads, head_dim = kv_heads * draw(st.integers(1, 5)), 2 * draw(st.integers(1, 6))
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, heads=heads, kv_heads=kv_heads, head_dim=head_dim))
        if number % 2
        else layer
        for number, layer in enumerate(shape.layers)
    )
    return replace(shape, layers=layers)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelShape, tuple[float, ...], tuple[int, ...]]:
    """A shape with tensor weights and layers per stage that it can have. Every second layer may have other heads."""
    shape = draw(shapes())
    if draw(st.booleans()):
        shape = draw(with_other_heads(shape))
    ranks = draw(st.integers(1, min(8, shape.q_heads)))
    weights = draw(st.lists(st.floats(0.05, 20), min_size=ranks, max_size=ranks))
    borders = sorted(draw(st.sets(st.integers(1, len(shape.layers) - 1), max_size=3))) if len(shape.layers) > 1 else []
    stages = [b - a for a, b in zip([0, *borders], [*borders, len(shape.layers)], strict=True)]
    return shape, tuple(weights), tuple(stages)


@st.composite
def planned_shapes(draw: st.DrawFn) -> ModelShape:
    """Small models of every architecture that the planner knows, with experts and latent attention."""
    shape = draw(shapes())
    architecture = draw(st.sampled_from(sorted(ARCHITECTURES)))
    known = find_architecture(architecture)
    mixer, dense = shape.mixers[0], shape.layers[0].ffn
    assert isinstance(mixer, Attention) and isinstance(dense, Dense)
    mixer = replace(mixer, sinks=bool(known.names.sinks))
    dense = replace(dense, gated=known.names.gated)
    experts, dense_layers = None, set[int]()
    if known.config.has_experts:
        experts = draw(mixtures(has_shared=known.names.latent or known.config.shared_gate))
        gated = known.config.shared_gate and experts.shared > 0
        corrected = bool(known.names.correction) and draw(st.booleans())
        experts = replace(experts, shared_gate=gated, bias=bool(known.names.stacks), correction=corrected)
        dense_layers = draw(st.sets(st.integers(0, len(shape.layers) - 1), max_size=3))
    norms = known.norms
    layer = LayerSpec(
        mixer=draw(latent_attention(mixer.heads)) if known.names.latent else mixer, ffn=dense, norms=norms
    )
    return replace(
        shape,
        architecture=architecture,
        layers=tuple(
            layer if experts is None or number in dense_layers else replace(layer, ffn=experts)
            for number in range(len(shape.layers))
        ),
        norm=replace(shape.norm, kind=known.config.norm),
        max_positions=shape.max_positions % 40 + 1,
    )


@st.composite
def mixtures(draw: st.DrawFn, *, has_shared: bool) -> Experts:
    """A small mixture of experts."""
    count, width = draw(st.integers(1, 6)), draw(st.integers(8, 70))
    shared = draw(st.integers(0, 2)) if has_shared else 0
    return Experts(
        count=count, top_k=draw(st.integers(1, count)), width=width, shared=shared, shared_width=shared * width
    )


@st.composite
def latent_attention(draw: st.DrawFn, heads: int) -> LatentAttention:
    return LatentAttention(
        heads=heads,
        kv_lora_rank=draw(st.integers(1, 9)),
        q_lora_rank=draw(st.none() | st.integers(1, 9)),
        nope_dim=draw(st.integers(1, 6)),
        rope_dim=2 * draw(st.integers(1, 3)),
        v_dim=draw(st.integers(1, 6)),
        scale=1.0,
    )


class ExpertCut(NamedTuple):
    """Number of attention groups that share the experts, and number of parts into which whole experts are dealt."""

    data_parallel: int = 1
    expert_parallel: int = 1


@st.composite
def planned_layouts(draw: st.DrawFn) -> tuple[ModelShape, tuple[float, ...], tuple[int, ...], ExpertCut]:
    """One of those with tensor weights, layers per stage and a way to share experts that it can have."""
    shape = draw(planned_shapes())
    most = min(6, shape.q_heads, shape.experts.width if shape.experts else 6)
    ranks = draw(st.integers(1, most))
    weights = draw(st.lists(st.floats(0.05, 20), min_size=ranks, max_size=ranks))
    borders = sorted(draw(st.sets(st.integers(1, len(shape.layers) - 1), max_size=2))) if len(shape.layers) > 1 else []
    stages = [b - a for a, b in zip([0, *borders], [*borders, len(shape.layers)], strict=True)]
    sharing = ExpertCut()
    if shape.experts:
        groups = draw(st.integers(1, max(1, most // ranks)))
        dealt = [size for size in range(1, shape.experts.count + 1) if ranks * groups % size == 0]
        sharing = ExpertCut(groups, draw(st.sampled_from(dealt)))
    return shape, tuple(weights), tuple(stages), sharing
