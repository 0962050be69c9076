"""The parameters of each architecture as data: names, dims, axes that may be cut, and source tensors.

Layers are built from this table, the loader reads it as fills, the planner sums it, the tests check it. Names of source
tensors are Hugging Face's; `formats.gguf_names` translates them for GGUF.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Literal

import msgspec

from weft.architectures.axes import Axis, axis_length, owned
from weft.architectures.names import NAMES, Names
from weft.architectures.place import Place
from weft.architectures.shape import ModelShape
from weft.errors import ModelError

# A quantised format treats parameters by role. A vector is a norm, a bias or the like.
Role = Literal["embedding", "head", "linear", "expert", "router", "vector"]
On = Literal["every", "dense", "expert"]  # the layers that have a parameter: all, or those without or with experts

ARCHITECTURES = tuple(NAMES)
# Architectures that the engine runs; the planner knows all of ARCHITECTURES.
RUNNABLE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Part(msgspec.Struct, frozen=True):
    """One source tensor of a parameter, or some of its rows.

    - `source`: name in the checkpoint, with `{layer}` and `{expert}` for their numbers.
    - `after`: axes whose rows precede this part's rows, if several parts share the tensor.
    - `transposed`: the file stores the matrix as [cols, rows].
    """

    source: str
    rows: Axis
    cols: Axis | None = None
    after: tuple[Axis, ...] = ()
    transposed: bool = False


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of the engine: its parts stacked along dim 0 (merged q, k, v; merged gate and up).

    `where` is "embed" on the first stage, "layer" on the stage of its layer, "head" on the last stage. A parameter
    with the role "expert" has one such block for each of the rank's experts, along an extra first dim.
    """

    name: str
    where: Literal["embed", "layer", "head"]
    parts: tuple[Part, ...]
    role: Role = "linear"
    on: On = "every"

    def is_in(self, shape: ModelShape, layer: int) -> bool:
        """Return True if this layer has the parameter."""
        return self.on == "every" or (self.on == "expert") == shape.has_experts(layer)


@lru_cache(maxsize=64)
def model_parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """All parameters of a model, in the order of the forward pass.

    A parameter of the layers comes once, with `{layer}` in its name. Raises ModelError for an unknown architecture.
    """
    return tuple(_parameters(shape))


def _parameters(shape: ModelShape) -> Iterator[Parameter]:
    if shape.architecture not in NAMES:
        raise ModelError(
            f"unknown architecture {shape.architecture!r}; known: {', '.join(ARCHITECTURES)}",
            code="unknown-architecture",
        )
    names = NAMES[shape.architecture]
    layer = _Layer(shape, names)
    embed = Part(names.embed + ".weight", Axis.VOCAB, Axis.HIDDEN)
    yield Parameter("embed.weight", "embed", (embed,), "embedding")
    if names.positions:
        positions = Part(names.positions + ".weight", Axis.POSITIONS, Axis.HIDDEN)
        yield Parameter("positions.weight", "embed", (positions,), "embedding")
    yield from layer.norm("attention_norm", names.attention_norm)
    yield from layer.latent_attention() if shape.mla else layer.attention()
    yield from layer.norm("attention_post_norm", names.attention_post_norm)
    yield from layer.norm("mlp_norm", names.mlp_norm)
    if shape.experts is None or shape.experts.dense_layers:
        yield from layer.mlp()
    if shape.experts:
        yield from layer.experts()
    yield from layer.norm("mlp_post_norm", names.mlp_post_norm)
    for kind in ("weight", "bias") if names.norm_bias else ("weight",):
        yield Parameter(f"norm.{kind}", "head", (Part(f"{names.norm}.{kind}", Axis.HIDDEN),), "vector")
    head = embed if shape.tied else Part(names.head + ".weight", Axis.VOCAB, Axis.HIDDEN)
    yield Parameter("head.weight", "head", (head,), "head")


