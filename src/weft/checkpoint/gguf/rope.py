"""Rotary position embeddings as a GGUF file's metadata describes them."""

from __future__ import annotations

import struct
from math import isfinite, log

from msgspec.structs import replace

from weft.checkpoint.architectures.shape import THETA, Rope
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.gguf import Gguf
from weft.checkpoint.files.model_file import read_tensor
from weft.checkpoint.gguf.names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from weft.errors import ModelError


def planned_rope(fields: Fields) -> Rope:
    """The rotary embedding's base, without its scaling."""
    return Rope(theta=fields.number_or("rope.freq_base", None) or THETA)


def rope(gguf: Gguf, fields: Fields, head_dim: int, rotated: int) -> Rope:
    """The rotary embedding of the first `rotated` numbers of each head, with its scaling."""
    return replace(_scaled_rope(gguf, fields, rotated), rotated=rotated / head_dim)


def _scaled_rope(gguf: Gguf, fields: Fields, rotated: int) -> Rope:
    """A rotary embedding of whole heads of this length. Scalings of llama3 and longrope are tensors of divisors."""
    theta = planned_rope(fields).theta
    kind = fields.text_or("rope.scaling.type", None)
    legacy = fields.number_or("rope.scale_linear", 1.0) or 1.0
    if kind is None and legacy != 1:
        return Rope(theta=theta, kind="linear", factor=legacy)
    if ROPE_FACTORS in gguf.tensors:
        if kind not in (None, "none"):
            raise ModelError(
                f"{gguf.path} has both {ROPE_FACTORS} and rope.scaling.type {kind!r:.80}; Weft knows either",
                code="two-rope-scalings",
            )
        return Rope(theta=theta, kind="llama3", factors=read_factors(gguf, ROPE_FACTORS, rotated))
    if LONG_FACTORS in gguf.tensors or SHORT_FACTORS in gguf.tensors:
        return longrope(gguf, fields, theta, rotated)
    match kind:
        case None | "none":
            return Rope(theta=theta)
        case "linear":
            return Rope(theta=theta, kind="linear", factor=fields.number("rope.scaling.factor"))
        case "yarn":
            return yarn(fields, theta)
    raise fields.wrong_value("rope.scaling.type", "none, linear or yarn")


def yarn(fields: Fields, theta: float) -> Rope:
    """YaRN scaling, with its attention factor in config.json's form."""
    factor = fields.number("rope.scaling.factor")
    # `attn_factor` multiplies YaRN's own factor; `yarn_attn_factor` is config.json's `attention_factor`.
    times = fields.number_or("rope.scaling.attn_factor", 1.0) or 1.0
    magnitude = fields.number_or("rope.scaling.yarn_attn_factor", None)
    if magnitude is None and times != 1:
        magnitude = times * (0.1 * log(max(factor, 1.0)) + 1.0)
    if fields.number_or("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise fields.wrong_value("rope.scaling.yarn_ext_factor", "1")
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=fields.integer_or("rope.scaling.original_context_length", None)
        or fields.integer("context_length"),
        beta_fast=fields.number_or("rope.scaling.yarn_beta_fast", None),
        beta_slow=fields.number_or("rope.scaling.yarn_beta_slow", None),
        attention_factor=magnitude,
    )


def longrope(gguf: Gguf, fields: Fields, theta: float, rotated: int) -> Rope:
    """LongRoPE's scaling; llama.cpp calls its magnitude `attn_factor`."""
    return Rope(
        theta=theta,
        kind="longrope",
        original_max_positions=fields.integer("rope.scaling.original_context_length"),
        attention_factor=fields.number_or("rope.scaling.attn_factor", None),
        short_factors=read_factors(gguf, SHORT_FACTORS, rotated),
        long_factors=read_factors(gguf, LONG_FACTORS, rotated),
    )


def read_factors(gguf: Gguf, name: str, rotated: int) -> tuple[float, ...]:
    """Read the divisors of the rotated/2 rotary frequencies from their tensor."""
    info = gguf.tensors.get(name)
    if info is None or info.type != "F32" or info.dims != (rotated // 2,):
        stored = "missing" if info is None else f"{info.type} of {list(info.dims)}"
        raise ModelError(
            f"{gguf.path}: {name} is {stored}; it must be F32 of [{rotated // 2}]", code="bad-rope-factors"
        )
    values = struct.unpack(f"<{rotated // 2}f", read_tensor(info))
    if not all(isfinite(value) and value > 0 for value in values):
        raise ModelError(
            f"{gguf.path} is damaged: {name} holds values that are not above 0; fetch it again",
            code="rope-factor-not-positive",
        )
    return values
