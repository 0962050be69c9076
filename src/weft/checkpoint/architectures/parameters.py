"""The parameters of each architecture as data: names, dims, axes that may be cut, and source tensors.

Layers are built from this table, the loader reads it as fills, the planner sums it, the tests check it. Names of source
tensors are Hugging Face's; `checkpoint.gguf.names` translates them for GGUF.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Literal

import msgspec
from msgspec.structs import replace

from weft.checkpoint.architectures.architecture import Names
from weft.checkpoint.architectures.axes import Axis, kv_heads, query_heads
from weft.checkpoint.architectures.library import LibraryModel, LibraryTensor, merged_name
from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import (
    Attention,
    Dense,
    DType,
    Experts,
    LatentAttention,
    LayerSpec,
    ModelShape,
)

# A quantised format treats parameters by role. A vector is a norm, a bias or the like; a projection leads from the
# embedding's rows to the hidden size, or back. An expansion leads from cached vectors to keys and values: a file stores
# it like other matrices, but the engine never holds it quantised, since it multiplies with its transpose as well.
Role = Literal["embedding", "projection", "head", "linear", "expansion", "expert", "router", "vector"]


class Part(msgspec.Struct, frozen=True, cache_hash=True):
    """One source tensor of a parameter, or some of its rows.

    - `source`: name in the checkpoint, with `{layer}` and `{expert}` for their numbers.
    - `after`: axes whose rows precede this part's rows, if several parts share the tensor.
    - `rotated`: fraction of each head's leading rows that RoPE rotates (1 for tensors without heads). The engine pairs
      row i with row i + head_dim/2, so that rotated rows are stored at the start of each half.
    """

    source: str
    rows: Axis
    cols: Axis | None = None
    after: tuple[Axis, ...] = ()
    rotated: float = 1.0


class Parameter(msgspec.Struct, frozen=True, cache_hash=True):
    """One parameter of the engine: its parts stacked along dim 0 (merged q, k, v; merged gate and up).

    `where` is "embed" on the first stage, "layer" on the stage of its layer, "head" on the last stage. A parameter
    with the role "expert" has one such block for each of the rank's experts, along an extra first dim.

    `dtype` is the dtype that the engine holds it in, if that is not the plan's.
    """

    name: str
    where: Literal["embed", "layer", "head"]
    parts: tuple[Part, ...]
    role: Role = "linear"
    dtype: DType | None = None

    @property
    def is_read_directly(self) -> bool:
        """True if blocks read the parameter itself, not a product with it: a vector or an expansion."""
        return self.parts[0].cols is None or self.role == "expansion"


def model_parameters(shape: ModelShape) -> Iterator[tuple[Parameter, int | None]]:
    """Yield (parameter, layer) for every parameter of a model, in the order of the forward pass.

    `layer` is None outside the layers; within them it stands for `{layer}` in the parameter's name. Raises ModelError
    for an unknown architecture.
    """
    outer = outer_parameters(shape)
    yield from ((parameter, None) for parameter in outer if parameter.where == "embed")
    for layer in range(len(shape.layers)):
        yield from ((parameter, layer) for parameter in layer_parameters(shape, layer))
    yield from ((parameter, None) for parameter in outer if parameter.where == "head")


@lru_cache(maxsize=64)
def outer_parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """Parameters outside the layers: first the embedding's, then the final norm, and last the head."""
    if shape.library is not None:
        return _library_outer(shape.library, Axis(shape.vocab, cut="vocab"), tied=shape.tied)
    names = find_architecture(shape.architecture).names
    hidden, vocab = Axis(shape.hidden), Axis(shape.vocab, cut="vocab")
    width = Axis(shape.embedding_dim or shape.hidden)
    embed = Part(names.embed + ".weight", vocab, width)
    outer = [Parameter("embed.weight", "embed", (embed,), "embedding")]
    if shape.embedding_dim is not None:
        project = Part(names.project_in + ".weight", hidden, width)
        outer.append(Parameter("embed.projection.weight", "embed", (project,), "projection"))
    if names.positions:
        rows = Axis(shape.max_positions + find_architecture(shape.architecture).positions_before)
        positions = Part(names.positions + ".weight", rows, hidden)
        outer.append(Parameter("positions.weight", "embed", (positions,), "embedding"))
    outer += _final_norm(names, shape)
    if shape.embedding_dim is not None:
        project = Part(names.project_out + ".weight", width, hidden)
        outer.append(Parameter("head.projection.weight", "head", (project,), "projection"))
    head = embed if shape.tied else Part(names.head + ".weight", vocab, width)
    return (*outer, Parameter("head.weight", "head", (head,), "head"))