class _Layer:
    """Parameters of one layer, group by group."""

    def __init__(self, shape: ModelShape, names: Names) -> None:
        self.shape, self.names = shape, names

    def linear(
        self,
        name: str,
        sources: Sequence[tuple[str, Axis]],
        cols: Axis,
        *,
        bias: bool = False,
        role: Role = "linear",
        on: On = "every",
    ) -> Iterator[Parameter]:
        """Yield a matrix and its bias. `sources` are the modules stacked in the matrix, with the axes of their rows."""
        weights, biases, before = [], [], dict[str, tuple[Axis, ...]]()
        # The experts of gpt-oss are parameters, not modules.
        endings = ("", "_bias") if role == "expert" and self.names.expert_pairs else (".weight", ".bias")
        transposed = self.names.transposed or (role == "expert" and self.names.expert_pairs)
        for source, rows in sources:
            path, after = self.names.layer + source, before.get(source, ())
            weights.append(Part(path + endings[0], rows, cols, after, transposed))
            biases.append(Part(path + endings[1], rows, None, after))
            before[source] = (*after, rows)
        yield Parameter(f"layers.{{layer}}.{name}.weight", "layer", tuple(weights), role, on)
        if bias:
            kind: Role = role if role == "expert" else "vector"
            yield Parameter(f"layers.{{layer}}.{name}.bias", "layer", tuple(biases), kind, on)

    def vector(self, name: str, source: str, rows: Axis, on: On = "every") -> Iterator[Parameter]:
        yield Parameter("layers.{layer}." + name, "layer", (Part(self.names.layer + source, rows),), "vector", on)

    def norm(self, name: str, source: str, rows: Axis = Axis.HIDDEN) -> Iterator[Parameter]:
        if source:
            yield from self.vector(f"{name}.weight", f"{source}.weight", rows)
            if self.names.norm_bias:
                yield from self.vector(f"{name}.bias", f"{source}.bias", rows)

    def attention(self) -> Iterator[Parameter]:
        shape, names = self.shape, self.names
        qkv = tuple(zip(names.qkv, (Axis.Q, Axis.KV, Axis.KV), strict=True))
        yield from self.linear("attention.qkv", qkv, Axis.HIDDEN, bias=shape.qkv_bias)
        if shape.qk_norm:
            q, k = (Axis.HEAD_DIM, Axis.HEAD_DIM) if names.head_norms else (Axis.Q, Axis.KV)
            yield from self.norm("attention.q_norm", "self_attn.q_norm", q)
            yield from self.norm("attention.k_norm", "self_attn.k_norm", k)
        if names.sinks:
            yield from self.vector("attention.sinks", names.sinks, Axis.HEADS)
        yield from self.linear("attention.out", [(names.out, Axis.HIDDEN)], Axis.Q, bias=shape.out_bias)

    def latent_attention(self) -> Iterator[Parameter]:
        assert self.shape.mla is not None
        if self.shape.mla.q_lora_rank is None:
            yield from self.linear("attention.q", [("self_attn.q_proj", Axis.Q)], Axis.HIDDEN)
        else:
            yield from self.linear("attention.q_down", [("self_attn.q_a_proj", Axis.Q_RANK)], Axis.HIDDEN)
            yield from self.norm("attention.q_norm", "self_attn.q_a_layernorm", Axis.Q_RANK)
            yield from self.linear("attention.q_up", [("self_attn.q_b_proj", Axis.Q)], Axis.Q_RANK)
        yield from self.linear("attention.kv_down", [("self_attn.kv_a_proj_with_mqa", Axis.LATENT)], Axis.HIDDEN)
        yield from self.norm("attention.kv_norm", "self_attn.kv_a_layernorm", Axis.KV_RANK)
        yield from self.linear("attention.kv_up", [("self_attn.kv_b_proj", Axis.KV_UP)], Axis.KV_RANK)
        yield from self.linear("attention.out", [(self.names.out, Axis.HIDDEN)], Axis.VALUE)

    def mlp(self) -> Iterator[Parameter]:
        names, bias = self.names, self.shape.mlp_bias
        on: On = "dense" if self.shape.experts else "every"
        up = [(source, Axis.FFN) for source in names.gate_up]
        yield from self.linear("mlp.gate_up" if names.gated else "mlp.up", up, Axis.HIDDEN, bias=bias, on=on)
        yield from self.linear("mlp.down", [(names.down, Axis.HIDDEN)], Axis.FFN, bias=bias, on=on)

    def experts(self) -> Iterator[Parameter]:
        shape, names = self.shape, self.names
        assert shape.experts is not None
        router = [(names.router, Axis.EXPERTS)]
        yield from self.linear("router", router, Axis.HIDDEN, bias=names.router_bias, role="router", on="expert")
        if names.correction:
            yield from self.vector("router.correction", names.correction, Axis.EXPERTS, on="expert")
        width = Axis.EXPERT_PAIRS if names.expert_pairs else Axis.EXPERT_FFN
        up = [(names.expert + source, width) for source in names.expert_gate_up]
        down = [(names.expert + names.expert_down, Axis.HIDDEN)]
        bias = shape.mlp_bias
        yield from self.linear("experts.gate_up", up, Axis.HIDDEN, bias=bias, role="expert", on="expert")
        yield from self.linear("experts.down", down, Axis.EXPERT_FFN, bias=bias, role="expert", on="expert")
        if shape.experts.shared:
            up = [(names.shared + source, Axis.SHARED_FFN) for source in ("gate_proj", "up_proj")]
            down = [(names.shared + "down_proj", Axis.HIDDEN)]
            yield from self.linear("shared.gate_up", up, Axis.HIDDEN, on="expert")
            yield from self.linear("shared.down", down, Axis.SHARED_FFN, on="expert")


