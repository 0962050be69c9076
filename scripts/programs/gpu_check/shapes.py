"""Shapes of models that are measured with random weights: those of Weft's catalogue, whole or their first layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what is missing is named before Weft is imported
    from weft.planner.work.work import RankWork

SOME_LAYERS = 8  # of a large model: more than a cache holds
MODELS: dict[str, tuple[str, int | None]] = {  # name in the catalogue, and the number of layers, None for all
    "Qwen3-0.6B": ("Qwen/Qwen3-0.6B", None),
    "Qwen3-8B": ("Qwen/Qwen3-8B", None),
    "Qwen3-14B": ("Qwen/Qwen3-14B", None),
    "Llama-3.1-8B": ("meta-llama/Llama-3.1-8B-Instruct", None),
    "Qwen3-30B-A3B": ("Qwen/Qwen3-30B-A3B", SOME_LAYERS),
    "DeepSeek-V2-Lite": ("deepseek-ai/DeepSeek-V2-Lite", SOME_LAYERS),
    "gpt-oss-20b": ("openai/gpt-oss-20b", SOME_LAYERS),
}
# Fields of a config.json beside the catalogue's.
COMMON = {"bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6, "dtype": "bfloat16"}
# Dimensions that a CPU computes in milliseconds, for a stand-in for a card.
TINY = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 0,
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "sliding_window": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model's config.json, and the precision in which the engine holds its matrices."""

    config: dict[str, Any]
    precision: str = "bf16"

    @property
    def vocab(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def work(self) -> RankWork:
        """The bytes that one card reads, and its operations."""
        from weft.checkpoint.architectures.place import whole
        from weft.checkpoint.config import config_json
        from weft.checkpoint.files.fields import Fields
        from weft.checkpoint.quantised.precision import held_precision
        from weft.planner.work.work import rank_work

        shape = config_json.shape_from_config(Fields(self.config, "config.json"), run=True)
        return rank_work(shape, held_precision(self.precision), "bf16", whole(shape))

    def weight_bytes(self, rows: int = 1) -> float:
        """Bytes of weights that a decode step of `rows` rows reads: of the experts those that are chosen on average."""
        from weft.planner.work.roofline import experts_touched

        work = self.work
        assert work.head is not None
        total: float = work.head.nbytes
        for layer in work.layers:
            total += layer.count * sum(product.nbytes for product in layer.products)
            if layer.experts is not None:
                touched = experts_touched(layer.experts.count, layer.experts.top_k, rows)
                total += layer.count * touched * layer.experts.nbytes
        return total

    def kv_bytes(self, context: float = 1.0) -> float:
        """Bytes of keys and values of a request's last `context` tokens that a decode step reads, in 16 bits."""
        attention = [(layer.count, layer.attention) for layer in self.work.layers]
        return sum(count * each.cache_bytes * min(context, each.window or context) for count, each in attention)

    def step_bytes(self, rows: int, context: float) -> float:
        """Bytes that a decode step reads whose `rows` requests have `context` tokens each."""
        return self.weight_bytes(rows) + rows * self.kv_bytes(context)


def shape_of(model: str, *, quantization: str | None = None, rehearse: bool = False) -> Shape:
    """Shape of a model of MODELS, or one of the same kind that a CPU computes in milliseconds. `quantization` is what
    the engine quantises to at load."""
    from weft.checkpoint.names.catalogue import entries
    from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS

    name, layers = MODELS[model]
    entry = next(entry for entry in entries() if name in entry.names)
    config = {**COMMON, **entry.config}
    if layers is not None:
        config["num_hidden_layers"] = layers
    if rehearse:
        config = {key: TINY.get(key, value) for key, value in config.items()} | {"dtype": "float32"}
    if quantization is not None:
        precision = ONLINE_QUANTIZATIONS[quantization]
    else:
        precision = "mxfp4" if "quantization_config" in config else "bf16"
    return Shape(config, precision)


def write_config(folder: Path, shape: Shape) -> str:
    """The path of a model folder that holds nothing but config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config))
    return str(folder)
