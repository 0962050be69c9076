"""Launches of a layer in a decode step of at most 32 rows, by name, on the stand-in for a GPU (fake_cuda.py).

A launch takes a GPU some 2 us that no kernel fills, in every layer. cuBLAS may take more than one for a product.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

from tests.cpu import checkpoints
from tests.cpu.fake_cuda import Card, the_card  # noqa: F401
from weft import LLM, SamplingParams
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.layers.experts import ExpertsBlock
from weft.ranks.layers.norm import ResidualStream
from weft.ranks.models.decoder import DecoderLayer

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

ATTENTION = ["_rms_norm", "linear", "_rotate_and_store", "_decode", "linear"]
# With the products of the shared experts where the model has them.
EXPERTS = ["_rms_norm", "_route", "_sort", "_multiply_experts", "_multiply_experts", "_sum"]
# `linear` of compressed queries, then of whole ones and of latents. `bmm` leads to the latents' space and back.
LATENT = ["_rms_norm", "linear", "_rms_norm", "linear", "linear", "_store_latents"]
LATENT += ["bmm", "_decode_latents", "bmm", "linear"]
SHAPES = {"qwen3-moe": [*ATTENTION, *EXPERTS], "gpt-oss": [*ATTENTION, *EXPERTS], "deepseek-v3": [*LATENT, *EXPERTS]}
MOST = {"qwen3-moe": 11, "gpt-oss": 11, "deepseek-v3": 16}
ENGINE: dict[str, Any] = {
    "dtype": "float16",
    "skip_tokenizer_init": True,
    "executor": "inline",
    "device": "cuda",
    "attention_backend": "triton",
    "enforce_eager": True,  # what a graph of the same step holds
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "max_model_len": 64,
    "kv_cache_memory_bytes": 1_000_000,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 4,
}


@pytest.mark.parametrize("name", SHAPES)
def test_launches_of_a_mixture_s_layer(name: str, card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    layer_of = DecoderLayer.__call__

    def noted(layer: DecoderLayer, stream: ResidualStream, cache: KVCache, batch: Batch) -> None:
        before = len(card.launched)
        layer_of(layer, stream, cache, batch)
        if isinstance(layer.ffn, ExpertsBlock) and batch.decodes == batch.rows:
            seen.append(card.launched[before:])

    with LLM(str(checkpoints.make(name, tmp_path)), **ENGINE) as llm:
        monkeypatch.setattr(DecoderLayer, "__call__", noted)
        llm.generate([[1], [4]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), use_tqdm=False)
    assert seen and len(SHAPES[name]) == MOST[name]
    assert seen == [SHAPES[name]] * len(seen)
