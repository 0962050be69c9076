"""Layers that kernels compute in one call, as an optimisation of specs that they know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from weft.kernels.base import DenseLayer, FusedStage, KVCache
from weft.kernels.batch import Batch
from weft.layers.mlp import MLPBlock

if TYPE_CHECKING:
    from weft.models.decoder import DecoderLayer


class FusedLayers:
    """Consecutive layers with one rotary embedding that run as one call of the kernels."""

    def __init__(self, layers: Sequence[DecoderLayer], stage: FusedStage) -> None:
        self.layers, self._stage = layers, stage
        self._rope = layers[0].mixer.rope

    def __call__(self, residual: torch.Tensor, caches: Sequence[KVCache], batch: Batch) -> torch.Tensor:
        """Run all layers: [T, hidden] -> [T, hidden], in place. `caches` has one KV cache per layer."""
        return self._stage(residual, self._rope.angles, caches, batch)


def describe_layer(layer: DecoderLayer) -> DenseLayer | None:
    """A layer as fused kernels read it; None if it is of a kind that they do not know.

    They know grouped-query attention and a dense MLP with a SiLU gate, each behind an RMS norm.
    """
    mixer, ffn, spec = layer.mixer, layer.ffn, layer.spec
    if not isinstance(ffn, MLPBlock) or not ffn.spec.gated or ffn.spec.activation != "silu":
        return None
    norms = layer.mixer_norm, layer.ffn_norm
    if spec.norms != "pre" or any(norm is None or norm.bias is not None for norm in norms) or mixer.spec.sinks:
        return None
    assert layer.mixer_norm is not None and layer.ffn_norm is not None
    return DenseLayer(
        attention_norm=layer.mixer_norm.weight,
        qkv=mixer.qkv.weight,
        head_norm=mixer.head_norm,
        out=mixer.out.weight,
        mlp_norm=layer.ffn_norm.weight,
        gate_up=ffn.up.weight,
        down=ffn.down.weight,
        q_heads=mixer.q_heads,
        window=mixer.spec.window,
        scale=mixer.spec.scale,
        eps=layer.mixer_norm.eps,
    )