def _final_norm(names: Names, shape: ModelShape) -> list[Parameter]:
    kinds = ("weight", "bias") if shape.norm.kind == "layer" else ("weight",)
    return [
        Parameter(f"norm.{kind}", "head", (Part(f"{names.norm}.{kind}", Axis(shape.hidden)),), "vector")
        for kind in kinds
        if shape.final_norm
    ]


def layer_parameters(shape: ModelShape, layer: int) -> tuple[Parameter, ...]:
    """Parameters of one layer, in the order of the forward pass, with `{layer}` in their names."""
    if shape.library is not None:
        return _library_layer(shape.library, shape.library.layers[layer])
    names = find_architecture(shape.architecture).names
    return _layer_parameters(names, shape.layers[layer], shape.hidden, shape.norm.kind == "layer")


@lru_cache(maxsize=256)
def _layer_parameters(names: Names, spec: LayerSpec, hidden: int, norm_bias: bool) -> tuple[Parameter, ...]:
    return tuple(_LayerTable(names, hidden, norm_bias).layer(spec))


def _library_outer(model: LibraryModel, vocab: Axis, *, tied: bool) -> tuple[Parameter, ...]:
    """The parameters outside the layers of a model that runs through Transformers' class."""
    embed = Part(model.embedding, vocab, Axis(model.width))
    weight, *biases = model.head
    head = embed if tied else Part(weight, vocab, Axis(model.width))
    return (
        Parameter("embed.weight", "embed", (embed,), "embedding"),
        *(_library_parameter(tensor, "embed", "") for tensor in model.before),
        *(_library_parameter(tensor, "head", "") for tensor in model.after),
        *(Parameter("head.bias", "head", (Part(bias, vocab),), "vector") for bias in biases),
        Parameter("head.weight", "head", (head,), "head"),
    )


@lru_cache(maxsize=256)
def _library_layer(model: LibraryModel, kind: int) -> tuple[Parameter, ...]:
    names = {
        f"{path}.{part}": f"{merged_name(group)}.{part}"
        for group in model.merged
        for path in group
        for part in ("weight", "bias")
    }
    merged: dict[str, Parameter] = {}
    for tensor in model.kinds[kind]:
        parameter = _library_parameter(tensor, "layer", model.layer, names.get(tensor.name, tensor.name))
        first = merged.get(parameter.name)
        merged[parameter.name] = (
            parameter if first is None else msgspec.structs.replace(first, parts=first.parts + parameter.parts)
        )
    return tuple(merged.values())


def _library_parameter(
    tensor: LibraryTensor, where: Literal["embed", "layer", "head"], prefix: str, name: str = ""
) -> Parameter:
    """A tensor, under its own name unless another is given; `prefix` is the layer's in the checkpoint."""
    rows, *others = (
        Axis(length, cut="even" if tensor.cut == side else None)
        for length, side in zip(tensor.dims, ("rows", "cols"), strict=False)
    )
    cols = others[0] if others else None
    name = f"layers.{{layer}}.{name or tensor.name}" if prefix else tensor.name
    part = Part(prefix + tensor.name, rows, cols)
    # Not a router: the role only means that the matrix is never quantised.
    return Parameter(name, where, (part,), "linear" if tensor.linear else "vector" if cols is None else "router")


