"""The tables of parameters agree with the models of Transformers, for the architectures that are planned for only."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.pure.shapes import windows
from weft.checkpoint.architectures.parameters import parameter_count
from weft.checkpoint.architectures.registry import ARCHITECTURES
from weft.checkpoint.config import config_json
from weft.checkpoint.tensor_index import expected_tensors

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
MLA = {
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "num_key_value_heads": 8,
}
MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2}
OPT = {"vocab_size": 320, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
GPT2 = {"vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 50}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("MixtralForCausalLM", SMALL | MIXED),
    ("Qwen3MoeForCausalLM", SMALL | {"head_dim": 12, "num_experts": 9, "moe_intermediate_size": 24}),
    ("Qwen3MoeForCausalLM", SMALL | {"head_dim": 12, "num_experts": 9, "mlp_only_layers": [0, 3]}),
    ("Qwen3MoeForCausalLM", SMALL | {"head_dim": 12, "num_experts": 9, "decoder_sparse_step": 2}),
    ("Qwen2MoeForCausalLM", SMALL | {"num_experts": 9, "shared_expert_intermediate_size": 40}),
    ("DeepseekV2ForCausalLM", SMALL | MLA | {"n_shared_experts": 2, "first_k_dense_replace": 1}),
    ("DeepseekV2ForCausalLM", SMALL | MLA | {"q_lora_rank": None, "n_shared_experts": 1}),
    ("DeepseekV3ForCausalLM", SMALL | MLA | {"first_k_dense_replace": 3, "n_group": 2, "topk_group": 1}),
    ("MiniMaxM2ForCausalLM", SMALL | MIXED | {"head_dim": 12}),
    ("GptOssForCausalLM", SMALL | MIXED | {"head_dim": 12}),
    ("Gemma2ForCausalLM", SMALL | {"head_dim": 12}),
    ("Gemma3ForCausalLM", SMALL | {"head_dim": 12}),
    ("Gemma3ForCausalLM", SMALL | {"head_dim": 12, "sliding_window": 7, "sliding_window_pattern": 3}),
    ("Phi3ForCausalLM", SMALL),
    ("Phi3ForCausalLM", SMALL | {"sliding_window": 9, "tie_word_embeddings": True}),
    ("OPTForCausalLM", OPT | {"word_embed_proj_dim": 64}),
    ("OPTForCausalLM", OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("OPTForCausalLM", OPT | {"word_embed_proj_dim": 64, "enable_bias": False, "_remove_final_layer_norm": True}),
    ("GPT2LMHeadModel", GPT2),
    ("GPT2LMHeadModel", GPT2 | {"n_inner": 99}),
]
# Modules whose parameters lie in checkpoints as they are in the model: dims and names are compared one by one.
PLAIN = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "OPTForCausalLM")


def test_every_mixture_of_experts_is_a_case() -> None:
    mixtures = {name for name, known in ARCHITECTURES.items() if known.config.has_experts}
    assert mixtures <= {architecture for architecture, _ in CASES}


@pytest.mark.parametrize("complete", [True, False], ids=["as saved", "as given"])
@pytest.mark.parametrize(("architecture", "config"), CASES, ids=str)
def test_parameters_are_those_of_transformers(
    tmp_path: Path, architecture: str, config: dict[str, Any], complete: bool
) -> None:
    kind = getattr(transformers, architecture).config_class
    written = {**config, "architectures": [architecture], "model_type": kind.model_type}
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = kind.from_pretrained(tmp_path)
    if complete:
        theirs.save_pretrained(tmp_path)
    shape = config_json.read_shape(tmp_path, run=False)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(theirs)
    named = dict(model.named_parameters())
    # The router's correction is no parameter, but is stored like one.
    named |= {name: value for name, value in model.named_buffers() if name.endswith("correction_bias")}
    assert parameter_count(shape) == sum(value.numel() for value in named.values())
    stored = dict(expected_tensors(shape))
    assert sum(map(prod, stored.values())) == parameter_count(shape)
    if architecture in PLAIN:
        tied = {"lm_head.weight"} if shape.tied else set()
        assert {name: tuple(value.shape) for name, value in named.items() if name not in tied} == stored
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    window = getattr(theirs, "sliding_window", None)
    expected = tuple(window if kind == "sliding_attention" else None for kind in types)
    assert windows(shape) == (expected if any(expected) else ())
    assert shape.max_positions == theirs.max_position_embeddings
    assert shape.bos == theirs.bos_token_id
