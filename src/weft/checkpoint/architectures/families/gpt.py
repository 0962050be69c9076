"""OPT, GPT-2 and gpt-oss.

OPT and GPT-2 have layer norm, learned positions and an ungated MLP; gpt-oss is a mixture of experts with attention
sinks. All three have biases.
"""

from __future__ import annotations

from weft.checkpoint.architectures.architecture import Architecture, ConfigFields, Names, Stack

OPT = Architecture(
    name="OPTForCausalLM",
    config=ConfigFields(
        model_type="opt",
        max_positions=2048,
        bos=2,
        eos=(2,),
        bias="all",
        tied=True,
        norm="layer",
        activation="relu",
        norm_eps_field="",
        norm_eps=1e-5,
        keys={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    ),
    names=Names(
        embed="model.decoder.embed_tokens",
        project_in="model.decoder.project_in",
        project_out="model.decoder.project_out",
        positions="model.decoder.embed_positions",
        layer="model.decoder.layers.{layer}.",
        attention_norm="self_attn_layer_norm",
        out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        gate_up=("fc1",),
        down="fc2",
        norm="model.decoder.final_layer_norm",
    ),
    runs=True,
    renamed=((r"^decoder\.", "model.decoder."),),
    positions_before=2,
)
GPT2 = Architecture(
    name="GPT2LMHeadModel",
    config=ConfigFields(
        model_type="gpt2",
        ffn_of_hidden=4,
        max_positions=1024,
        bos=50256,
        eos=(50256,),
        bias="all",
        tied=True,
        norm="layer",
        activation="gelu_tanh",
        keys={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "n_positions": "max_position_embeddings",
            "activation_function": "hidden_act",
        },
        norm_eps_field="layer_norm_epsilon",
        norm_eps=1e-5,
    ),
    names=Names(
        embed="wte",
        positions="wpe",
        layer="h.{layer}.",
        attention_norm="ln_1",
        qkv=("attn.c_attn",) * 3,
        out="attn.c_proj",
        mlp_norm="ln_2",
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
        norm="ln_f",
        transposed=True,
    ),
    runs=True,
    gguf="gpt2",
    modules=((r"^(?=(wte|wpe|h|ln_f)\.)", "transformer."),),
    renamed=((r"^transformer\.", ""),),
)
GPT_OSS = Architecture(
    name="GptOssForCausalLM",
    config=ConfigFields(
        model_type="gpt_oss",
        max_positions=131072,
        kv_heads=8,
        head_dim=64,
        bias="all",
        window=2,
        keys={"experts_per_token": "num_experts_per_tok"},
        gain=1.702,
        limit=7.0,
        up_offset=1.0,
        norm_eps=1e-5,
        values={
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    names=Names(
        sinks="self_attn.sinks",
        router="mlp.router",
        stacks=(
            Stack("mlp.experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight"), transposed=True),
            Stack("mlp.experts.gate_up_proj_bias", ("gate_proj.bias", "up_proj.bias")),
            Stack("mlp.experts.down_proj", ("down_proj.weight",), transposed=True),
            Stack("mlp.experts.down_proj_bias", ("down_proj.bias",)),
        ),
        gguf_mlp_norm="post_attention_norm",
    ),
    runs=True,
    gguf="gpt-oss",
    published=("mxfp4",),
    attention_kept=("mxfp4",),  # openai/gpt-oss-120b: quantization_config.modules_to_not_convert
)
FAMILY = (GPT_OSS, OPT, GPT2)