class _LayerTable:
    """Parameters of one layer, group by group. With `norm_bias`, norms have a bias."""

    def __init__(self, names: Names, hidden: int, norm_bias: bool) -> None:
        self.names, self.hidden, self.norm_bias = names, Axis(hidden), norm_bias

    def layer(self, spec: LayerSpec) -> Iterator[Parameter]:
        names = self.names
        before, after = spec.norms in ("pre", "both", "residual"), spec.norms in ("post", "both")
        if before:
            yield from self.norm("attention_norm", names.attention_norm)
        if isinstance(spec.mixer, Attention):
            yield from self.attention(spec.mixer)
        else:
            yield from self.latent_attention(spec.mixer)
        if after:
            yield from self.norm("attention_post_norm", names.attention_post_norm)
        if before:
            yield from self.norm("mlp_norm", names.mlp_norm)
        if isinstance(spec.ffn, Dense):
            yield from self.mlp(spec.ffn)
        else:
            yield from self.experts(spec.ffn)
        if after:
            yield from self.norm("mlp_post_norm", names.mlp_post_norm)

    def linear(
        self, name: str, sources: Sequence[tuple[str, Axis]], cols: Axis, *, bias: bool = False, role: Role = "linear"
    ) -> Iterator[Parameter]:
        """Yield a matrix and its bias. `sources` are the modules stacked in the matrix, with the axes of their rows."""
        weights, biases, before = [], [], dict[str, tuple[Axis, ...]]()
        for source, rows in sources:
            path, after = self.names.layer + source, before.get(source, ())
            weights.append(Part(path + ".weight", rows, cols, after))
            biases.append(Part(path + ".bias", rows, None, after))
            before[source] = (*after, rows)
        yield Parameter(f"layers.{{layer}}.{name}.weight", "layer", tuple(weights), role)
        if bias:
            kind: Role = role if role == "expert" else "vector"
            yield Parameter(f"layers.{{layer}}.{name}.bias", "layer", tuple(biases), kind)

    def vector(self, name: str, source: str, rows: Axis, dtype: DType | None = None) -> Iterator[Parameter]:
        part = Part(self.names.layer + source, rows)
        yield Parameter("layers.{layer}." + name, "layer", (part,), "vector", dtype)

    def norm(self, name: str, source: str, rows: Axis | None = None) -> Iterator[Parameter]:
        """Yield the weight and the bias of a norm, of hidden states unless `rows` are given."""
        assert source, f"the architecture has no name for {name}"
        for part in ("weight", "bias") if self.norm_bias else ("weight",):
            yield from self.vector(f"{name}.{part}", f"{source}.{part}", rows or self.hidden)

    def attention(self, spec: Attention) -> Iterator[Parameter]:
        names, q, kv = self.names, query_heads(spec, spec.head_dim), kv_heads(spec, spec.head_dim)
        qkv = tuple(zip(names.qkv, (q, kv, kv), strict=True))
        for parameter in self.linear("attention.qkv", qkv, self.hidden, bias=spec.bias):
            query, key, value = parameter.parts
            turned = (replace(part, rotated=spec.rope.rotated) for part in (query, key))
            yield replace(parameter, parts=(*turned, value))
        if spec.qk_norm != "none":
            head = Axis(spec.head_dim) if spec.qk_norm == "head" else None
            for parameter in (
                *self.norm("attention.q_norm", names.q_norm, head or q),
                *self.norm("attention.k_norm", names.k_norm, head or kv),
            ):
                yield replace(parameter, parts=(replace(parameter.parts[0], rotated=spec.rope.rotated),))
        if spec.sinks:
            yield from self.vector("attention.sinks", names.sinks, query_heads(spec, 1))
        yield from self.linear("attention.out", [(names.out, self.hidden)], q, bias=spec.out_bias)

    def latent_attention(self, spec: LatentAttention) -> Iterator[Parameter]:
        q, kv_rank = query_heads(spec, spec.head_dim), Axis(spec.kv_lora_rank)
        if spec.q_lora_rank is None:
            yield from self.linear("attention.q", [("self_attn.q_proj", q)], self.hidden)
        else:
            q_rank = Axis(spec.q_lora_rank)
            down = [("self_attn.q_a_proj", q_rank)]
            yield from self.linear("attention.q_down", down, self.hidden, bias=spec.bias)
            yield from self.norm("attention.q_norm", "self_attn.q_a_layernorm", q_rank)
            yield from self.linear("attention.q_up", [("self_attn.q_b_proj", q)], q_rank)
        # The cached vector: compressed keys and values, and the rotary part.
        down = [("self_attn.kv_a_proj_with_mqa", Axis(spec.latent_dim))]
        yield from self.linear("attention.kv_down", down, self.hidden, bias=spec.bias)
        yield from self.norm("attention.kv_norm", "self_attn.kv_a_layernorm", kv_rank)
        # For each head: its key without the rotary part, and its value.
        up = [("self_attn.kv_b_proj", query_heads(spec, spec.nope_dim + spec.v_dim))]
        yield from self.linear("attention.kv_up", up, kv_rank, role="expansion")
        values = query_heads(spec, spec.v_dim)
        yield from self.linear("attention.out", [(self.names.out, self.hidden)], values, bias=spec.bias)

    def mlp(self, spec: Dense) -> Iterator[Parameter]:
        names, ffn = self.names, Axis(spec.width, cut="ffn")
        up = [(source, ffn) for source in names.gate_up]
        yield from self.linear("mlp.gate_up" if spec.gated else "mlp.up", up, self.hidden, bias=spec.bias)
        yield from self.linear("mlp.down", [(names.down, self.hidden)], ffn, bias=spec.bias)

    def experts(self, spec: Experts) -> Iterator[Parameter]:
        names, count, ffn = self.names, Axis(spec.count), Axis(spec.width, cut="expert_ffn")
        router = [(names.router, count)]
        yield from self.linear("router", router, self.hidden, bias=spec.bias, role="router")
        if spec.correction:
            # Corrections differ by less than bfloat16 tells apart.
            yield from self.vector("router.correction", names.correction, count, "float32")
        up = [(names.expert + source, ffn) for source in names.expert_gate_up]
        down = [(names.expert + names.expert_down, self.hidden)]
        yield from self.linear("experts.gate_up", up, self.hidden, bias=spec.bias, role="expert")
        yield from self.linear("experts.down", down, ffn, bias=spec.bias, role="expert")
        if spec.shared:
            shared = Axis(spec.shared_width, cut="shared_ffn")
            up = [(names.shared + source, shared) for source in ("gate_proj", "up_proj")]
            down = [(names.shared + "down_proj", self.hidden)]
            yield from self.linear("shared.gate_up", up, self.hidden)
            yield from self.linear("shared.down", down, shared)
        if spec.shared_gate:
            yield from self.linear("shared.gate", [(names.shared_gate, Axis(1))], self.hidden, role="router")


