"""The parameters of each architecture as data: names, shapes, how they may be cut, where they lie in a file.

Layers are built from this table, the loader runs it as fills, the planner sums it, the tests check it.
Names of sources are Hugging Face's; `facts.gguf_names` translates them for GGUF.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import msgspec

from weft.errors import ModelError
from weft.facts.shape import ModelShape


class Axis(Enum):
    """What an axis of a parameter counts, and so how it may be cut."""

    HIDDEN = "hidden"  # never cut
    HEAD_DIM = "head_dim"  # never cut
    Q = "q_heads"  # q_heads * head_dim, cut in whole heads
    KV = "kv_heads"  # kv_heads * head_dim, cut in whole heads
    FFN = "ffn"
    VOCAB = "vocab"


class Part(msgspec.Struct, frozen=True):
    """One tensor of the checkpoint, with `{layer}` in its name where it belongs to a layer."""

    source: str
    rows: Axis
    cols: Axis | None = None


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of the engine: its parts stacked along dim 0 (merged q, k, v; merged gate and up).

    `where`: "embed" on the first stage, "layer" on the stage of its layer, "head" on the last stage.
    """

    name: str
    where: str
    parts: tuple[Part, ...]


ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

EMBED = Part("model.embed_tokens.weight", Axis.VOCAB, Axis.HIDDEN)


def axis_length(shape: ModelShape, axis: Axis) -> int:
    """The whole length of an axis, in elements."""
    match axis:
        case Axis.Q:
            return shape.q_heads * shape.head_dim
        case Axis.KV:
            return shape.kv_heads * shape.head_dim
        case _:
            return int(getattr(shape, axis.value))


def parameters(shape: ModelShape) -> Iterator[Parameter]:
    """Every parameter of a dense decoder, in the order of the forward pass; `{layer}` is left in the names."""
    if shape.architecture not in ARCHITECTURES:
        raise ModelError(f"unknown architecture {shape.architecture!r}; known: {', '.join(ARCHITECTURES)}")
    hidden, q, kv, ffn = Axis.HIDDEN, Axis.Q, Axis.KV, Axis.FFN
    source = "model.layers.{layer}."

    def layer(name: str, *parts: Part) -> Parameter:
        return Parameter("layers.{layer}." + name, "layer", parts)

    def part(name: str, rows: Axis, cols: Axis | None = None) -> Part:
        return Part(source + name, rows, cols)

    yield Parameter("embed.weight", "embed", (EMBED,))
    yield layer("attention_norm.weight", part("input_layernorm.weight", hidden))
    yield layer(
        "attention.qkv.weight",
        part("self_attn.q_proj.weight", q, hidden),
        part("self_attn.k_proj.weight", kv, hidden),
        part("self_attn.v_proj.weight", kv, hidden),
    )
    if shape.qkv_bias:
        yield layer(
            "attention.qkv.bias",
            part("self_attn.q_proj.bias", q),
            part("self_attn.k_proj.bias", kv),
            part("self_attn.v_proj.bias", kv),
        )
    if shape.qk_norm:
        yield layer("attention.q_norm.weight", part("self_attn.q_norm.weight", Axis.HEAD_DIM))
        yield layer("attention.k_norm.weight", part("self_attn.k_norm.weight", Axis.HEAD_DIM))
    yield layer("attention.out.weight", part("self_attn.o_proj.weight", hidden, q))
    if shape.out_bias:
        yield layer("attention.out.bias", part("self_attn.o_proj.bias", hidden))
    yield layer("mlp_norm.weight", part("post_attention_layernorm.weight", hidden))
    yield layer(
        "mlp.gate_up.weight", part("mlp.gate_proj.weight", ffn, hidden), part("mlp.up_proj.weight", ffn, hidden)
    )
    if shape.mlp_bias:
        yield layer("mlp.gate_up.bias", part("mlp.gate_proj.bias", ffn), part("mlp.up_proj.bias", ffn))
    yield layer("mlp.down.weight", part("mlp.down_proj.weight", hidden, ffn))
    if shape.mlp_bias:
        yield layer("mlp.down.bias", part("mlp.down_proj.bias", hidden))
    yield Parameter("norm.weight", "head", (Part("model.norm.weight", hidden),))
    head = EMBED if shape.tied else Part("lm_head.weight", Axis.VOCAB, hidden)
    yield Parameter("head.weight", "head", (head,))
