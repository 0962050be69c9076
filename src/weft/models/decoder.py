"""The dense decoder, written once: Llama, Mistral, Qwen2, Qwen3 and SmolLM2 differ in data only."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch

from weft.comm import Comm
from weft.facts.shape import ModelShape
from weft.kernels.base import HeadNorm, Kernels, KVCache
from weft.kernels.batch import Batch
from weft.layers.embedding import Embedding, Head
from weft.layers.linear import ColumnLinear, RowLinear
from weft.planner.place import Place

# By name. Matrices are taken out as their layer is made: one that is packed for its product is then held once, not
# twice until the whole model is built.
Tensors = MutableMapping[str, torch.Tensor]


class Attention:
    """Attention over paged KV with this rank's heads."""

    def __init__(self, shape: ModelShape, place: Place, layer: int, tensors: Tensors, comm: Comm, kernels: Kernels):
        name = f"layers.{layer}.attention."
        self.q_heads = len(place.q_heads)
        self.scale = shape.head_dim**-0.5
        self.window = shape.window(layer)
        self.qkv = ColumnLinear(tensors.pop(name + "qkv.weight"), tensors.get(name + "qkv.bias"))
        self.out = RowLinear(tensors.pop(name + "out.weight"), tensors.get(name + "out.bias"), comm)
        self.norm = None
        if shape.qk_norm:
            self.norm = HeadNorm(tensors[name + "q_norm.weight"], tensors[name + "k_norm.weight"], shape.norm_eps)
        self.kernels = kernels

    def __call__(self, x: torch.Tensor, rope: torch.Tensor, cache: KVCache, batch: Batch) -> torch.Tensor:
        q = self.kernels.rotate_and_store(self.qkv(x), self.q_heads, rope, cache, batch, self.norm)
        return self.out(self.kernels.attend(q, cache, batch, self.scale, self.window))


class MLP:
    """silu(gate) * up, with this rank's columns of both."""

    def __init__(self, layer: int, tensors: Tensors, comm: Comm, kernels: Kernels) -> None:
        name = f"layers.{layer}.mlp."
        self.gate_up = ColumnLinear(tensors.pop(name + "gate_up.weight"), tensors.get(name + "gate_up.bias"))
        self.down = RowLinear(tensors.pop(name + "down.weight"), tensors.get(name + "down.bias"), comm)
        self.kernels = kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.kernels.silu_mul(self.gate_up(x)))


class Layer:
    """Attention and MLP, each behind its norm; the sum runs along in `residual`."""

    def __init__(self, shape: ModelShape, place: Place, layer: int, tensors: Tensors, comm: Comm, kernels: Kernels):
        self.attention_norm = tensors[f"layers.{layer}.attention_norm.weight"]
        self.attention = Attention(shape, place, layer, tensors, comm, kernels)
        self.mlp_norm = tensors[f"layers.{layer}.mlp_norm.weight"]
        self.mlp = MLP(layer, tensors, comm, kernels)
        self.kernels, self.eps = kernels, shape.norm_eps

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, rope: torch.Tensor, cache: KVCache, batch: Batch
    ) -> torch.Tensor:
        """`x` is what the layer before has still to add to `residual`, None at the start of a stage."""
        if x is None:
            x = self.kernels.norm(residual, self.attention_norm, self.eps)
        else:
            x = self.kernels.add_norm(x, residual, self.attention_norm, self.eps)
        x = self.attention(x, rope, cache, batch)
        return self.mlp(self.kernels.add_norm(x, residual, self.mlp_norm, self.eps))


class Decoder:
    """One rank's part of a model: the layers of its stage, the embedding on the first, the head on the last."""

    def __init__(
        self, shape: ModelShape, places: Sequence[Place], rank: int, tensors: Tensors, comm: Comm, kernels: Kernels
    ) -> None:
        place = places[rank]
        peers = [p for p in places if p.stage == place.stage]
        self.embed = Embedding(tensors["embed.weight"], place.vocab, comm) if place.first else None
        self.layers = [
            Layer(shape, place, layer, tensors, comm, kernels) for layer in range(place.layers.start, place.layers.stop)
        ]
        self.head = None
        if place.last:
            # A tied head beside its embedding is no tensor of its own.
            weight = tensors.pop("head.weight" if "head.weight" in tensors else "embed.weight")
            self.head = Head(weight, [len(p.vocab) for p in peers], comm)
            self.norm = tensors["norm.weight"]
        self.kernels, self.eps = kernels, shape.norm_eps

    def hidden(
        self, incoming: torch.Tensor | None, rope: torch.Tensor, caches: Sequence[KVCache], batch: Batch
    ) -> torch.Tensor:
        """[T, hidden] after this stage's layers, from the batch's tokens or from the stage before."""
        residual = incoming
        if self.embed is not None:
            residual = self.embed(batch.tokens)
        assert residual is not None
        x = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, residual, rope, cache, batch)
        assert x is not None
        return residual.add_(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[S, hidden] -> [S, vocab] on the output rank, None on the other ranks of the last stage."""
        assert self.head is not None
        return self.head(self.kernels.norm(hidden, self.norm, self.eps))
