"""Layers with windows: the blocks behind a window are freed, and the tokens are those of a cache that keeps all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cpu import checkpoints
from tests.cpu.layouts import LAYOUTS, plan_for
from tests.cpu.test_parity import greedy
from weft import LLM, SamplingParams
from weft.core import kv

# Longer than the windows, of 9 and 11 tokens; the last two begin alike.
PROMPTS = [[1, 5, 9, 33, 7], list(range(3, 60)), [40, 41, 42] * 9, [40, 41, 42] * 9 + [8, 9]]
NEW, BLOCK, CHUNK = 14, 2, 7
LENGTH = len(PROMPTS[1]) + NEW


@pytest.fixture(scope="module", params=["mistral", "qwen2-window"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(request.param, tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> list[list[int]]:
    model = checkpoints.reference(checkpoint)
    return [greedy(model, prompt, NEW) for prompt in PROMPTS]


def generate(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The answers, and the prompt tokens that came from the prefix cache."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs], [output.num_cached_tokens or 0 for output in outputs]


@pytest.mark.parametrize("how", [{}, {"async_scheduling": True}, {"speculative_config": {"method": "ngram"}}], ids=str)
@pytest.mark.parametrize("layout", ["whole", "tp2", "pp 1,3,1"])
def test_a_cache_for_the_windows_serves_a_text_that_is_longer(
    checkpoint: Path, truth: list[list[int]], layout: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks hold one text of LENGTH tokens, whose layers with windows keep no more than window and chunk."""
    monkeypatch.setattr(kv, "GROWTH", 1)
    limits = {"block_size": BLOCK, "max_num_batched_tokens": CHUNK, "dtype": "float32"}
    plan = plan_for(checkpoint, layout, **limits)
    need, columns = plan.kv_layout.blocks(LENGTH), -(-LENGTH // BLOCK)
    assert need < 0.6 * columns * len(plan.kv_layout.groups)
    room = need * max(plan.block_bytes(place.rank) for place in plan.places)
    limits |= {"kv_cache_memory_bytes": room, "max_model_len": LENGTH, "executor": "inline"}
    with LLM(str(checkpoint), skip_tokenizer_init=True, **limits, **LAYOUTS[layout], **how) as llm:
        assert llm.num_blocks == need
        alone = [generate(llm, [prompt])[0][0] for prompt in PROMPTS]
        batched, _ = generate(llm, PROMPTS)
    assert alone == batched == truth


@pytest.mark.parametrize("layout", ["whole", "pp2"])
def test_a_prefix_needs_only_the_end_of_a_window(checkpoint: Path, truth: list[list[int]], layout: str) -> None:
    limits: dict[str, Any] = {"block_size": BLOCK, "dtype": "float32", "executor": "inline"}
    with LLM(str(checkpoint), skip_tokenizer_init=True, **limits, **LAYOUTS[layout]) as llm:
        first, _ = generate(llm, PROMPTS[:3])
        # Everything but the last token's block, although the blocks behind the windows were freed long ago.
        again, cached = generate(llm, PROMPTS)
        assert cached == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS[:3]] + [26]
        # A text that goes on from an answer.
        longer = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, truth, strict=True)]
        after, cached = generate(llm, longer)
        assert cached == [(len(text) - 1) // BLOCK * BLOCK for text in longer]
    assert first == truth[:3] and again == truth
    model = checkpoints.reference(checkpoint)
    assert after == [greedy(model, text, NEW) for text in longer]


def test_preempted_texts_go_on_as_they_would_have(
    checkpoint: Path, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "GROWTH", 1)
    limits: dict[str, Any] = {"block_size": 1, "max_num_batched_tokens": 3, "dtype": "float32"}
    plan = plan_for(checkpoint, "whole", **limits)
    # Short texts fit together until they have grown.
    limits["kv_cache_memory_bytes"] = plan.kv_layout.blocks(12) * 2 * plan.block_bytes(0)
    prompts = [[1, 5, 9], [1, 150], [7, 8, 30, 31], [9]]
    model = checkpoints.reference(checkpoint)
    with LLM(str(checkpoint), skip_tokenizer_init=True, executor="inline", max_model_len=20, **limits) as llm:
        answers, _ = generate(llm, prompts)
        preemptions = llm.stats().preemptions
    assert answers == [greedy(model, prompt, NEW) for prompt in prompts]
    assert preemptions > 0
