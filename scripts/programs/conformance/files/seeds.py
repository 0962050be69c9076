"""Tiny valid models of every form that Weft reads, to be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors.numpy import load_file, save_file

from tests.cpu import fp8_checkpoints, integer_checkpoints, published
from tests.pure import gguf_files, vocabularies
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.files import safetensors

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 768,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
GENERATION = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [0, 2], "do_sample": True}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SETTINGS = {
    "add_bos_token": True,
    "bos_token": "<|endoftext|>",
    "eos_token": {"content": "<|endoftext|>"},
    "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}, "605": {"content": "<x>"}},
    "additional_special_tokens": ["<|im_end|>"],
    "chat_template": TEMPLATE,
}
QUANTISED: dict[str, tuple[ModuleType, str]] = {
    "gptq": (published, "gptq-ordered"),
    "awq": (published, "awq-32"),
    "compressed": (published, "compressed-zeros"),
    "fp8": (fp8_checkpoints, "blocks-left"),
    "fp8-tensor": (fp8_checkpoints, "tensor"),
    "nf4": (integer_checkpoints, "nf4-nested"),
    "int8": (integer_checkpoints, "llm-int8"),
    "w8a8": (integer_checkpoints, "w8a8"),
}
GGUF_TYPES = ("F16", "Q4_K", "Q8_0", "MXFP4")


def write_seeds(folder: Path) -> list[Path]:
    """Write all models below a folder, and return the folder of each."""
    plain = folder / "plain"
    plain.mkdir(parents=True)
    (plain / "config.json").write_text(json.dumps(CONFIG))
    shape = resolve(str(plain), load_format="dummy").shape
    published.write(plain, shape, published.Recipe("gptq", left=("proj",)), CONFIG)
    (plain / "config.json").write_text(json.dumps(CONFIG))
    _add_texts(plain)
    for name, (module, recipe) in QUANTISED.items():
        module.write(folder / name, shape, module.RECIPES[recipe], CONFIG)
    for type in GGUF_TYPES:
        (folder / type).mkdir()
        others = {"embed_tokens": "F32", "lm_head": "F32"}
        gguf_files.write_model(folder / type / "model.gguf", shape, type, others=others, std=0.05)
    _divide(plain, folder / "sharded")
    _write_tokenizers(folder)
    return sorted(path for path in folder.iterdir())


def _add_texts(folder: Path) -> None:
    vocabularies.write_folder(folder, vocabularies.byte_level(), **SETTINGS)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _divide(plain: Path, folder: Path) -> None:
    """The plain model in two files with an index."""
    folder.mkdir()
    tensors = load_file(plain / "model.safetensors")
    weight_map: dict[str, str] = {}
    for number in (0, 1):
        part = {name: value for count, (name, value) in enumerate(sorted(tensors.items())) if count % 2 == number}
        save_file(part, folder / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    (folder / safetensors.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _write_tokenizers(folder: Path) -> None:
    """Vocabularies without a model."""
    for name, options in {"spm-bpe": {}, "spm-unigram": {"model_type": "unigram", "vocab_size": 420}}.items():
        (folder / name).mkdir()
        model = vocabularies.sentencepiece_model(normalization_rule_name="nmt_nfkc", **options)
        (folder / name / "tokenizer.model").write_bytes(model)
    (folder / "tiktoken").mkdir()
    vocabularies.write_tiktoken(folder / "tiktoken" / "qwen.tiktoken", vocabularies.byte_level())
    (folder / "gguf-llama").mkdir()
    fields = vocabularies.sentencepiece_fields(vocabularies.sentencepiece_model())
    vocabularies.write_gguf(folder / "gguf-llama" / "model.gguf", **fields)
    (folder / "gguf-gpt2").mkdir()
    vocabularies.write_gguf(
        folder / "gguf-gpt2" / "model.gguf", **vocabularies.byte_level_fields(vocabularies.byte_level(), "qwen2")
    )
