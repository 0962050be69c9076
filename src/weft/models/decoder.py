"""The dense decoder: one implementation, since Llama, Mistral, Qwen2, Qwen3 and SmolLM2 differ in data only."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch

from weft.architectures.place import Place
from weft.architectures.shape import ModelShape
from weft.comm import Group
from weft.kernels.base import DenseLayer, EmbeddingTable, HeadNorm, Kernels, KVCache, Product
from weft.kernels.batch import Batch
from weft.layers.embedding import Embedding, Head
from weft.layers.linear import column_linear, row_linear
from weft.quant.quantised import QuantisedWeight

# Parameters by name. Each matrix is taken out when its layer is constructed: a matrix that is packed for its product is
# then held once, not twice until the whole model is built.
Tensors = MutableMapping[str, torch.Tensor | QuantisedWeight]


class DecoderModel:
    """One rank's part of a model: the layers of its stage, the embedding on the first stage, the head on the last.

    Matrices are removed from `tensors`.
    """

    def __init__(
        self, shape: ModelShape, places: Sequence[Place], rank: int, tensors: Tensors, comm: Group, kernels: Kernels
    ) -> None:
        place = places[rank]
        self.comm, self.kernels, self.eps = comm, kernels, shape.norm_eps
        embedding_table = kernels.embedding_table(tensors.pop("embed.weight")) if place.first else None
        self.embed = None if embedding_table is None else Embedding(embedding_table, place.vocab, comm)
        self.layers = [
            create_dense_layer(shape, place, layer, tensors, comm, kernels)
            for layer in range(place.layers.start, place.layers.stop)
        ]
        self.fused_stage = kernels.fuse_layers(self.layers, comm)
        self.head = None
        self.final_norm: torch.Tensor | None = None
        if place.last:
            widths = [len(peer.vocab) for peer in places if peer.stage == place.stage]
            self.head = Head(self._head_product(tensors, embedding_table), widths, comm)
            self.final_norm = plain_tensor(tensors, "norm.weight")

    def _head_product(self, tensors: Tensors, table: EmbeddingTable | None) -> Product:
        """Product with the head's weight; `table` is the embedding if this rank has it."""
        # A tied head on the same rank as the embedding has no tensor of its own.
        if table is not None and "head.weight" not in tensors:
            return table
        return self.kernels.matrix(tensors.pop("head.weight"), None)

    def hidden(
        self, incoming: torch.Tensor | None, rope: torch.Tensor, caches: Sequence[KVCache], batch: Batch
    ) -> torch.Tensor:
        """Run this stage's layers on the T tokens of a step; return [T, hidden].

        The input is the batch's tokens on the first stage, else `incoming`.

        `rope` is the table of `rope_table`; `caches` has one KV cache per layer. `incoming` may be overwritten.
        """
        residual = incoming
        if self.embed is not None:
            residual = self.embed(batch.tokens)
        assert residual is not None
        if self.fused_stage is not None:
            return self.fused_stage(residual, rope, caches, batch)
        x = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x = self._run_layer(layer, x, residual, rope, cache, batch)
        assert x is not None
        # The final norm is in `logits`, for sampled rows only. A step has to end with a plain sum: the buffers of the
        # fused sums rely on it (comm/parts.py).
        return residual.add_(self.comm.sum(x))

    def _run_layer(
        self,
        layer: DenseLayer,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        rope: torch.Tensor,
        cache: KVCache,
        batch: Batch,
    ) -> torch.Tensor:
        """Run one layer; return its output on this rank, still to be summed over the ranks and added to `residual`.

        `residual` is updated in place.

        `x` is the previous layer's output in the same form, or None at the start of a stage.
        """
        kernels, comm, eps = self.kernels, self.comm, self.eps
        if x is None:
            x = kernels.norm(residual, layer.attention_norm, eps)
        else:
            x = kernels.sum_add_norm(x, residual, layer.attention_norm, eps, comm)
        q = kernels.rotate_and_store(layer.qkv(x), layer.q_heads, rope, cache, batch, layer.head_norm)
        x = layer.out(kernels.attend(q, cache, batch, layer.scale, layer.window))
        x = kernels.sum_add_norm(x, residual, layer.mlp_norm, eps, comm)
        return layer.down(kernels.silu_mul(layer.gate_up(x)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Compute logits of the S sampled rows: [S, hidden] -> [S, vocab].

        None on other ranks of the last stage than the output rank."""
        assert self.head is not None and self.final_norm is not None
        return self.head(self.kernels.norm(hidden, self.final_norm, self.eps))


def plain_tensor(tensors: Tensors, name: str) -> torch.Tensor:
    """Parameter that is never quantised: a norm's weight or a bias."""
    tensor = tensors[name]
    assert isinstance(tensor, torch.Tensor), name
    return tensor


def create_dense_layer(
    shape: ModelShape, place: Place, layer: int, tensors: Tensors, comm: Group, kernels: Kernels
) -> DenseLayer:
    """Construct a layer with this rank's heads and columns, and remove its matrices from `tensors`."""
    attention, mlp = f"layers.{layer}.attention.", f"layers.{layer}.mlp."

    def bias(name: str) -> torch.Tensor | None:
        return plain_tensor(tensors, name + ".bias") if name + ".bias" in tensors else None

    def norm(name: str) -> torch.Tensor:
        return plain_tensor(tensors, f"layers.{layer}.{name}.weight")

    def column(name: str) -> Product:
        return column_linear(tensors.pop(name + ".weight"), bias(name), kernels)

    def row(name: str) -> Product:
        return row_linear(tensors.pop(name + ".weight"), bias(name), comm, kernels)

    head_norm = None
    if shape.qk_norm:
        head_norm = HeadNorm(norm("attention.q_norm"), norm("attention.k_norm"), shape.norm_eps)
    return DenseLayer(
        attention_norm=norm("attention_norm"),
        qkv=column(attention + "qkv"),
        head_norm=head_norm,
        out=row(attention + "out"),
        mlp_norm=norm("mlp_norm"),
        gate_up=column(mlp + "gate_up"),
        down=row(mlp + "down"),
        q_heads=len(place.q_heads),
        window=shape.window(layer),
        scale=shape.head_dim**-0.5,
        eps=shape.norm_eps,
    )
