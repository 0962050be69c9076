"""The memory that a rank reports for a step is the maximum of a step: the KV cache has all the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu import tiny
from weft import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")

WIDE = {"vocab_size": 131072, "hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "dtype": "bfloat16"}


@pytest.mark.parametrize("guess", [None, {"method": "ngram"}, {"model": ""}], ids=["plain", "ngram", "draft"])
@pytest.mark.parametrize("requests", [1, 64])
def test_a_scored_prompt_takes_no_more_than_was_measured(
    tmp_path: Path, requests: int, guess: dict[str, Any] | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG | WIDE))
    if guess and "model" in guess:
        guess = {"model": str(tmp_path)}
    prompts = [[1 + (n * step) % 1000 for step in range(400)] for n in range(1, 1 + requests)]
    params = SamplingParams(max_tokens=20, ignore_eos=True, top_p=0.9, logprobs=20, prompt_logprobs=20)
    with LLM(
        str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        executor="inline",
        kv_cache_memory_bytes=256 << 20,
        max_num_seqs=requests,
        speculative_config=guess,
    ) as llm:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        llm.generate(prompts, params)
        taken = torch.cuda.max_memory_allocated() - before
        assert taken <= llm.capacities[0].activation_bytes
