"""Defaults for fields that config.json leaves out: the same as Transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from tests.pure.shapes import figures
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.config import config_json

SIZES = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 30,  # two more than the first layers of Qwen that have no window
    "num_attention_heads": 64,
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4, "head_dim": 6, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    {"attention_bias": True, "mlp_bias": True, "rope_theta": 1e6, "max_position_embeddings": 99},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 11},
    {"use_sliding_window": True, "sliding_window": None},
    {"bos_token_id": 3, "eos_token_id": [4, 5]},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 20.0}, "max_position_embeddings": 64},
]


def expected(config: PretrainedConfig) -> dict[str, Any]:
    """The shape's fields, from a config that Transformers has completed."""
    sliding = getattr(config, "sliding_window", None) if config.model_type != "llama" else None
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windows = tuple(sliding if kind == "sliding_attention" else None for kind in types)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return {
        "layers": config.num_hidden_layers,
        "q_heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "norm_eps": config.rms_norm_eps,
        "tied": config.tie_word_embeddings,
        "windows": windows if any(windows) else (),
        "bos": config.bos_token_id,
        "eos": tuple(token for token in eos if token is not None),
    }


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_defaults(tmp_path: Path, family: str, variant: dict[str, Any]) -> None:
    written = SIZES | variant | {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    (tmp_path / "config.json").write_text(json.dumps(written))
    ours = config_json.read_shape(tmp_path, "bfloat16")
    theirs = getattr(transformers, f"{family}Config").from_pretrained(tmp_path)
    known = {"tied": ours.tied, "bos": ours.bos, "eos": ours.eos, **figures(ours)}
    assert {key: known[key] for key in expected(theirs)} == expected(theirs)
    agrees_on_rope(ours, theirs)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    agrees_on_biases(ours, {name for name, _ in model.named_parameters()})


def agrees_on_rope(ours: ModelShape, theirs: PretrainedConfig) -> None:
    rope = theirs.rope_parameters
    assert ours.mixers[0].rope.theta == rope["rope_theta"]
    assert ours.mixers[0].rope.kind == rope["rope_type"]
    assert ours.mixers[0].rope.factor == rope.get("factor", 1.0)
    assert ours.mixers[0].rope.original_max_positions == rope.get("original_max_position_embeddings")
    if ours.mixers[0].rope.kind != "yarn":
        assert ours.max_positions == theirs.max_position_embeddings


def agrees_on_biases(ours: ModelShape, names: set[str]) -> None:
    layer, known = "model.layers.0.", figures(ours)
    assert known["qkv_bias"] == (layer + "self_attn.q_proj.bias" in names) == (layer + "self_attn.v_proj.bias" in names)
    assert known["out_bias"] == (layer + "self_attn.o_proj.bias" in names)
    assert known["mlp_bias"] == (layer + "mlp.up_proj.bias" in names) == (layer + "mlp.down_proj.bias" in names)
    assert known["qk_norm"] == (layer + "self_attn.q_norm.weight" in names)
    assert ours.tied == ("lm_head.weight" not in names)
