"""Tiny random checkpoints, made by Transformers itself, with biases and norms that are not zero or one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 160
LAYERS = 5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# The same in the words of models that have none of SIZES' and HEADS' own: 12 narrow heads, or 6.
OPT_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "ffn_dim": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 12,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 48,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
GPT2_SIZES = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": LAYERS,
    "n_head": 6,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}


@dataclass(frozen=True)
class Recipe:
    """One checkpoint: the architecture's name in Transformers and what differs from `sizes`.

    `classes` are the configuration and the model of an architecture that Transformers does not have, written for a test
    as subclasses of PretrainedConfig and PreTrainedModel; `model` is then only the name of the recipe.
    """

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: {**SIZES, **HEADS})
    style: int = 5  # config.json as Transformers 4 or 5 writes it
    shards: bool = False
    config_class: str = ""  # if it is not the model's name and Config
    vision: bool = False  # the model lies inside one that sees as well
    classes: tuple[type[transformers.PretrainedConfig], type[transformers.PreTrainedModel]] | None = None


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


MODEL_CLASSES = {"GPT2": "GPT2LMHeadModel"}  # whose name is not the recipe's model and ForCausalLM
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "tie_word_embeddings": False}
FEW = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 96, "tie_word_embeddings": False}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32, "truncate": False}
# Latent attention of 6 heads, beside 6 experts in 3 groups. No two lengths are equal.
LATENT_SIZES = SIZES | {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "tie_word_embeddings": False,
}
MSCALES = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32}
FULL, SLIDING = "full_attention", ["sliding_attention"] * 2
GEMMA3 = {"sliding_window": 9, "query_pre_attn_scalar": 20, "tie_word_embeddings": True}
RECIPES = {
    "llama": Recipe("Llama", {"tie_word_embeddings": False}),
    "llama-biased": Recipe("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, style=4),
    "llama-linear": Recipe("Llama", rope("linear", factor=4.0)),
    "llama-dynamic": Recipe("Llama", rope("dynamic", factor=2.0), style=4),
    "llama3": Recipe(
        "Llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
        shards=True,
    ),
    "llama-yarn": Recipe("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=32), style=4),
    "llama-mha-odd": Recipe("Llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10}),
    "llama-mqa": Recipe("Llama", {"num_attention_heads": 6, "num_key_value_heads": 1, "attention_bias": True}),
    # Queries, keys and values lie in one tensor, gate and up projections in another.
    "phi3": Recipe("Phi3", {"sliding_window": 9, "tie_word_embeddings": False}),
    # 6 of a head's 8 numbers are rotated; every text is a long one.
    "phi3-longrope": Recipe(
        "Phi3",
        {"sliding_window": None, "tie_word_embeddings": True, "original_max_position_embeddings": 1}
        | rope(
            "longrope",
            partial_rotary_factor=0.75,
            short_factor=[1.0, 1.1, 1.2],
            long_factor=[1.0, 4.0, 16.0],
            attention_factor=1.2,
            original_max_position_embeddings=1,
        ),
        {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "smollm2": Recipe(
        "Llama",
        {
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": Recipe("Mistral", {"sliding_window": 11}),
    "mistral-full": Recipe("Mistral", {"sliding_window": None}, style=4),
    "qwen2": Recipe("Qwen2", {"tie_word_embeddings": True}, style=4),
    "qwen2-window": Recipe("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": Recipe("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3-biased": Recipe("Qwen3", {"attention_bias": True, "tie_word_embeddings": False}, style=4),
    "qwen3-moe": Recipe("Qwen3Moe", MIXTURE | {"norm_topk_prob": True, "mlp_only_layers": [1, 3]}),
    "qwen3-moe-biased": Recipe("Qwen3Moe", MIXTURE | {"attention_bias": True, "decoder_sparse_step": 2}, style=4),
    "mixtral": Recipe("Mixtral", FEW),
    "mixtral-window": Recipe("Mixtral", FEW | {"sliding_window": 11, "num_local_experts": 5}, style=4),
    "qwen2-moe": Recipe("Qwen2Moe", MIXTURE | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [1, 3]}),
    "qwen2-moe-normalised": Recipe(
        "Qwen2Moe",
        MIXTURE | {"shared_expert_intermediate_size": 160, "norm_topk_prob": True, "decoder_sparse_step": 2},
        style=4,
    ),
    # With limits that some of these small numbers reach.
    "gpt-oss": Recipe("GptOss", FEW | {"sliding_window": 9, "swiglu_limit": 0.7} | rope("yarn", **YARN)),
    "gpt-oss-4": Recipe("GptOss", FEW | {"num_local_experts": 5, "sliding_window": 9} | rope("yarn", **YARN), style=4),
    "deepseek-v2": Recipe(
        "DeepseekV2",
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, "attention_bias": True}
        | rope("yarn", **MSCALES, mscale=1.2, mscale_all_dim=0.7),
        sizes=LATENT_SIZES,
        style=4,
    ),
    "deepseek-v2-lite": Recipe("DeepseekV2", {"q_lora_rank": None, "topk_method": "greedy"}, sizes=LATENT_SIZES),
    "deepseek-v3": Recipe(
        "DeepseekV3",
        {"routed_scaling_factor": 2.5, "n_shared_experts": 1, "rms_norm_eps": 0.01}
        | rope("yarn", **MSCALES, mscale=1.0, mscale_all_dim=1.0),
        sizes=LATENT_SIZES,
        style=4,
    ),
    # Columns of every matrix in blocks of 32, as quantised weights are held.
    "deepseek-v3-wide": Recipe(
        "DeepseekV3", sizes=LATENT_SIZES | {"hidden_size": 96, "q_lora_rank": 32, "v_head_dim": 32}, style=4
    ),
    "opt": Recipe("OPT", sizes=OPT_SIZES),
    "opt-post-norm": Recipe("OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}, sizes=OPT_SIZES),
    "gpt2": Recipe("GPT2", sizes=GPT2_SIZES),
    "gemma3": Recipe("Gemma3", GEMMA3 | {"layer_types": [*SLIDING, FULL, *SLIDING]}, config_class="Gemma3TextConfig"),
    "gemma3-scaled": Recipe(
        "Gemma3",
        GEMMA3
        | {"layer_types": [*SLIDING, FULL, *SLIDING]}
        | {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING[0]: {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        style=4,
        config_class="Gemma3TextConfig",
    ),
    "gemma3-vision": Recipe(
        "Gemma3", GEMMA3 | {"layer_types": [*SLIDING, FULL, *SLIDING]}, config_class="Gemma3TextConfig", vision=True
    ),
}
# As other files can describe them: experts in every layer, and five layers with a window to one without.
GGUF_RECIPES = {
    "qwen3-moe-gguf": Recipe("Qwen3Moe", MIXTURE | {"norm_topk_prob": True}),
    "qwen2-moe-gguf": Recipe("Qwen2Moe", MIXTURE | {"shared_expert_intermediate_size": 64}),
    # llama.cpp knows no other limit than 7.
    "gpt-oss-gguf": Recipe("GptOss", FEW | {"sliding_window": 9} | rope("yarn", **YARN)),
    "gpt-oss-mxfp4": Recipe("GptOss", FEW | {"hidden_size": 64, "sliding_window": 9} | rope("yarn", **YARN)),
    "deepseek-v2-gguf": Recipe(
        "DeepseekV2",
        {"q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}
        | rope("yarn", **MSCALES, mscale=0.7, mscale_all_dim=0.7),
        sizes=LATENT_SIZES,
    ),
    "deepseek-v3-gguf": Recipe("DeepseekV3", rope("yarn", **MSCALES, mscale=1.0, mscale_all_dim=1.0), LATENT_SIZES),
    "gemma3-gguf": Recipe(
        "Gemma3", GEMMA3 | {"num_hidden_layers": 7, "query_pre_attn_scalar": 16}, config_class="Gemma3TextConfig"
    ),
}

# Of models that Weft has no table of; `head_dim` is not a field of all of their configurations.
LIBRARY_SIZES = {**SIZES, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
LIBRARY_RECIPES = {
    "olmo2": Recipe("Olmo2", {"tie_word_embeddings": False}, sizes=LIBRARY_SIZES),
    "granite": Recipe(
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
        sizes=LIBRARY_SIZES,
    ),
    "cohere": Recipe("Cohere", {"logit_scale": 0.25}, sizes=LIBRARY_SIZES),
    "starcoder2": Recipe("Starcoder2", {"use_bias": True, "sliding_window": 9}, sizes=LIBRARY_SIZES),
}


def make(name: str, folder: Path) -> Path:
    """Write the checkpoint of a recipe in fp32 into a new folder of its name, and return that folder."""
    recipe = (RECIPES | GGUF_RECIPES | LIBRARY_RECIPES)[name]
    torch.manual_seed(len(name))
    model = create_model(recipe, config_fields(recipe)).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif key.endswith("sinks"):
                parameter.normal_(0, 1)
            elif "norm" in key or parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.15)
        for key, buffer in model.named_buffers():
            if key.endswith("correction_bias"):
                buffer.normal_(0, 0.1)
    out = folder / name
    # Sampling defaults are not what these tests are about.
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(out, max_shard_size="100KB" if recipe.shards else "5GB")
    style_config(out, recipe)
    return out


def write_config(name: str, folder: Path, layers: int) -> Path:
    """Write the config.json of a recipe with so many layers, for weights that are drawn at random, into a new folder of
    its name, and return that folder."""
    recipe = RECIPES[name]
    fields = config_fields(recipe) | {"n_layer" if "n_layer" in recipe.sizes else "num_hidden_layers": layers}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][1 : 1 + layers]
    if "mlp_only_layers" in fields:
        fields["mlp_only_layers"] = [layer for layer in fields["mlp_only_layers"] if layer < layers]
    create_model(recipe, fields).config.save_pretrained(folder / name)
    style_config(folder / name, recipe)
    return folder / name


def config_fields(recipe: Recipe) -> dict[str, Any]:
    """The fields of the config.json of a recipe that are not Transformers' defaults."""
    fields = {**recipe.sizes, **recipe.config}
    if recipe.model in ("Qwen2", "Qwen2Moe"):
        fields.pop("head_dim")
        fields["hidden_size"] = 96
    return fields


