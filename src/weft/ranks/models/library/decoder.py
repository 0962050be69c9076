"""LibraryDecoder: one rank's part of a model that runs through Transformers' class.

It has the interface of `ranks.models.decoder.DecoderModel`. The library's class computes norms, rotary embeddings and
whatever else its layers have; products, attention, embedding and head are Weft's. The tokens of a step are one text of
T tokens for the class, with their own positions: only attention, which is Weft's, knows the rows of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from weft.checkpoint.architectures.axes import Axis
from weft.checkpoint.architectures.library import LibraryTensor, merged_name
from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.architectures.shape import ModelShape
from weft.errors import ModelError
from weft.ranks.comm import Group
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.fused import PhaseTimes
from weft.ranks.kernels.matrices import EmbeddingTable, Product
from weft.ranks.layers.embedding import Embedding
from weft.ranks.layers.weights import Tensors
from weft.ranks.models.library.attention import NAME, PagedLayer, Step, attend_paged, no_rotation
from weft.ranks.models.library.build import (
    ClassError,
    base_model,
    build_on_meta,
    fill_buffers,
    layer_list,
    read_config,
)
from weft.ranks.models.library.modules import (
    CutLinear,
    GatheredHead,
    Given,
    MergedLinear,
    Passed,
    SharedProduct,
    kernel_norm,
)
from weft.ranks.quant.quantised import QuantisedWeight


class LibraryDecoder:
    """One rank's part of a model whose shape has a `library`; see DecoderModel for the arguments.

    Raises ModelError if the class of this version of Transformers cannot be filled.
    """

    capturable = False  # the class's own operations may read the GPU

    def __init__(
        self, shape: ModelShape, places: Sequence[Place], rank: int, tensors: Tensors, comm: Group, kernels: Kernels
    ) -> None:
        assert shape.library is not None
        self.shape, self.place, self.comm, self.kernels = shape, places[rank], comm, kernels
        self._places = [
            place for place in places if (place.dp_rank, place.stage) == (self.place.dp_rank, self.place.stage)
        ]
        self._model = shape.library
        self._device = next(iter(tensors.values())).device
        self._step = Step()
        try:
            self._build(tensors)
        except ClassError as error:
            raise ModelError(str(error), code="not-run-through-transformers") from error
        # Parameters that are no matrices; matrices are with the kernels.
        self.vectors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}

    def routed_tokens(self) -> list[int]:
        """Nothing: the class computes its experts itself."""
        return []

    def _build(self, tensors: Tensors) -> None:
        place, kernels = self.place, self.kernels
        causal = build_on_meta(read_config(self._model.config), NAME, attend_paged)
        self._layers_name, layers = layer_list(causal)
        base = base_model(causal)
        self._entry = self._drop_layers(layers)
        table = kernels.matrices.embedding_table(tensors.pop("embed.weight"), "embed.weight") if place.first else None
        self._embed = None if table is None else Embedding(table, place.vocab, self.comm)
        self._drop_embedding(base)
        for number in range(place.layers.start, place.layers.stop):
            self._fill_layer(layers[number], number, tensors)
        self._fill_outer(causal, tensors)
        self._causal = self._given = None
        if place.last:
            self._given = Given()
            setattr(causal, causal.base_model_prefix, self._given)
            causal.set_output_embeddings(self._head(tensors, table))
            self._causal = causal
        self._base = base
        fill_buffers(base, self._device)
        left = next((name for name, tensor in base.named_parameters() if tensor.is_meta), None)
        if left is not None:
            raise ClassError(f"Weft has no values for {left} of {type(causal).__name__}")
        for name, module in [*base.named_modules()]:
            if norm := kernel_norm(module, kernels):
                base.set_submodule(name, norm)

    def _drop_layers(self, layers: nn.ModuleList) -> Passed | None:
        """Take the layers of other stages out; return the one before this stage, which brings its hidden states."""
        place, entry = self.place, None
        for number, layer in enumerate(layers):
            if number not in place.layers:
                layers[number] = passed = Passed(layer)
                entry = passed if number == place.layers.start - 1 else entry
        return entry

    def _drop_embedding(self, base: nn.Module) -> None:
        """Take the embedding out, and with it on earlier stages the norm and what else the last one has."""
        base.set_input_embeddings(nn.Identity())  # type: ignore[operator]
        if not self.place.last:
            for tensor in self._model.after:
                name = self._in_base(tensor.name).partition(".")[0]
                if not isinstance(getattr(base, name), Passed):
                    setattr(base, name, Passed(getattr(base, name)))

    def _in_base(self, name: str) -> str:
        """A tensor's name without the prefix of the base model."""
        prefix = self._model.layer.partition(self._layers_name + ".{layer}")[0]
        return name.removeprefix(prefix)

    def _fill_layer(self, layer: nn.Module, number: int, tensors: Tensors) -> None:
        """Give a layer its products, its other parameters and its attention."""
        own, mixer = self._model.kinds[self._model.layers[number]], self.shape.layers[number].mixer
        for group in self._model.merged:
            self._fill_merged(layer, number, group, tensors)
        for tensor in own:
            name = f"layers.{number}.{tensor.name}"
            path, _, kind = tensor.name.rpartition(".")
            if isinstance(layer.get_submodule(path), MergedLinear):
                continue
            if tensor.linear:
                bias = tensors.get(f"layers.{number}.{path}.bias")
                layer.set_submodule(path, self._linear(name, path, tensor, tensors.pop(name), bias))
            elif not isinstance(layer.get_submodule(path), CutLinear):
                set_parameter(layer.get_submodule(path), kind, tensors[name])
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int) and module is not layer:
                module.paged_layer = PagedLayer(  # type: ignore[assignment]
                    self._step,
                    number - self.place.layers.start,
                    mixer,
                    self.place.heads_of(mixer.head_counts),
                    no_rotation(mixer.head_dim, self._device),
                    self.kernels,
                )

    def _fill_merged(self, layer: nn.Module, number: int, group: tuple[str, ...], tensors: Tensors) -> None:
        """Give linear layers that read the same tensor one product."""
        name = f"layers.{number}.{merged_name(group)}"
        bias = tensors.get(f"{name}.bias")
        assert not isinstance(bias, QuantisedWeight)
        product = self.kernels.matrices.matrix(tensors.pop(f"{name}.weight"), bias, f"{name}.weight")
        rows = {tensor.name: tensor for tensor in self._model.kinds[self._model.layers[number]]}
        weights = [rows[f"{path}.weight"] for path in group]
        widths = [len(self._owned(one.dims[0], cut=one.cut == "rows")[self.place.tp_rank]) for one in weights]
        shared = SharedProduct(product, widths)
        for index, path in enumerate(group):
            layer.set_submodule(path, MergedLinear(shared, index))

    def _linear(
        self,
        name: str,
        path: str,
        tensor: LibraryTensor,
        weight: torch.Tensor | QuantisedWeight,
        bias: torch.Tensor | QuantisedWeight | None,
    ) -> CutLinear:
        """A linear layer with this rank's share of the weight `name`; `path` is the module's name in its layer."""
        assert not isinstance(bias, QuantisedWeight)
        rows, cols = self._owned(tensor.dims[0], cut=True), self._owned(tensor.dims[1], cut=True)
        if tensor.cut == "cols" and self.comm.rank > 0:
            bias = None  # the sum would have it once per rank
        sizes = [len(span) for span in rows] if path in self._model.joined else None
        columns = cols[self.place.tp_rank] if tensor.cut == "cols" else None
        return CutLinear(self.kernels.matrices.matrix(weight, bias, name), self.comm, tensor.cut, columns, sizes)

    def _owned(self, length: int, *, cut: bool) -> list[Span]:
        """Each tensor-parallel rank's part of a dimension."""
        return [Axis(length, cut="even" if cut else None).owned(place) for place in self._places]

    def _fill_outer(self, causal: nn.Module, tensors: Tensors) -> None:
        """Set the parameters outside the layers that this stage has."""
        held = self._model.before * self.place.first + self._model.after * self.place.last
        for tensor in held:
            path, _, kind = tensor.name.rpartition(".")
            set_parameter(causal.get_submodule(path), kind, tensors[tensor.name])

    def _head(self, tensors: Tensors, table: EmbeddingTable | None) -> GatheredHead:
        product: Product
        if table is not None and "head.weight" not in tensors:
            product = table
        else:
            product = self.kernels.matrices.matrix(tensors.pop("head.weight"), None, "head.weight")
        bias = tensors.get("head.bias")
        assert not isinstance(bias, QuantisedWeight)
        return GatheredHead(product, bias, [len(place.vocab) for place in self._places], self.comm)

    @property
    def is_fused(self) -> bool:
        """False: the class computes the layers."""
        return False

    @property
    def rope_angles(self) -> list[torch.Tensor]:
        """None: see `fill_ropes`."""
        return []

    def fill_ropes(self, rows: int, length: int, device: torch.device) -> None:
        """Nothing to fill: the class computes its angles itself."""

    def replace(self, name: str, weight: torch.Tensor | QuantisedWeight) -> None:
        """Give a parameter other values, see `DecoderModel.replace`."""
        if name in self.vectors:
            assert isinstance(weight, torch.Tensor), name
            self.vectors[name].copy_(weight)
        else:
            self.kernels.matrices.replace(name, weight)

    def hidden(self, incoming: torch.Tensor | None, caches: Sequence[KVCache], batch: Batch) -> torch.Tensor:
        """Run this stage's layers on the T tokens of a step: [T, hidden], on the last stage behind the final norm.

        Arguments as in `DecoderModel.hidden`.
        """
        self._step.begin(batch, caches)
        states = incoming if self._embed is None else self._embed(batch)
        assert states is not None
        states = states[None]
        if self._entry is not None:
            self._entry.received = states
        positions = batch.positions.long()[None]
        out = self._base(inputs_embeds=states, position_ids=positions, use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state
        return hidden[0]

    def layer_states(
        self, incoming: torch.Tensor | None, caches: Sequence[KVCache], batch: Batch, layers: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run as `hidden` does; return also [T, hidden] after each layer of the stage that is one of `layers`."""
        states: dict[int, torch.Tensor] = {}
        modules = getattr(self._base, self._layers_name)
        hooks = [
            modules[number].register_forward_hook(
                lambda module, inputs, output, number=number: states.update({number: output[0].clone()})
            )
            for number in layers
            if number in self.place.layers
        ]
        try:
            return self.hidden(incoming, caches, batch), states
        finally:
            for hook in hooks:
                hook.remove()

    def serve_others(self, group_tokens: Sequence[int]) -> None:
        """Nothing to serve: these models have no experts."""

    def trace(self, log: PhaseTimes | None) -> None:
        """Nothing to log: the class runs its layers itself, and torch's profiler sees their operations."""

    def forget_caches(self) -> None:
        """Hold the KV caches of the last step no longer, so that their memory can be given back."""
        self._step.caches = ()

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of the last stage behind the final norm, as `hidden` returns them."""
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Compute logits of the S sampled rows: [S, hidden] -> [S, vocab].

        None on other ranks of the last stage than the output rank."""
        assert self._causal is not None and self._given is not None
        self._given.hidden = hidden[None]
        logits: torch.Tensor = self._causal(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits if self.comm.rank == 0 else None


def set_parameter(module: nn.Module, name: str, value: torch.Tensor | QuantisedWeight) -> None:
    """Let a module's parameter be `value`, in the same memory."""
    assert isinstance(value, torch.Tensor)
    setattr(module, name, nn.Parameter(value, requires_grad=False))
