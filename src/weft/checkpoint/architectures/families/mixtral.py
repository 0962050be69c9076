"""Mixtral and MiniMax-M2: Mistral's attention before a mixture of experts in every layer."""

from __future__ import annotations

from msgspec.structs import replace

from weft.checkpoint.architectures.architecture import Architecture, ConfigFields, Names

NAMES = Names(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{expert}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)
MODULES = ((r"\.block_sparse_moe\.", ".mlp."),)
MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    config=ConfigFields(
        model_type="mixtral",
        max_positions=131072,
        kv_heads=8,
        bos=1,
        eos=(2,),
        bias="none",
        window="all",
        norm_eps=1e-5,
        values={"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    ),
    names=NAMES,
    runs=True,
    gguf_interleaved=True,
    modules=MODULES,
)
MINIMAX_M2 = Architecture(
    name="MiniMaxM2ForCausalLM",
    config=ConfigFields(
        model_type="minimax_m2",
        max_positions=196608,
        kv_heads=8,
        head_dim=128,
        bos=200034,
        eos=(200020,),
        bias="none",
        qk_norm="all",
        values={
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    names=replace(NAMES, correction="block_sparse_moe.e_score_correction_bias"),
    gguf="minimax-m2",
    fp8_in_blocks=True,
    modules=MODULES,
)
FAMILY = (MIXTRAL, MINIMAX_M2)
