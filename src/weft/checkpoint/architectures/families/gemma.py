"""Gemma 2 and 3: norms before and after each block, an embedding scaled by sqrt(hidden), windows in most layers.

A norm's weight is stored less 1. Gemma 3 has five layers with a window, and a rotary base of their own, to each layer
without one, and normalises each query and key head.
"""

from __future__ import annotations

from weft.checkpoint.architectures.architecture import Architecture, ConfigFields, Names
from weft.checkpoint.architectures.families.vision import LANGUAGE_MODEL_MODULES, inside_vision_model

NAMES = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
GEMMA2 = Architecture(
    name="Gemma2ForCausalLM",
    config=ConfigFields(
        model_type="gemma2",
        max_positions=8192,
        kv_heads=4,
        head_dim=256,
        bos=2,
        eos=(1,),
        tied=True,
        window=2,
        query_scale="query_pre_attn_scalar",
        norm_offset=1.0,
        activation="gelu_tanh",
        scaled_embedding=True,
        keys={"hidden_activation": "hidden_act"},
        values={"query_pre_attn_scalar": 256},
    ),
    names=NAMES,
    norms="both",
    gguf="gemma2",
)
GEMMA3 = Architecture(
    name="Gemma3ForCausalLM",
    config=ConfigFields(
        model_type="gemma3_text",
        max_positions=131072,
        kv_heads=4,
        head_dim=256,
        bos=2,
        eos=(1,),
        qk_norm="head",
        tied=True,
        window=6,
        local_rope="rope_local_base_freq",
        stretched=True,
        query_scale="query_pre_attn_scalar",
        norm_offset=1.0,
        activation="gelu_tanh",
        scaled_embedding=True,
        keys={"sliding_window_pattern": "window_pattern", "hidden_activation": "hidden_act"},
        values={
            "num_attention_heads": 8,
            "vocab_size": 262208,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "query_pre_attn_scalar": 256,
        },
    ),
    names=NAMES,
    norms="both",
    runs=True,
    gguf="gemma3",
)
GEMMA3_VISION = inside_vision_model(GEMMA3, "Gemma3ForConditionalGeneration", "gemma3", LANGUAGE_MODEL_MODULES)
FAMILY = (GEMMA2, GEMMA3, GEMMA3_VISION)
