"""The decoder: a rank's part of a model, a loop over the layers of its stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

import torch

from weft.checkpoint.architectures.fused import known_spec
from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import Attention, Dense, LayerSpec, ModelShape, Norms
from weft.ranks.comm import Group
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.fused import FusedLatent, FusedLayer, FusedMixture, FusedStage, PhaseTimes
from weft.ranks.kernels.latents import LatentNorm
from weft.ranks.kernels.matrices import EmbeddingTable, FusedMLP, Product
from weft.ranks.layers.attention import AttentionBlock
from weft.ranks.layers.embedding import Embedding, Head, Positions
from weft.ranks.layers.exchange import TokenExchange
from weft.ranks.layers.experts import ExpertsBlock
from weft.ranks.layers.latent import LatentAttentionBlock
from weft.ranks.layers.mlp import MLPBlock
from weft.ranks.layers.norm import ResidualStream
from weft.ranks.layers.rope import RopeTable, RopeTables
from weft.ranks.layers.weights import LayerWeights, Tensors
from weft.ranks.quant.quantised import QuantisedWeight

# By `LayerSpec.norms`: whether each part has a norm before it, and after it.
AROUND: dict[Norms, tuple[bool, bool]] = {
    "pre": (True, False),
    "post": (False, True),
    "both": (True, True),
    "residual": (False, False),
}


class DecoderLayer:
    """A layer: a mixer and a feed-forward part, each with its norms around it."""

    def __init__(self, spec: LayerSpec, place: Place, weights: LayerWeights, rope: RopeTable) -> None:
        before, after = AROUND[spec.norms]
        self.spec = spec
        self.residual_norms = None
        if spec.norms == "residual":
            self.residual_norms = weights.norm("attention_norm"), weights.norm("mlp_norm")
        self.mixer_norm = weights.norm("attention_norm") if before else None
        if isinstance(spec.mixer, Attention):
            self.mixer: AttentionBlock | LatentAttentionBlock = AttentionBlock(spec.mixer, place, weights, rope)
        else:
            self.mixer = LatentAttentionBlock(spec.mixer, place, weights, rope)
        self.mixer_post_norm = weights.norm("attention_post_norm") if after else None
        self.ffn_norm = weights.norm("mlp_norm") if before else None
        if isinstance(spec.ffn, Dense):
            self.ffn: MLPBlock | ExpertsBlock = MLPBlock(spec.ffn, weights)
        else:
            self.ffn = ExpertsBlock(spec.ffn, place, weights)
        self.ffn_post_norm = weights.norm("mlp_post_norm") if after else None

    def __call__(self, stream: ResidualStream, cache: KVCache, batch: Batch) -> None:
        stream.add(self.mixer(stream.normed(self.mixer_norm), cache, batch), self.mixer_post_norm)
        if self.residual_norms is not None:
            stream.normalise(self.residual_norms[0])
        stream.add(self.ffn(stream.normed(self.ffn_norm), batch), self.ffn_post_norm)
        if self.residual_norms is not None:
            stream.normalise(self.residual_norms[1])


class LayerLoop:
    """Consecutive layers that run separately."""

    def __init__(self, layers: Sequence[DecoderLayer], comm: Group, kernels: Kernels) -> None:
        self.layers, self._comm, self._kernels = layers, comm, kernels
        self._traced: int | None = None  # the number of the first layer, if torch's profiler is to see layers

    def __call__(self, residual: torch.Tensor, caches: Sequence[KVCache], batch: Batch) -> torch.Tensor:
        """Run all layers: [T, hidden] -> [T, hidden], in place. `caches` has one KV cache per layer."""
        stream = ResidualStream(residual, self._comm, self._kernels)
        if self._traced is not None:
            return self._run_traced(stream, caches, batch, self._traced)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer(stream, cache, batch.of_group(cache.group))
        return stream.finish()

    def _run_traced(self, stream: ResidualStream, caches: Sequence[KVCache], batch: Batch, first: int) -> torch.Tensor:
        """Run all layers, each in a range of torch's profiler."""
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True), first):
            with torch.profiler.record_function(f"layer {number}"):
                layer(stream, cache, batch.of_group(cache.group))
        return stream.finish()

    def trace(self, log: PhaseTimes | None, first: int) -> None:
        """Show torch's profiler the layers of later steps, counted from `first` on, if there is a `log`."""
        self._traced = first if log else None

    def serve_others(self, group_tokens: Sequence[int]) -> None:
        """Compute this rank's experts on the tokens of the other attention groups; this group has none in the step."""
        for layer in self.layers:
            if isinstance(layer.ffn, ExpertsBlock):
                assert layer.ffn_norm
                layer.ffn.serve_others(group_tokens, layer.ffn_norm.weight)


