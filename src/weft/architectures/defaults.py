"""Transformers' default for each field that a config.json may leave out, per architecture.

Source: the configuration classes of Transformers 5.23; for Qwen v1 and MiniMax, the classes in their repositories.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults and field names of one architecture's config.json.

    - `bias`: which attention projections have a bias. "config": q, k, v and o, if `attention_bias` is set; "qkv":
      always those three; "all": all four, and the MLP; "none": no projection.
    - `window`: which layers have a sliding window. "none"; "all"; "some": those that `use_sliding_window` and
      `layer_types` name; a number n: all but every nth layer, unless `layer_types` is given.
    - `keys`: this architecture's name of a field -> the usual name.
    - `values`: the usual name of a field -> its value if the field is missing.
    - `ffn_of_hidden`: MLP width as a multiple of the hidden size, if the width is not given.
    - `ffn_parts`: number of MLP widths that `intermediate_size` counts together.
    - `inner`: field that holds the language model of a vision-language model.
    """

    model_type: str
    max_positions: int
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden size over query heads
    bos: int | None = None
    eos: tuple[int, ...] = ()
    bias: str = "config"
    mlp_bias: bool = False  # True: the config's own `mlp_bias` counts
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
