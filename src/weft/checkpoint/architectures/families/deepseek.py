"""DeepSeek V2 and V3, and Kimi-K2: latent attention; dense layers first, then layers with shared and routed experts."""

from __future__ import annotations

from weft.checkpoint.architectures.architecture import Architecture, ConfigFields, Names

LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
NAMES = Names(latent=True, correction="mlp.gate.e_score_correction_bias")
DEEPSEEK_V2 = Architecture(
    name="DeepseekV2ForCausalLM",
    config=ConfigFields(
        model_type="deepseek_v2",
        max_positions=2048,
        bos=1,
        eos=(2,),
        normalised="config",
        values=LATENT
        | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
        | {"topk_method": "greedy", "scoring_func": "softmax"},
    ),
    names=NAMES,
    runs=True,
    fp8_in_blocks=True,
    attention_kept=("nvfp4",),  # nvidia/DeepSeek-R1-0528-NVFP4
    gguf="deepseek2",
)
DEEPSEEK_V3 = Architecture(
    name="DeepseekV3ForCausalLM",
    config=ConfigFields(
        model_type="deepseek_v3",
        other_types=("kimi_k2",),
        max_positions=4096,
        bos=0,
        eos=(1,),
        normalised="config",
        values=LATENT
        | {
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
        },
    ),
    names=NAMES,
    runs=True,
    fp8_in_blocks=True,
    attention_kept=("nvfp4",),  # nvidia/DeepSeek-R1-0528-NVFP4
)
FAMILY = (DEEPSEEK_V2, DEEPSEEK_V3)
