"""Qwen 1, 2 and 3, and the mixtures of experts of Qwen 2 and 3. Qwen 3 normalises each query and key head before the
rotation.

Values in `ConfigFields` are defaults for fields that a config.json omits.
"""

from __future__ import annotations

from weft.checkpoint.architectures.architecture import Architecture, ConfigFields, Names

QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    config=ConfigFields(model_type="qwen2", max_positions=32768, kv_heads=32, bias="qkv", window="some"),
    runs=True,
    gguf="qwen2",
)
QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    config=ConfigFields(
        model_type="qwen3", max_positions=32768, kv_heads=32, head_dim=128, qk_norm="head", window="some"
    ),
    runs=True,
    gguf="qwen3",
)
QWEN2_MOE = Architecture(
    name="Qwen2MoeForCausalLM",
    config=ConfigFields(
        model_type="qwen2_moe",
        max_positions=32768,
        kv_heads=16,
        bias="qkv",
        window="some",
        normalised="config",
        shared_gate=True,
        values={
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    names=Names(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate"),  # singular here
    runs=True,
    gguf="qwen2moe",
)
QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    config=ConfigFields(
        model_type="qwen3_moe",
        max_positions=32768,
        kv_heads=4,
        qk_norm="head",
        window="some",
        normalised="config",
        values={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    runs=True,
    gguf="qwen3moe",
)
QWEN1 = Architecture(
    name="QWenLMHeadModel",
    config=ConfigFields(
        model_type="qwen",
        max_positions=8192,
        bias="qkv",
        ffn_parts=2,  # intermediate_size is twice the MLP's width
        norm_eps_field="layer_norm_epsilon",
        keys={
            "kv_channels": "head_dim",
            # The trained length is `seq_length`; `max_position_embeddings` is the length after NTK scaling.
            "seq_length": "max_position_embeddings",
            "max_position_embeddings": "stretched_positions",
            "rotary_emb_base": "rope_theta",
            "rotary_pct": "partial_rotary_factor",
        },
        values={"use_dynamic_ntk": True, "use_logn_attn": True},
        logn=True,
    ),
    names=Names(
        embed="transformer.wte",
        layer="transformer.h.{layer}.",
        attention_norm="ln_1",
        qkv=("attn.c_attn",) * 3,
        out="attn.c_proj",
        mlp_norm="ln_2",
        gate_up=("mlp.w2", "mlp.w1"),  # w2 is the gate
        down="mlp.c_proj",
        norm="transformer.ln_f",
    ),
    runs=True,
    gguf="qwen",
)
FAMILY = (QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, QWEN1)