def style_config(folder: Path, recipe: Recipe) -> None:
    """Turn config.json into the words of the recipe's version of Transformers."""
    if recipe.style == 4:
        path = folder / "config.json"
        path.write_text(json.dumps(as_version_4(json.loads(path.read_text()))))


def create_model(recipe: Recipe, values: dict[str, Any]) -> transformers.PreTrainedModel:
    """The model of a recipe with the fields `values` in its config."""
    if recipe.classes:
        config_class, model_class = recipe.classes
        transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        transformers.AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
        return model_class(config_class(**values))
    config = getattr(transformers, recipe.config_class or f"{recipe.model}Config")(**values)
    kind = "ForCausalLM"
    if recipe.vision:
        config = transformers.Gemma3Config(text_config=config.to_dict(), vision_config=VISION)
        kind = "ForConditionalGeneration"
    return getattr(transformers, MODEL_CLASSES.get(recipe.model, recipe.model + kind))(config)


def as_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same config in the words of Transformers 4."""
    scaling = config.pop("rope_parameters", None) or {}
    config["torch_dtype"] = config.pop("dtype", "float32")
    if FULL in scaling:
        config["rope_local_base_freq"] = scaling[SLIDING[0]]["rope_theta"]
        config["sliding_window_pattern"] = config["layer_types"].index(FULL) + 1
        scaling = scaling[FULL]
    config["rope_theta"] = scaling.pop("rope_theta", 10000.0)
    kind = scaling.pop("rope_type", "default")
    key = "rope_type" if "rope_local_base_freq" in config else "type"
    config["rope_scaling"] = None if kind == "default" else {key: kind, **scaling}
    config.pop("layer_types", None)
    return config


def reference(path: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The same checkpoint in Transformers, in eager mode."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