class DecoderModel:
    """One rank's part of a model: the layers of its stage, the embedding on the first stage, the head on the last.

    Matrices are removed from `tensors`. `comm` are the ranks of the stage in this attention group; `exchange` leads to
    experts on ranks of other groups. `fill_ropes` comes before the first step.
    """

    def __init__(
        self,
        shape: ModelShape,
        places: Sequence[Place],
        rank: int,
        tensors: Tensors,
        comm: Group,
        kernels: Kernels,
        exchange: TokenExchange | None = None,
    ) -> None:
        place = places[rank]
        self.comm, self.kernels = comm, kernels
        self.ropes = RopeTables(shape.max_positions)
        embedding_table = (
            kernels.matrices.embedding_table(tensors.pop("embed.weight"), "embed.weight") if place.first else None
        )
        outer = LayerWeights(tensors, "", shape.norm, comm, kernels)
        self.embed = None
        if embedding_table is not None:
            self.embed = create_embedding(shape, place, embedding_table, tensors, outer)
        self.layers, self._numbers = [], range(place.layers.start, place.layers.stop)
        for number in self._numbers:
            spec = shape.layers[number]
            weights = LayerWeights(tensors, f"layers.{number}.", shape.norm, comm, kernels, exchange)
            rope = self.ropes.table_for(spec.mixer.rope, spec.mixer.rope_dim)
            self.layers.append(DecoderLayer(spec, place, weights, rope))
        self.runs = fuse_runs(self.layers, comm, kernels)
        # The caches of the last step, and each run's: fused runs describe theirs to C++ when they change.
        self._caches: Sequence[KVCache] = ()
        self._run_caches: list[Sequence[KVCache]] = []
        self.head = self.final_norm = None
        if place.last:
            widths = [len(peer.vocab) for peer in places if (peer.dp_rank, peer.stage) == (place.dp_rank, place.stage)]
            projection = None if shape.embedding_dim is None else outer.whole_linear("head.projection")
            self.head = Head(self._head_product(tensors, embedding_table), widths, comm, projection=projection)
            self.final_norm = outer.norm("norm") if shape.final_norm else None
        # Parameters that are no matrices; matrices are with the kernels.
        self.vectors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}

    def _head_product(self, tensors: Tensors, table: EmbeddingTable | None) -> Product:
        """Product with the head's weight; `table` is the embedding if this rank has it."""
        # A tied head on the same rank as the embedding has no tensor of its own.
        if table is not None and "head.weight" not in tensors:
            return table
        return self.kernels.matrices.matrix(tensors.pop("head.weight"), None, "head.weight")

    @property
    def capturable(self) -> bool:
        """True if a step can be captured as a CUDA graph: if the kernels compute all experts at once, and no part of an
        exchange with other attention groups happens on the host."""
        return all(mixture.capturable for mixture in self._mixtures)

    @property
    def _mixtures(self) -> list[ExpertsBlock]:
        return [layer.ffn for layer in self.layers if isinstance(layer.ffn, ExpertsBlock)]

    def routed_tokens(self) -> list[int]:
        """Number of tokens that each expert of this rank has computed, over all layers; waits for the GPU."""
        counts = [mixture.experts.routed for mixture in self._mixtures]
        most = max(map(len, counts), default=0)
        padded = [torch.nn.functional.pad(count, (0, most - len(count))) for count in counts]
        return torch.stack(padded).sum(0).tolist() if padded else []

    @property
    def is_fused(self) -> bool:
        """True if the kernels compute all layers, run by run."""
        return all(isinstance(run, FusedLayers) for run in self.runs)

    def fill_ropes(self, rows: int, length: int, device: torch.device) -> None:
        """Compute the rotary angles of the first `rows` positions; `length` is the longest text that is served."""
        self.ropes.fill(rows, length, device)

    @property
    def rope_angles(self) -> list[torch.Tensor]:
        """The rotary angles that have been computed."""
        return self.ropes.angles

    def replace(self, name: str, weight: torch.Tensor | QuantisedWeight) -> None:
        """Give a parameter other values, of the same dims and scheme, in the same memory.

        After the last one `kernels.matrices.refresh_biases` is to be called.
        """
        if name in self.vectors:
            assert isinstance(weight, torch.Tensor), name
            self.vectors[name].copy_(weight)
        else:
            self.kernels.matrices.replace(name, weight)

    def hidden(self, incoming: torch.Tensor | None, caches: Sequence[KVCache], batch: Batch) -> torch.Tensor:
        """Run this stage's layers on the T tokens of a step; return [T, hidden], before the final norm.

        The input is the batch's tokens on the first stage, else `incoming`, which may be overwritten. `caches` has one
        KV cache per layer.
        """
        residual = incoming if self.embed is None else self.embed(batch)
        assert residual is not None
        if caches is not self._caches:
            self._caches, self._run_caches = caches, divide_caches(caches, self.runs)
        for run, run_caches in zip(self.runs, self._run_caches, strict=True):
            residual = run(residual, run_caches, batch)
        return residual

    def layer_states(
        self, incoming: torch.Tensor | None, caches: Sequence[KVCache], batch: Batch, layers: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run this stage's layers as `hidden` does, but separately: fused layers do not show the states between them.

        Returns [T, hidden] after the last layer and, by global number, [T, hidden] after each layer of the stage that
        is one of `layers`. Attention groups with common experts all call this, or all call `hidden`.
        """
        residual = incoming if self.embed is None else self.embed(batch)
        assert residual is not None
        stream, states = ResidualStream(residual, self.comm, self.kernels), {}
        for number, layer, cache in zip(self._numbers, self.layers, caches, strict=True):
            layer(stream, cache, batch.of_group(cache.group))
            if number in layers:
                states[number] = stream.finish().clone()  # later layers add to it in place
        return stream.finish(), states

    def serve_others(self, group_tokens: Sequence[int]) -> None:
        """Compute this rank's experts on the tokens of the other attention groups; this group has none in the step."""
        for run in self.runs:
            run.serve_others(group_tokens)

    def trace(self, log: PhaseTimes | None) -> None:
        """Log the layers of later steps, by their global numbers: fused ones to `log`, others with torch's profiler.

        None ends that. A step that is replayed as a CUDA graph shows no layers.
        """
        first = self._numbers.start
        for run in self.runs:
            run.trace(log, first)
            first += len(run.layers)

    def forget_caches(self) -> None:
        """Hold the KV caches of the last step no longer, so that their memory can be given back."""
        self._caches, self._run_caches = (), []
        for run in self.runs:
            if isinstance(run, FusedLayers):
                run.forget_caches()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Compute logits of the S sampled rows: [S, hidden] -> [S, vocab].

        None on other ranks of the last stage than the output rank."""
        assert self.head is not None
        return self.head(self.states(hidden))

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of the last stage behind the final norm: [S, hidden], whole on every rank."""
        return hidden if self.final_norm is None else self.final_norm(hidden, self.kernels)


def create_embedding(
    shape: ModelShape, place: Place, table: EmbeddingTable, tensors: Tensors, weights: LayerWeights
) -> Embedding:
    """The embedding of a first stage, with the projection and the learned positions that the model has."""
    projection = None if shape.embedding_dim is None else weights.whole_linear("embed.projection")
    positions, name = None, "positions.weight"
    if name in tensors:
        before = find_architecture(shape.architecture).positions_before
        positions = Positions(weights.kernels.matrices.embedding_table(tensors.pop(name), name), before)
    scale = shape.embedding_scale
    return Embedding(table, place.vocab, weights.comm, scale, projection=projection, positions=positions)


def divide_caches(caches: Sequence[KVCache], runs: Sequence[LayerLoop | FusedLayers]) -> list[Sequence[KVCache]]:
    """Divide the caches of all layers among the runs of layers."""
    divided, start = [], 0
    for run in runs:
        divided.append(caches[start : start + len(run.layers)])
        start += len(run.layers)
    return divided


def fuse_runs(layers: Sequence[DecoderLayer], comm: Group, kernels: Kernels) -> list[LayerLoop | FusedLayers]:
    """Divide layers into runs: runs that the kernels compute in one call, and runs of separate layers.

    Layers are fused if their specs are known to the kernels; a fused run has one table of angles.
    """
    described = [(layer, describe_layer(layer)) for layer in layers]
    runs: list[LayerLoop | FusedLayers] = []
    for key, group in groupby(described, key=lambda pair: None if pair[1] is None else id(pair[0].mixer.rope)):
        members = list(group)
        stage = None if key is None else kernels.fuse_layers([fused for _, fused in members if fused], comm)
        run = [layer for layer, _ in members]
        runs.append(LayerLoop(run, comm, kernels) if stage is None else FusedLayers(run, stage))
    return runs


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
