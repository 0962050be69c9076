"""Layers that kernels with one call for a whole stage know, as data; ranks/models/decoder.py describes them to the
kernels."""

from __future__ import annotations

from weft.checkpoint.architectures.shape import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    LatentAttention,
    LayerSpec,
    Mixer,
    ModelShape,
)


def is_fused(shape: ModelShape) -> bool:
    """Return True if fused kernels know all layers of a model."""
    return shape.norm.kind == "rms" and all(spec == known_spec(spec.mixer, spec.ffn) for spec in shape.layers)


def known_spec(mixer: Mixer, ffn: FeedForward) -> LayerSpec:
    """The layer of this mixer and feed-forward part that fused kernels compute: all that is not named here is as
    usual."""
    if isinstance(mixer, LatentAttention):
        return LayerSpec(mixer=mixer, ffn=known_ffn(ffn), norms="pre")
    return LayerSpec(
        mixer=Attention(
            heads=mixer.heads,
            kv_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            scale=mixer.scale,
            rope=mixer.rope,
            window=mixer.window,
            qk_norm="none" if mixer.qk_norm == "none" else "head",
            bias=mixer.bias,
            out_bias=mixer.out_bias,
            sinks=mixer.sinks,
        ),
        ffn=known_ffn(ffn),
        norms="pre",
    )


def known_ffn(ffn: FeedForward) -> FeedForward:
    if isinstance(ffn, Dense):
        return Dense(width=ffn.width, activation="silu", gated=True, bias=ffn.bias)
    return Experts(
        count=ffn.count,
        top_k=ffn.top_k,
        width=ffn.width,
        shared=ffn.shared,
        shared_width=ffn.shared_width,
        shared_gate=ffn.shared_gate,
        scoring=ffn.scoring,
        normalised=ffn.normalised,
        scaling=ffn.scaling,
        groups=ffn.groups,
        top_groups=ffn.top_groups,
        group_score=ffn.group_score,
        correction=ffn.correction,
        activation="silu",
        gain=ffn.gain,
        limit=ffn.limit,
        up_offset=ffn.up_offset,
        bias=ffn.bias,
    )