def parameter_count(shape: ModelShape) -> int:
    """Number of learned numbers in the whole model; a tied head is counted once, with the embedding."""
    total = 0
    for parameter, _ in model_parameters(shape):
        if parameter.role == "head" and shape.tied:
            continue
        size = sum(prod(axis.length for axis in part_axes(part)) for part in parameter.parts)
        if parameter.role == "expert" and shape.experts:
            size *= shape.experts.count
        total += size
    return total


def part_axes(part: Part) -> tuple[Axis, ...]:
    """Axes of a part: (rows,) or (rows, cols)."""
    return (part.rows,) if part.cols is None else (part.rows, part.cols)


def rank_parameters(shape: ModelShape, place: Place) -> Iterator[tuple[str, Parameter, int | None]]:
    """Yield (name, parameter, layer) for all parameters of a rank; layer is None outside the layers.

    A tied head on the embedding's own stage is left out: the model uses the embedding.
    """
    for parameter, layer in model_parameters(shape):
        if layer is None:
            if is_held_outside_layers(shape, place, parameter):
                yield parameter.name, parameter, None
        elif layer in place.layers:
            yield parameter.name.format(layer=layer), parameter, layer


def is_held_outside_layers(shape: ModelShape, place: Place, parameter: Parameter) -> bool:
    """Return True if a rank holds this parameter of the embedding or the head; a tied head may be the embedding."""
    if parameter.where == "embed":
        return place.first
    uses_embedding = parameter.role == "head" and shape.tied and place.first
    return place.last and not uses_embedding


def parameter_dims(place: Place, parameter: Parameter) -> tuple[int, ...]:
    """Dims of a parameter on this rank: (rows,) or (rows, cols); for the role "expert", (experts, rows[, cols])."""
    rows = sum(len(part.rows.owned(place)) for part in parameter.parts)
    cols = parameter.parts[0].cols
    dims = (rows,) if cols is None else (rows, len(cols.owned(place)))
    return (len(place.experts), *dims) if parameter.role == "expert" else dims
