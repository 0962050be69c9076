"""Checkpoints for the peers, made in Transformers' environment: `checkpoints.py WHAT SOURCE TARGET`."""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM


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
    """1.1 billion random weights (seed 0) under the small one's tokeniser."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
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
    model = LlamaForCausalLM(config)
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
    {"SmolLM2-135M": small, "Llama-1.1B-random": large, "text": text}[what](Path(source), Path(target))
