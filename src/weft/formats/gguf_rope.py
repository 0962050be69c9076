"""Rotary position embeddings as a GGUF file's metadata describes them."""

from __future__ import annotations

import struct
from math import isfinite, log

from weft.architectures.shape import THETA, Rope
from weft.errors import ModelError
from weft.formats.fields import Fields
from weft.formats.gguf import Gguf
from weft.formats.gguf_names import ROPE_FACTORS


def planned_rope(fields: Fields) -> Rope:
    """The rotary embedding's base, without its scaling."""
    return Rope(theta=fields.number_or("rope.freq_base", None) or THETA)


def rope(gguf: Gguf, fields: Fields, head_dim: int) -> Rope:
    """The rotary embedding with its scaling. llama3's scaling is stored as a tensor of divisors."""
    theta = planned_rope(fields).theta
    kind = fields.text_or("rope.scaling.type", None)
    legacy = fields.number_or("rope.scale_linear", 1.0) or 1.0
    if kind is None and legacy != 1:
        return Rope(theta=theta, kind="linear", factor=legacy)
    if ROPE_FACTORS in gguf.tensors:
        if kind not in (None, "none"):
            raise ModelError(
                f"{gguf.path} has both {ROPE_FACTORS} and rope.scaling.type {kind!r}; Weft knows either",
                code="two-rope-scalings",
            )
        return Rope(theta=theta, kind="llama3", factors=factors(gguf, head_dim))
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


def factors(gguf: Gguf, head_dim: int) -> tuple[float, ...]:
    """Read the divisors of the head_dim/2 rotary frequencies from their tensor."""
    info = gguf.tensors[ROPE_FACTORS]
    if info.type != "F32" or info.dims != (head_dim // 2,):
        raise ModelError(
            f"{gguf.path}: {ROPE_FACTORS} is {info.type} of {list(info.dims)}; it must be F32 of [{head_dim // 2}]",
            code="bad-rope-factors",
        )
    with open(info.file, "rb") as file:
        file.seek(info.offset)
        values = struct.unpack(f"<{head_dim // 2}f", file.read(info.nbytes))
    if not all(isfinite(value) and value > 0 for value in values):
        raise ModelError(
            f"{gguf.path} is damaged: {ROPE_FACTORS} holds values that are not above 0; fetch it again",
            code="rope-factor-not-positive",
        )
    return values
