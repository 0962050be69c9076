"""llama.cpp's tensor names as data: ggml's name of each tensor and Hugging Face's.

Source: the tensor names of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and `gguf.tensor_mapping`.
"""

from __future__ import annotations

import re

# A module's parameters, `.weight` and `.bias`, have the same names in both.
MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Modules whose rows llama.cpp reorders, so that rotary pairs lie side by side; only in INTERLEAVED_ARCHITECTURES.
INTERLEAVED = ("attn_q", "attn_k")
INTERLEAVED_ARCHITECTURES = ("LlamaForCausalLM",)
UNUSED = ("attn_rot_embd",)  # rotary frequencies that old converters wrote; engines compute them
ROPE_FACTORS = "rope_freqs.weight"  # llama3's divisors of the rotary frequencies: part of the shape, not a weight

_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")


def hugging_face(name: str) -> str | None:
    """Hugging Face's name for ggml's name of a tensor; None for a tensor that these models do not have."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, module, kind = match.group("layer", "module", "kind")
    known = MODULES.get(module) if layer is None else LAYER_MODULES.get(module)
    if known is None:
        return None
    return f"{known}.{kind}" if layer is None else f"model.layers.{layer}.{known}.{kind}"


def is_interleaved(name: str) -> bool:
    """Return True if llama.cpp reorders the rows of this tensor in INTERLEAVED_ARCHITECTURES."""
    return _layer_module(name) in INTERLEAVED


def is_unused(name: str) -> bool:
    """Return True for a tensor that a file may hold and that is ignored."""
    return _layer_module(name) in UNUSED


def _layer_module(name: str) -> str | None:
    match = _NAME.fullmatch(name)
    return match["module"] if match is not None and match["layer"] is not None else None
