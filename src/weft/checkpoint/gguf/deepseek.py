"""Latent attention and the choice of experts in groups, as the metadata of DeepSeek's GGUF files describe them.

Source: DeepseekV2Model of llama.cpp's convert_hf_to_gguf.py and its model deepseek2.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec.structs import replace

from weft.checkpoint.architectures.shape import LatentAttention, Rope
from weft.checkpoint.config.deepseek import latent_scale, read_groups
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.gguf.rope import planned_rope, yarn

# By expert_gating_func; 0, which files before version 3 have, stands for the architecture's own.
SCORINGS: dict[int | None, Literal["softmax", "sigmoid"]] = {0: "softmax", 1: "softmax", 2: "sigmoid"}


def latent_attention(fields: Fields, *, run: bool) -> LatentAttention | None:
    """Multi-head latent attention, if the file has it. Newer files give the heads' lengths under separate keys."""
    if "attention.kv_lora_rank" not in fields:
        return None
    key = fields.integer_or("attention.key_length_mla", None) or fields.integer("attention.key_length")
    value = fields.integer_or("attention.value_length_mla", None) or fields.integer("attention.value_length")
    rope_dim = fields.integer("rope.dimension_count")
    if rope_dim >= key:
        raise fields.wrong_value("rope.dimension_count", f"less than the key's length, {key}")
    rotary = latent_rope(fields) if run else planned_rope(fields)
    return LatentAttention(
        heads=fields.integer("attention.head_count"),
        kv_lora_rank=fields.integer("attention.kv_lora_rank"),
        q_lora_rank=fields.integer_or("attention.q_lora_rank", None),
        nope_dim=key - rope_dim,
        rope_dim=rope_dim,
        v_dim=value,
        scale=latent_scale(key, rotary),
        rope=rotary,
    )


def latent_rope(fields: Fields) -> Rope:
    """The rotary embedding of latent attention. Under YaRN files give a tenth of `mscale_all_dim`, and `mscale` is the
    same, so that nothing multiplies the angles' cosines and sines."""
    theta, kind = planned_rope(fields).theta, fields.text_or("rope.scaling.type", None)
    if kind in (None, "none"):
        return Rope(theta=theta)
    if kind != "yarn":
        raise fields.wrong_value("rope.scaling.type", "none or yarn")
    multiplier = fields.number_or("rope.scaling.yarn_log_multiplier", None)
    return replace(yarn(fields, theta), attention_factor=1.0, mscale_all_dim=multiplier and 10 * multiplier)


def read_routing(fields: Fields, count: int, top_k: int, *, corrected: bool) -> dict[str, Any]:
    """Fields of `Experts` that say how a token's experts are chosen. Version 3 is `corrected`."""
    gating = fields.integer_or("expert_gating_func", 0, minimum=0)
    if gating not in SCORINGS:
        raise fields.wrong_value("expert_gating_func", " or ".join(map(str, SCORINGS)))
    names = ("expert_group_count", "expert_group_used_count")
    groups, top_groups = read_groups(fields, names, count, top_k, corrected=corrected)
    return {
        "scoring": SCORINGS[gating],
        "normalised": fields.flag("expert_weights_norm"),
        "scaling": fields.number_or("expert_weights_scale", None) or 1.0,
        "groups": groups,
        "top_groups": top_groups,
        "group_score": "top2" if corrected and groups > 1 else "max",
        "correction": corrected,
    }
