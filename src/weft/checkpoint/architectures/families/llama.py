"""Llama, Mistral and Phi 3: RMS norm before each block, rotary positions, an MLP with a SiLU gate."""

from __future__ import annotations

from weft.checkpoint.architectures.architecture import Architecture, ConfigFields, Names
from weft.checkpoint.architectures.families.vision import LANGUAGE_MODEL_MODULES, inside_vision_model

LLAMA = Architecture(
    name="LlamaForCausalLM",
    config=ConfigFields(model_type="llama", max_positions=2048, bos=1, eos=(2,), mlp_bias=True),
    runs=True,
    gguf="llama",
    gguf_interleaved=True,
)
MISTRAL = Architecture(
    name="MistralForCausalLM",
    config=ConfigFields(
        model_type="mistral", max_positions=131072, kv_heads=8, bos=1, eos=(2,), bias="none", window="all"
    ),
    runs=True,
)
MISTRAL3 = inside_vision_model(MISTRAL, "Mistral3ForConditionalGeneration", "mistral3", LANGUAGE_MODEL_MODULES)
PHI3 = Architecture(
    name="Phi3ForCausalLM",
    config=ConfigFields(
        model_type="phi3",
        max_positions=4096,
        bos=1,
        eos=(32000,),
        bias="none",
        window="all",
        partial_rotary=True,
        norm_eps=1e-5,
        values={"sliding_window": None},
    ),
    names=Names(qkv=("self_attn.qkv_proj",) * 3, gate_up=("mlp.gate_up_proj",) * 2),
    runs=True,
    gguf="phi3",
)
FAMILY = (LLAMA, MISTRAL, MISTRAL3, PHI3)
