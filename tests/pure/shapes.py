"""Model shapes for tests: one that is real, and small ones."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import (
    Attention,
    Dense,
    Experts,
    LatentAttention,
    LayerSpec,
    ModelShape,
    Norm,
    Rope,
)


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
    mixer, ffn = shape.mixers[0], shape.layers[-1].ffn
    attention = {} if isinstance(mixer, LatentAttention) else {"qkv_bias": mixer.bias, "out_bias": mixer.out_bias}
    return {
        "layers": len(shape.layers),
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.mixers[0].head_dim,
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
