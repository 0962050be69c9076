"""Model shapes for tests: one that is real, and a hypothesis strategy for all that could be."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from weft.architectures.registry import ARCHITECTURES, find_architecture
from weft.architectures.shape import Attention, Dense, Experts, LatentAttention, LayerSpec, ModelShape, Norm, Rope
from weft.plan.rules import ExpertCut


def dense_shape(
    *,
    layers: int,
    hidden: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    max_positions: int,
    architecture: str = "LlamaForCausalLM",
    rope: Rope | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    norm_eps: float = 1e-6,
    **fields: Any,
) -> ModelShape:
    """A decoder of equal layers, each with attention and a dense MLP; `fields` are others of ModelShape."""
    names = find_architecture(architecture).names
    mixer = Attention(
        heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope or Rope(),
        qk_norm="head" if qk_norm else "none",
        bias=qkv_bias,
        out_bias=out_bias,
        sinks=bool(names.sinks),
    )
    layer = LayerSpec(
        mixer=mixer,
        ffn=Dense(width=ffn, gated=names.gated, bias=mlp_bias),
        norms=find_architecture(architecture).norms,
    )
    norm = Norm(kind=find_architecture(architecture).config.norm, eps=norm_eps)
    return ModelShape(
        architecture=architecture,
        layers=(layer,) * layers,
        hidden=hidden,
        vocab=vocab,
        max_positions=max_positions,
        norm=norm,
        **fields,
    )


def repeated(shape: ModelShape, count: int) -> ModelShape:
    """The shape with `count` layers like its first."""
    return replace(shape, layers=shape.layers[:1] * count)


def windows(shape: ModelShape) -> tuple[int | None, ...]:
    """The sliding window of each layer; () if no layer has one."""
    return tuple(layer.window for layer in shape.layers) if shape.has_windows else ()


def figures(shape: ModelShape) -> dict[str, Any]:
    """Figures that all layers of a shape share, by the names of the arguments of `dense_shape`."""
    mixer, ffn = shape.mixer, shape.layers[-1].ffn
    attention = {} if isinstance(mixer, LatentAttention) else {"qkv_bias": mixer.bias, "out_bias": mixer.out_bias}
    return {
        "layers": len(shape.layers),
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "norm_eps": shape.norm.eps,
        "windows": windows(shape),
        "mlp_bias": ffn.bias,
        "qk_norm": isinstance(mixer, Attention) and mixer.qk_norm != "none",
        **attention,
    }


def with_attention(shape: ModelShape, **fields: Any) -> ModelShape:
    """The shape with these fields of every layer's attention."""
    return replace(shape, layers=tuple(replace(layer, mixer=replace(layer.mixer, **fields)) for layer in shape.layers))


def with_experts(shape: ModelShape, experts: Experts) -> ModelShape:
    """The shape with these experts in every layer."""
    return replace(shape, layers=tuple(replace(layer, ffn=experts) for layer in shape.layers))


def with_ffn(shape: ModelShape, **fields: Any) -> ModelShape:
    """The shape with these fields of every layer's feed-forward part."""
    return replace(shape, layers=tuple(replace(layer, ffn=replace(layer.ffn, **fields)) for layer in shape.layers))


SMOLLM2 = dense_shape(
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
def layouts(draw: st.DrawFn) -> tuple[ModelShape, tuple[float, ...], tuple[int, ...]]:
    """A shape with tensor weights and layers per stage that it can have."""
    shape = draw(shapes())
    ranks = draw(st.integers(1, min(8, shape.q_heads)))
    weights = draw(st.lists(st.floats(0.05, 20), min_size=ranks, max_size=ranks))
    borders = sorted(draw(st.sets(st.integers(1, len(shape.layers) - 1), max_size=3))) if len(shape.layers) > 1 else []
    stages = [b - a for a, b in zip([0, *borders], [*borders, len(shape.layers)], strict=True)]
    return shape, tuple(weights), tuple(stages)


MIXED = (
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "GptOssForCausalLM",
)
LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


@st.composite
def planned_shapes(draw: st.DrawFn) -> ModelShape:
    """Small models of every architecture that the planner knows, with experts and latent attention."""
    shape = draw(shapes())
    architecture = draw(st.sampled_from(sorted(ARCHITECTURES)))
    known = find_architecture(architecture)
    mixer, dense = shape.mixer, shape.layers[0].ffn
    assert isinstance(mixer, Attention) and isinstance(dense, Dense)
    mixer = replace(mixer, sinks=bool(known.names.sinks))
    dense = replace(dense, gated=known.names.gated)
    experts, dense_layers = None, set[int]()
    if architecture in (*MIXED, *LATENT):
        experts = draw(mixtures(has_shared=architecture in LATENT or known.config.shared_gate))
        gated = known.config.shared_gate and experts.shared > 0
        corrected = bool(known.names.correction) and draw(st.booleans())
        experts = replace(experts, shared_gate=gated, bias=bool(known.names.stacks), correction=corrected)
        dense_layers = draw(st.sets(st.integers(0, len(shape.layers) - 1), max_size=3))
    norms = known.norms
    layer = LayerSpec(
        mixer=draw(latent_attention(mixer.heads)) if architecture in LATENT else mixer, ffn=dense, norms=norms
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
