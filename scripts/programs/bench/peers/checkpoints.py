"""Checkpoints for the peers, made in Transformers' environment: `checkpoints.py WHAT SOURCE TARGET`."""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


def small(source: Path, target: Path) -> None:
    """The GGUF file's weights, dequantised to bfloat16, with its tokeniser."""
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    told = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        told.pop(name, None)
    plain = LlamaForCausalLM(LlamaConfig(**{**told, "dtype": "bfloat16"}))
    plain.load_state_dict(model.state_dict(), strict=False)
    plain = plain.to(torch.bfloat16)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)
    # Readers of the layout before Transformers 5 look for these at the top.
    path = target / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["torch_dtype"] = "bfloat16"
    path.write_text(json.dumps(config, indent=2))
    path = target / "tokenizer_config.json"
    tokens = json.loads(path.read_text())
    tokens["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(tokens, indent=2))


def large(source: Path, target: Path) -> None:
    """1.1 billion random weights under the small one's tokeniser."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 100000.0, "rope_type": "default"},
        dtype="bfloat16",
    )
    random_weights(LlamaForCausalLM, config, source, target)


def mixture(source: Path, target: Path) -> None:
    """1.4 billion random weights in 32 experts, of which a token meets 4, under the small one's tokeniser."""
    config = Qwen3MoeConfig(
        vocab_size=49152,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
        dtype="bfloat16",
    )
    random_weights(Qwen3MoeForCausalLM, config, source, target)


def latent(source: Path, target: Path) -> None:
    """1.05 billion random weights in the form of DeepSeek-V2-Lite, a third of which a token meets, under the small
    one's tokeniser. llama.cpp takes 27 layers for the sign that queries are projected in one step."""
    config = DeepseekV2Config(
        vocab_size=49152,
        hidden_size=768,
        intermediate_size=3072,
        moe_intermediate_size=384,
        num_hidden_layers=27,
        first_k_dense_replace=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=32,
        n_shared_experts=1,
        num_experts_per_tok=4,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=False,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        dtype="bfloat16",
    )
    random_weights(DeepseekV2ForCausalLM, config, source, target)


def random_weights(kind: type[PreTrainedModel], config: PretrainedConfig, source: Path, target: Path) -> None:
    """A model with random weights (seed 0), and the tokeniser of another one."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = kind(config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(target, max_shard_size="8GB")
    for path in [*source.glob("tokenizer*"), *source.glob("chat_template*")]:
        shutil.copy(path, target)


def text(source: Path, target: Path) -> None:
    """The topics of CPython's help as token ids."""
    from pydoc_data import topics

    whole = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    target.write_text(json.dumps(AutoTokenizer.from_pretrained(source).encode(whole, add_special_tokens=False)))


if __name__ == "__main__":
    what, source, target = sys.argv[1:]
    recipes = {
        "SmolLM2-135M": small,
        "Llama-1.1B-random": large,
        "Qwen3-MoE-1.4B-random": mixture,
        "DeepSeek-V2-1B-random": latent,
        "text": text,
    }
    recipes[what](Path(source), Path(target))