def parameter_count(shape: ModelShape) -> int:
    """Number of learnt numbers in the whole model; a tied head is counted once, with the embedding."""
    total = 0
    for parameter in model_parameters(shape):
        if parameter.role == "head" and shape.tied:
            continue
        size = sum(prod(axis_length(shape, axis) for axis in part_axes(part)) for part in parameter.parts)
        if parameter.role == "expert" and shape.experts:
            size *= shape.experts.count
        total += size * len(layers_of(shape, parameter))
    return total


def part_axes(part: Part) -> tuple[Axis, ...]:
    """Axes of a part: (rows,) or (rows, cols)."""
    return (part.rows,) if part.cols is None else (part.rows, part.cols)


def layers_of(shape: ModelShape, parameter: Parameter) -> list[int]:
    """Numbers of the layers that have the parameter; [0] for a parameter outside the layers."""
    if parameter.where != "layer":
        return [0]
    return [layer for layer in range(shape.layers) if parameter.is_in(shape, layer)]


def rank_parameters(shape: ModelShape, place: Place) -> Iterator[tuple[str, Parameter, int | None]]:
    """Yield (name, parameter, layer) for all parameters of a rank; layer is None outside the layers.

    A tied head on the embedding's own stage is left out: the model uses the embedding.
    """
    table = model_parameters(shape)
    for parameter in table:
        if parameter.where == "embed" and is_held_outside_layers(shape, place, parameter):
            yield parameter.name, parameter, None
    for layer in range(place.layers.start, place.layers.stop):
        for parameter in table:
            if parameter.where == "layer" and parameter.is_in(shape, layer):
                yield parameter.name.format(layer=layer), parameter, layer
    for parameter in table:
        if parameter.where == "head" and is_held_outside_layers(shape, place, parameter):
            yield parameter.name, parameter, None


def is_held_outside_layers(shape: ModelShape, place: Place, parameter: Parameter) -> bool:
    """Return True if a rank holds this parameter of the embedding or the head; a tied head may be the embedding."""
    if parameter.where == "embed":
        return place.first
    uses_embedding = parameter.role == "head" and shape.tied and place.first
    return place.last and not uses_embedding


def parameter_dims(shape: ModelShape, place: Place, parameter: Parameter) -> tuple[int, ...]:
    """Dims of a parameter on this rank: (rows,) or (rows, cols); for the role "expert", (experts, rows[, cols])."""
    rows = sum(len(owned(shape, place, part.rows)) for part in parameter.parts)
    cols = parameter.parts[0].cols
    dims = (rows,) if cols is None else (rows, len(owned(shape, place, cols)))
    return (len(place.experts), *dims) if parameter.role == "expert" else dims
