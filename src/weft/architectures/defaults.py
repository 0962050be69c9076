"""Defaults: what Transformers takes where a config.json does not say, for each architecture.

Source: the configuration classes of Transformers 5.23, and for Qwen v1 and MiniMax those in their repositories.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that differ between architectures.

    `bias`: "config" asks `attention_bias`, for q, k, v and o; "qkv" always has those three; "all" has them
    everywhere, "none" never. `window`: "none", "all" layers, or "some" of them as `use_sliding_window` and the
    layers' types say; a number n: each nth layer has none, unless the layers' types say otherwise. `keys` are its
    own words for the usual ones, `values` what it takes for a missing one, under the usual name. The width of
    the MLP is `ffn_of_hidden` times the hidden size where it is not given; its `intermediate_size` counts
    `ffn_parts` of it together. `inner` holds the language model of one that also sees pictures.
    """

    model_type: str
    max_positions: int
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden size over query heads
    bos: int | None = None
    eos: tuple[int, ...] = ()
    bias: str = "config"
    mlp_bias: bool = False  # whether `mlp_bias` is asked
    qk_norm: bool = False
    tied: bool = False
    window: str | int = "none"
    keys: Mapping[str, str] = {}
    values: Mapping[str, object] = {}
    ffn_of_hidden: int = 0
    ffn_parts: int = 1
    inner: str = ""


MISTRAL = Defaults(model_type="mistral", max_positions=131072, kv_heads=8, bos=1, eos=(2,), bias="none", window="all")
GEMMA3 = Defaults(
    model_type="gemma3_text",
    max_positions=131072,
    kv_heads=4,
    head_dim=256,
    bos=2,
    eos=(1,),
    qk_norm=True,
    tied=True,
    window=6,
    keys={"sliding_window_pattern": "window_pattern"},
    values={"num_attention_heads": 8, "vocab_size": 262208},
)
MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK3 = Defaults(
    model_type="deepseek_v3",
    max_positions=4096,
    bias="none",
    bos=0,
    eos=(1,),
    values=MLA
    | {
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    },
)
DEFAULTS = {
    "LlamaForCausalLM": Defaults(model_type="llama", max_positions=2048, bos=1, eos=(2,), mlp_bias=True),
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": Defaults(model_type="qwen2", max_positions=32768, kv_heads=32, bias="qkv", window="some"),
    "Qwen3ForCausalLM": Defaults(
        model_type="qwen3", max_positions=32768, kv_heads=32, head_dim=128, qk_norm=True, window="some"
    ),
    "MixtralForCausalLM": Defaults(
        model_type="mixtral",
        max_positions=131072,
        kv_heads=8,
        bos=1,
        eos=(2,),
        bias="none",
        window="all",
        values={"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    ),
    "Qwen3MoeForCausalLM": Defaults(
        model_type="qwen3_moe",
        max_positions=32768,
        kv_heads=4,
        qk_norm=True,
        window="some",
        values={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "DeepseekV2ForCausalLM": Defaults(
        model_type="deepseek_v2",
        max_positions=2048,
        bos=1,
        eos=(2,),
        bias="none",
        values=MLA | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
    ),
    "DeepseekV3ForCausalLM": DEEPSEEK3,
    "MiniMaxM2ForCausalLM": Defaults(
        model_type="minimax_m2",
        max_positions=196608,
        kv_heads=8,
        head_dim=128,
        bos=200034,
        eos=(200020,),
        bias="none",
        qk_norm=True,
    ),
    "GptOssForCausalLM": Defaults(
        model_type="gpt_oss",
        max_positions=131072,
        kv_heads=8,
        head_dim=64,
        bias="all",
        window=2,
        keys={"experts_per_token": "num_experts_per_tok"},
        values={"sliding_window": 128, "rms_norm_eps": 1e-5},
    ),
    "Gemma2ForCausalLM": Defaults(
        model_type="gemma2", max_positions=8192, kv_heads=4, head_dim=256, bos=2, eos=(1,), tied=True, window=2
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": msgspec.structs.replace(GEMMA3, model_type="gemma3", inner="text_config"),
    "Mistral3ForConditionalGeneration": msgspec.structs.replace(MISTRAL, model_type="mistral3", inner="text_config"),
    "Phi3ForCausalLM": Defaults(
        model_type="phi3",
        max_positions=4096,
        bos=1,
        eos=(32000,),
        bias="none",
        window="all",
        values={"sliding_window": None, "rms_norm_eps": 1e-5},
    ),
    "QWenLMHeadModel": Defaults(
        model_type="qwen",
        max_positions=8192,
        bias="qkv",
        ffn_parts=2,
        keys={"kv_channels": "head_dim", "seq_length": "max_position_embeddings", "layer_norm_epsilon": "rms_norm_eps"},
    ),
    "OPTForCausalLM": Defaults(
        model_type="opt",
        max_positions=2048,
        bos=2,
        eos=(2,),
        bias="all",
        tied=True,
        keys={"ffn_dim": "intermediate_size"},
        values={"rms_norm_eps": 1e-5},
    ),
    "GPT2LMHeadModel": Defaults(
        model_type="gpt2",
        ffn_of_hidden=4,
        max_positions=1024,
        bos=50256,
        eos=(50256,),
        bias="all",
        tied=True,
        keys={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        values={"rms_norm_eps": 1e-5},
    ),
}
