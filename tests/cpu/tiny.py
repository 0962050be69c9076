"""A model without weights to read: random ones for a small Llama that speaks in letters (tests/pure/letters.py)."""

from __future__ import annotations

import json
from pathlib import Path

from tests.pure.letters import BOS, END, TEMPLATE, VOCAB, text_tools

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": END,
    "dtype": "float32",
}


def write(folder: Path, **generation: object) -> Path:
    """The model's folder, for load_format "dummy"; `generation` goes into generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = text_tools().tokenizer
    assert tokenizer is not None
    tokenizer._hf_tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<e>", "add_bos_token": True, "chat_template": TEMPLATE}
    files = {"config": CONFIG, "tokenizer_config": settings, "generation_config": generation}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
