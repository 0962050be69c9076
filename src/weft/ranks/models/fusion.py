"""Layers that kernels compute in one call, as an optimisation of specs that they know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from weft.checkpoint.architectures.fused import known_spec
from weft.ranks.kernels.base import KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.fused import FusedLatent, FusedLayer, FusedMixture, FusedMLP, FusedStage, PhaseTimes
from weft.ranks.kernels.latents import LatentNorm
from weft.ranks.layers.attention import AttentionBlock
from weft.ranks.layers.experts import ExpertsBlock
from weft.ranks.layers.latent import LatentAttentionBlock
from weft.ranks.layers.mlp import MLPBlock

if TYPE_CHECKING:
    from weft.ranks.models.decoder import DecoderLayer


class FusedLayers:
    """Consecutive layers with one rotary embedding that run as one call of the kernels."""

    def __init__(self, layers: Sequence[DecoderLayer], stage: FusedStage) -> None:
        self.layers, self._stage, self._rope = layers, stage, layers[0].mixer.rope

    def __call__(self, residual: torch.Tensor, caches: Sequence[KVCache], batch: Batch) -> torch.Tensor:
        """Run all layers: [T, hidden] -> [T, hidden], in place. `caches` has one KV cache per layer."""
        return self._stage(residual, self._rope.angles, caches, batch)

    def serve_others(self, group_tokens: Sequence[int]) -> None:
        """Compute this rank's experts on the tokens of the other attention groups; this group has none in the step."""
        self._stage.serve_others(group_tokens)

    def trace(self, log: PhaseTimes | None, first: int) -> None:
        """Give the phases of every later step to `log`, with layers counted from `first` on; None ends that."""
        self._stage.trace(
            log and (lambda layer, phase, began_ns, ended_ns: log(first + layer, phase, began_ns, ended_ns))
        )

    def forget_caches(self) -> None:
        """Hold the KV caches of the last step no longer."""
        self._stage.forget_caches()


def describe_layer(layer: DecoderLayer) -> FusedLayer | None:
    """A layer as fused kernels read it; None if it is of a kind that they do not know.

    They know grouped-query attention, with sinks or without, latent attention, and an MLP or a mixture of experts with
    a SiLU gate, each behind an RMS norm.
    """
    mixer, ffn = layer.mixer, layer.ffn
    if layer.mixer_norm is None or layer.ffn_norm is None or layer.mixer_norm.kind != "rms":
        return None
    if layer.spec != known_spec(mixer.spec, ffn.spec):
        return None
    return FusedLayer(
        attention_norm=layer.mixer_norm.weight,
        **describe_mixer(mixer),
        out=mixer.out.weight,
        ffn_norm=layer.ffn_norm.weight,
        ffn=describe_ffn(ffn),
        q_heads=mixer.q_heads,
        window=mixer.spec.window,
        scale=mixer.spec.scale,
        eps=layer.mixer_norm.eps,
    )


def describe_mixer(mixer: AttentionBlock | LatentAttentionBlock) -> dict[str, Any]:
    """The fields of a FusedLayer in which kinds of attention differ."""
    if isinstance(mixer, AttentionBlock):
        return {"qkv": mixer.qkv.weight, "head_norm": mixer.head_norm, "sinks": mixer.sinks}
    norm = None if mixer.q_norm is None else LatentNorm(mixer.q_norm.weight, mixer.q_norm.eps)
    latent = FusedLatent(
        q_down=mixer.q_down and mixer.q_down.weight,
        q_norm=norm,
        kv_down=mixer.kv_down.weight,
        kv_norm=mixer.kv_norm,
        products=mixer.kv_up,
        interleaved=mixer.spec.interleaved,
    )
    return {"qkv": mixer.q_up.weight, "head_norm": None, "sinks": None, "latent": latent}


def describe_ffn(ffn: MLPBlock | ExpertsBlock) -> FusedMLP | FusedMixture:
    """The feed-forward part of a layer that fused kernels know."""
    if isinstance(ffn, MLPBlock):
        return FusedMLP(ffn.up.weight, ffn.down.weight)
    shared, weigher = None, None
    if ffn.shared is not None:
        shared = ffn.shared.products
        weigher = ffn.shared.weigher and ffn.shared.weigher.weight
    exchange = ffn.exchange.ranks if ffn.exchange else None
    return FusedMixture(ffn.spec, ffn.router.weight, ffn.experts, shared, weigher, exchange, ffn.correction)
