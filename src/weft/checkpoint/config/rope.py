"""Rotary position embeddings as config.json describes them, in Transformers 4 and 5."""

from __future__ import annotations

from msgspec.structs import replace

from weft.checkpoint.architectures.shape import THETA, Rope
from weft.checkpoint.files.fields import Fields


def read_ropes(
    config: Fields, max_positions: int, local_field: str, *, stretched: bool, partial: bool
) -> tuple[Rope, Rope | None]:
    """The rotary embedding, and the embedding of layers with a sliding window if it differs.

    With `stretched`, `max_positions` is the model's length after linear scaling. With `partial`, a share of each head
    may be rotated.

    Transformers 5 has `rope_parameters`, with a set per type of layer if these differ; Transformers 4 has `rope_theta`
    and `rope_scaling`, and `local_field` with the base in layers with a window.
    """
    by_type = _parameters_by_type(config)
    if by_type is None:
        local = Rope(theta=config.number(local_field)) if local_field else None
        rope = _rope(config, _scaling(config), max_positions, partial=partial)
        return with_original(rope, max_positions) if stretched else rope, local
    full, sliding = by_type.nested("full_attention"), by_type.nested("sliding_attention")
    if full is None:
        raise by_type.wrong_value("full_attention", "a set of rotary parameters")
    rope = _rope(config, full, max_positions, partial=partial)
    rope = with_original(rope, max_positions) if stretched else rope
    return rope, None if sliding is None else _rope(config, sliding, max_positions, partial=partial)


def with_original(rope: Rope, stretched: int) -> Rope:
    """A linearly scaled embedding of a model that has `stretched` positions after the scaling."""
    return replace(rope, original_max_positions=round(stretched / rope.factor)) if rope.kind == "linear" else rope


def read_base(config: Fields) -> float:
    """Base of the rotary embedding alone, without its scaling."""
    return _base(config, Fields({}, config.where))


def _rope(config: Fields, scaling: Fields, max_positions: int, *, partial: bool) -> Rope:
    """One rotary embedding from its parameters."""
    return replace(_scaled_rope(config, scaling, max_positions), rotated=_rotated(config, scaling, partial=partial))


def _scaled_rope(config: Fields, scaling: Fields, max_positions: int) -> Rope:
    """A rotary embedding of whole heads."""
    theta = _base(config, scaling)
    key = "rope_type" if "rope_type" in scaling else "type"
    original = config.integer_or("original_max_position_embeddings", None) or scaling.integer_or(
        "original_max_position_embeddings", max_positions
    )
    match scaling.text_or(key, "default"):
        case None | "default":
            return _unscaled(config, theta, max_positions)
        case "linear":
            return Rope(theta=theta, kind="linear", factor=scaling.number("factor"))
        case "dynamic":
            return Rope(
                theta=theta, kind="dynamic", factor=scaling.number("factor"), original_max_positions=max_positions
            )
        case "llama3":
            return _llama3(scaling, theta, original)
        case "yarn":
            return _yarn(scaling, theta, original or max_positions, max_positions)
        # Phi 3 called it "su" at first.
        case "longrope" | "su":
            return _longrope(scaling, theta, original)
    raise scaling.wrong_value(key, "default, linear, dynamic, llama3, yarn or longrope")


def _rotated(config: Fields, scaling: Fields, *, partial: bool) -> float:
    """The share of a head that is rotated."""
    for fields in (scaling, config):
        rotated = fields.number_or("partial_rotary_factor", None)
        if rotated is not None:
            if rotated > 1 or (rotated != 1 and not partial):
                raise fields.wrong_value("partial_rotary_factor", "at most 1" if partial else "1")
            return rotated
    return 1.0


def _longrope(scaling: Fields, theta: float, original: int | None) -> Rope:
    return Rope(
        theta=theta,
        kind="longrope",
        original_max_positions=original,
        attention_factor=scaling.number_or("attention_factor", None),
        short_factors=scaling.numbers("short_factor"),
        long_factors=scaling.numbers("long_factor"),
    )


def _unscaled(config: Fields, theta: float, max_positions: int) -> Rope:
    """The rotary embedding without `rope_scaling`: Qwen v1 has a flag for its dynamic scaling."""
    longest = config.integer_or("stretched_positions", None)
    if not config.flag("use_dynamic_ntk") or longest is None or longest <= max_positions:
        return Rope(theta=theta)
    return Rope(theta=theta, kind="qwen", factor=longest / max_positions)


def _llama3(scaling: Fields, theta: float, original: int | None) -> Rope:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.wrong_value("high_freq_factor", f"above low_freq_factor, {low:g}")
    return Rope(
        theta=theta,
        kind="llama3",
        factor=scaling.number("factor"),
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: Fields, theta: float, original: int, max_positions: int) -> Rope:
    return Rope(
        theta=theta,
        kind="yarn",
        factor=scaling.number_or("factor", None) or max_positions / original,
        original_max_positions=original,
        beta_fast=scaling.number_or("beta_fast", None),
        beta_slow=scaling.number_or("beta_slow", None),
        mscale=_mscale(scaling, "mscale"),
        mscale_all_dim=_mscale(scaling, "mscale_all_dim"),
        attention_factor=scaling.number_or("attention_factor", None),
        truncate=scaling.flag("truncate", True),
    )


def _mscale(scaling: Fields, key: str) -> float | None:
    """A parameter of YaRN's magnitude, for which 0 stands for none."""
    return None if scaling.values.get(key) == 0 else scaling.number_or(key, None)


def _base(config: Fields, scaling: Fields) -> float:
    return scaling.number_or("rope_theta", None) or config.number_or("rope_theta", None) or THETA


def _parameters_by_type(config: Fields) -> Fields | None:
    """Sets of rotary parameters by type of layer; None if one set holds for all layers."""
    for key in ("rope_scaling", "rope_parameters"):
        fields = config.nested(key)
        if fields is not None and any(isinstance(value, dict) for value in fields.values.values()):
            return fields
    return None


def _scaling(config: Fields) -> Fields:
    scaling = config.nested("rope_scaling")
    if scaling is not None and scaling.values:
        return scaling
    return config.nested("rope_parameters") or Fields({}, config.where)
