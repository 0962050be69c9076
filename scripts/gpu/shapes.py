"""Shapes of the models that are measured with random weights: published config.json files, and their bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HEAD_DIM = 128
BF16_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """Dimensions of a dense decoder with grouped-query attention."""

    architecture: str
    hidden: int
    ffn: int
    layers: int
    q_heads: int
    kv_heads: int
    tied: bool
    vocab: int
    rope_theta: float
    head_dim: int = HEAD_DIM
    dtype: str = "bfloat16"

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values per token, over all layers, in 16 bits."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BF16_BYTES

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that every decode step reads, in 16 bits: all matrices but the embedding's table."""
        q_width, kv_width = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (q_width + 2 * kv_width) + q_width * self.hidden
        return BF16_BYTES * (self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden)

    def config(self) -> dict[str, Any]:
        """The config.json that load format "dummy" needs."""
        return {
            "architectures": [f"{self.architecture}ForCausalLM"],
            "model_type": self.architecture.lower(),
            "dtype": self.dtype,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


SHAPES = {
    "Qwen3-0.6B": Shape("Qwen3", 1024, 3072, 28, 16, 8, True, 151936, 1e6),
    "Qwen3-8B": Shape("Qwen3", 4096, 12288, 36, 32, 8, False, 151936, 1e6),
    "Qwen3-14B": Shape("Qwen3", 5120, 17408, 40, 40, 8, False, 151936, 1e6),
    "Llama-3.1-8B": Shape("Llama", 4096, 14336, 32, 32, 8, False, 128256, 5e5),
}


def shape_of(model: str, *, rehearse: bool = False) -> Shape:
    """The model's shape, or one of the same kind that a CPU computes in milliseconds."""
    shape = SHAPES[model]
    if not rehearse:
        return shape
    return replace(
        shape, hidden=32, ffn=32, layers=1, q_heads=2, kv_heads=1, vocab=64, head_dim=16, dtype="float32"
    )  # fmt: skip


def write_config(folder: Path, shape: Shape) -> str:
    """The path of a model folder that holds nothing but config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    return str(folder)
