"""Fields of config.json that DeepSeek's models have: latent attention, and the choice of experts in groups.

Source: modeling_deepseek.py in the repositories deepseek-ai/DeepSeek-V2 and deepseek-ai/DeepSeek-V3 on the Hugging Face
hub.
"""

from __future__ import annotations

from math import sqrt
from typing import Literal, NamedTuple

from weft.checkpoint.architectures.shape import LatentAttention, Rope
from weft.checkpoint.files.fields import Fields

NORM_EPS = 1e-6  # epsilon of the norms of compressed vectors, whatever rms_norm_eps says
METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SCORINGS: dict[str, Literal["softmax", "sigmoid"]] = {"softmax": "softmax", "sigmoid": "sigmoid"}


def read_latent_attention(config: Fields, rope: Rope, *, bias: bool) -> LatentAttention | None:
    """Multi-head latent attention; None if the model has none. Raises ModelError for a wrong field."""
    if "kv_lora_rank" not in config:
        return None
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise config.wrong_value("qk_rope_head_dim", "even, since dims are rotated in pairs")
    return LatentAttention(
        heads=config.integer("num_attention_heads"),
        kv_lora_rank=config.integer("kv_lora_rank"),
        q_lora_rank=config.integer_or("q_lora_rank", None),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim"),
        scale=latent_scale(nope_dim + rope_dim, rope),
        rope=rope,
        interleaved=config.flag("rope_interleave", True),
        bias=bias,
        norm_eps=NORM_EPS,
    )


def latent_scale(head_dim: int, rope: Rope) -> float:
    """Factor on the product of query and key: under YaRN its second magnitude multiplies both of them."""
    magnitude = rope.magnitude(rope.mscale_all_dim) if rope.kind == "yarn" and rope.mscale_all_dim else 1.0
    return magnitude**2 / sqrt(head_dim)


class Routing(NamedTuple):
    """Fields of `Experts` that say how a token's experts are chosen."""

    scoring: Literal["softmax", "sigmoid"]
    scaling: float
    groups: int
    top_groups: int
    group_score: Literal["max", "top2"]
    correction: bool


def read_routing(config: Fields, count: int, top_k: int, *, normalised: bool) -> Routing:
    """The choice of `top_k` of `count` experts, whose weights are `normalised`. Raises ModelError for a wrong field."""
    method, scoring = config.text_or("topk_method", None), config.text_or("scoring_func", None)
    if method not in METHODS:
        raise config.wrong_value("topk_method", " or ".join(METHODS))
    if scoring is None or scoring not in SCORINGS:
        raise config.wrong_value("scoring_func", " or ".join(SCORINGS))
    corrected = method == "noaux_tc"
    factor = config.number_or("routed_scaling_factor", None) or 1.0
    groups, top_groups = 1, 1
    if method != "greedy":
        groups, top_groups = read_groups(config, ("n_group", "topk_group"), count, top_k, corrected=corrected)
    return Routing(
        scoring=SCORINGS[scoring],
        # V2 multiplies weights by the factor only if it does not normalise them.
        scaling=factor if corrected or not normalised else 1.0,
        groups=groups,
        top_groups=top_groups,
        group_score="top2" if corrected and groups > 1 else "max",
        correction=corrected,
    )


def read_groups(fields: Fields, names: tuple[str, str], count: int, top_k: int, *, corrected: bool) -> tuple[int, int]:
    """The number of groups that `count` experts are in, and the number of groups that take part, from the fields of
    these names.

    A group's score is its best expert's, or if `corrected` that of its two best ones, so that it has as many. Raises
    ModelError for groups out of which a token's `top_k` experts cannot be chosen.
    """
    name, top_name = names
    groups, least = fields.integer_or(name, None, minimum=0) or 1, 2 if corrected else 1
    if groups == 1:
        return 1, 1
    if count % groups or count // groups < least:
        raise fields.wrong_value(name, f"a divisor of the {count} experts that leaves {least} or more in a group")
    top_groups = fields.integer(top_name, maximum=groups)
    open_experts = top_groups * count // groups
    if top_k > open_experts:
        raise fields.wrong_value(top_name, f"more: its groups have {open_experts} experts, a token takes {top_k}")
    return groups, top_groups
