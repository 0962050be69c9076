"""llama.cpp's tensor names as data: ggml's name of each tensor and Hugging Face's.

Source: the tensor names of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and `gguf.tensor_mapping`.
"""

from __future__ import annotations

import re
from functools import lru_cache

from weft.checkpoint.architectures.architecture import Names

# Modules whose rows llama.cpp reorders in an architecture that is `gguf_interleaved`.
INTERLEAVED = ("attn_q", "attn_k")
UNUSED = ("attn_rot_embd",)  # rotary frequencies that old converters wrote; engines compute them
# Divisors of the rotary frequencies, which are part of the shape and no weights: llama3's, and longrope's two sets.
ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"

# Parameters of their own, with the ends that their names have only in GGUF files.
PARAMETERS = {"attn_sinks": "weight", "exp_probs_b": "bias"}
# Modules of latent attention, besides the output projection. Files have attn_kv_b, or attn_k_b and attn_v_b.
LATENT_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}

_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)(?:\.(?P<expert>\d+))?\.(?P<kind>weight|bias)")


@lru_cache(maxsize=32)
def outer_modules(names: Names) -> dict[str, str]:
    """Hugging Face's name of each module outside the layers, by ggml's."""
    modules = {
        "token_embd": names.embed,
        "position_embd": names.positions,
        "output_norm": names.norm,
        "output": names.head,
    }
    return {own: name for own, name in modules.items() if name}


@lru_cache(maxsize=32)
def layer_modules(names: Names) -> dict[str, str]:
    """Hugging Face's name of each module of a layer, by ggml's. A stack of experts has {expert} in its name."""
    gate_up, expert = names.gate_up, names.expert
    modules = {
        "attn_norm": names.attention_norm,
        **_attention_modules(names),
        "attn_q_norm": names.q_norm,
        "attn_k_norm": names.k_norm,
        "attn_output": names.out,
        "attn_sinks": names.sinks,
        "post_attention_norm": names.attention_post_norm,
        names.gguf_mlp_norm: names.mlp_norm,
        "ffn_gate": gate_up[0] if names.gated else "",
        "ffn_up": gate_up[-1],
        "ffn_down": names.down,
        "post_ffw_norm": names.mlp_post_norm,
        "ffn_gate_inp": names.router,
        "exp_probs_b": names.correction,
        "ffn_gate_exps": expert + names.expert_gate_up[0],
        "ffn_up_exps": expert + names.expert_gate_up[-1],
        "ffn_down_exps": expert + names.expert_down,
        "ffn_gate_inp_shexp": names.shared_gate,
        "ffn_gate_shexp": names.shared + "gate_proj",
        "ffn_up_shexp": names.shared + "up_proj",
        "ffn_down_shexp": names.shared + "down_proj",
    }
    return {own: name for own, name in modules.items() if name}


def _attention_modules(names: Names) -> dict[str, str]:
    """Hugging Face's names of the projections of queries, keys and values, which may be one."""
    if names.latent:
        return LATENT_MODULES
    if len(set(names.qkv)) == 1:
        return {"attn_qkv": names.qkv[0]}
    return dict(zip(("attn_q", "attn_k", "attn_v"), names.qkv, strict=True))


def hugging_face(name: str, names: Names) -> str | None:
    """Hugging Face's name for ggml's name of a tensor; None for a tensor that the architecture does not have.

    The name of a stack of experts has {expert} for the expert's number. Older files have a tensor per expert.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, module, expert, kind = match.group("layer", "module", "expert", "kind")
    if layer is None:
        known = outer_modules(names).get(module) if expert is None else None
        return known and f"{known}.{kind}"
    known = layer_modules(names).get(module if expert is None else f"{module}_exps")
    if known is None:
        return None
    prefix = names.layer.format(layer=layer)
    if expert is not None:
        known = known.format(expert=expert)
    return prefix + known if module in PARAMETERS else f"{prefix}{known}.{kind}"


def ggml_name(name: str, names: Names, layers: int) -> str:
    """ggml's name for Hugging Face's name of a tensor of a model with this number of layers; for an expert's tensor,
    the name of the stack of all experts."""
    module, _, kind = name.rpartition(".")
    outer = {theirs: own for own, theirs in outer_modules(names).items()}
    if module in outer:
        return f"{outer[module]}.{kind}"
    for layer in range(layers):
        for own, theirs in layer_modules(names).items():
            pattern = re.escape(names.layer.format(layer=layer) + theirs).replace(r"\{expert\}", r"\d+")
            if re.fullmatch(pattern, name if own in PARAMETERS else module):
                return f"blk.{layer}.{own}.{PARAMETERS.get(own, kind)}"
    return name


def interleaved_layer(name: str) -> int | None:
    """The layer of a tensor whose rows llama.cpp reorders in an architecture that is `gguf_interleaved`; else None."""
    match = _NAME.fullmatch(name)
    return int(match["layer"]) if match is not None and match["layer"] and match["module"] in INTERLEAVED else None


def is_unused(name: str) -> bool:
    """Return True for a tensor that a file may hold and that is no weight."""
    return name in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS) or _layer_module(name) in UNUSED


def _layer_module(name: str) -> str | None:
    match = _NAME.fullmatch(name)
    return match["module"] if match is not None and match["layer"] is not None else None
