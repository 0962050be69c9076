"""Layers with windows: the blocks behind a window are freed, and the tokens are those of a cache that keeps all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cpu import checkpoints
from tests.cpu.layouts import LAYOUTS, plan_for
from tests.cpu.test_parity import greedy
from weft import LLM, SamplingParams
from weft.engine.core import kv
from weft.engine.core.sequence import Sequence

# Longer than the windows, of 9 and 11 tokens; the last two begin alike.
PROMPTS = [[1, 5, 9, 33, 7], list(range(3, 60)), [40, 41, 42] * 9, [40, 41, 42] * 9 + [8, 9]]
NEW, BLOCK, CHUNK = 14, 2, 7
LENGTH = len(PROMPTS[1]) + NEW
COLUMNS = -(-LENGTH // BLOCK)
SHORT = [[1, 5, 9], [1, 150], [7, 8, 30, 31], [9]]
ASYNC: dict[str, Any] = {"async_scheduling": True}
DRAFTS: dict[str, Any] = {"speculative_config": {"method": "ngram"}}
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": CHUNK}


class Held(NamedTuple):
    """Blocks of a KV group that a text has in a step, and the most that it may have."""

    window: int | None
    blocks: int
    most: int


class WatchedKV(kv.KVManager):
    """Notes at each growth of a text what it holds."""

    notes: list[Held]

    def grow_tables(self, sequence: Sequence, end: int) -> kv.Tables:
        grown = super().grow_tables(sequence, end)
        for group in self.groups:
            held = len(sequence.blocks[group.number]) - sequence.freed[group.number]
            most = self.layout.group_blocks(group.layers, end, chunk=end - sequence.computed)
            self.notes.append(Held(group.layers.spec.window, held, most))
        return grown


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    """The KV blocks that each text held in the engine, noted when the text was complete."""
    monkeypatch.setattr("weft.engine.core.engine.KVManager", WatchedKV)
    monkeypatch.setattr(WatchedKV, "notes", [], raising=False)
    return WatchedKV.notes


def check_notes(notes: list[Held]) -> None:
    """Each text has held its windows and no more, and in layers without a window all of its tokens."""
    assert all(held.blocks <= held.most for held in notes)
    for window in {held.window for held in notes}:
        held = [held.blocks for held in notes if held.window == window]
        if window is None:
            assert max(held) >= (LENGTH - 1) // BLOCK  # the last token of an answer is not computed
        else:
            # A chunk reads the window before it; a text has at least one block more than the window fills.
            assert -(-window // BLOCK) <= max(held) <= -(-(window + CHUNK) // BLOCK) + 1 < COLUMNS / 3
            assert held[-1] <= -(-window // BLOCK) + 2


@pytest.fixture(scope="module", params=["mistral", "qwen2-window", "gemma3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(request.param, tmp_path_factory.mktemp("windows"))


class Truth(NamedTuple):
    """Greedy answers of Transformers: to PROMPTS, to each of these with its answer, and to SHORT."""

    answers: list[list[int]]
    later: list[list[int]]
    short: list[list[int]]


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> Truth:
    model = checkpoints.reference(checkpoint)
    answers = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    later = [greedy(model, [*prompt, *answer], NEW) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return Truth(answers, later, [greedy(model, prompt, NEW) for prompt in SHORT])


def generate(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The answers, and the prompt tokens that came from the prefix cache."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs], [output.num_cached_tokens or 0 for output in outputs]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("whole", {}),
        ("whole", ASYNC),
        ("whole", DRAFTS),
        ("tp2", {}),
        ("tp2", ASYNC),
        ("pp2", ASYNC),
        ("pp 1,3,1", {}),
        ("pp 1,3,1", DRAFTS),
    ],
    ids=str,
)
def test_a_cache_for_the_windows_serves_a_text_that_is_longer(
    checkpoint: Path,
    truth: Truth,
    layout: str,
    how: dict[str, Any],
    notes: list[Held],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its blocks hold one text of LENGTH tokens, whose layers with windows keep no more than window and chunk."""
    monkeypatch.setattr(kv, "GROWTH", 1)
    limits = {"block_size": BLOCK, "max_num_batched_tokens": CHUNK, "dtype": "float32"}
    plan = plan_for(checkpoint, layout, **limits)
    need = plan.kv_layout.blocks(LENGTH)
    assert need < 0.6 * COLUMNS * len(plan.kv_layout.groups)
    room = need * max(plan.block_bytes(place.rank) for place in plan.places)
    limits |= {"kv_cache_memory_bytes": room, "max_model_len": LENGTH, "executor": "inline"}
    with LLM(str(checkpoint), skip_tokenizer_init=True, **limits, **LAYOUTS[layout], **how) as llm:
        assert llm.num_blocks == need
        alone = [generate(llm, [prompt])[0][0] for prompt in PROMPTS]
        batched, _ = generate(llm, PROMPTS)
    assert alone == batched == truth.answers
    check_notes(notes)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("layout", "how"),
    [("whole", {}), ("whole", ASYNC), ("whole", CHUNKED), ("tp2", {}), ("tp2", ASYNC), ("pp2", {}), ("pp2", CHUNKED)],
    ids=str,
)
def test_a_prefix_needs_only_the_end_of_a_window(
    checkpoint: Path, truth: Truth, layout: str, how: dict[str, Any]
) -> None:
    limits: dict[str, Any] = {"block_size": BLOCK, "dtype": "float32", "executor": "inline", **how}
    with LLM(str(checkpoint), skip_tokenizer_init=True, **limits, **LAYOUTS[layout]) as llm:
        first, _ = generate(llm, PROMPTS[:3])
        # Everything but the last token's block, although the blocks behind the windows were freed long ago.
        again, cached = generate(llm, PROMPTS)
        assert cached == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS[:3]] + [26]
        # A text that goes on from an answer.
        longer = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, truth.answers, strict=True)]
        after, cached = generate(llm, longer)
        assert cached == [(len(text) - 1) // BLOCK * BLOCK for text in longer]
    assert first == truth.answers[:3] and again == truth.answers and after == truth.later


@pytest.mark.each_value
@pytest.mark.parametrize(("layout", "how"), [("whole", {}), ("whole", ASYNC), ("tp2", ASYNC), ("pp2", {})], ids=str)
def test_preempted_texts_go_on_as_they_would_have(
    checkpoint: Path, truth: Truth, layout: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "GROWTH", 1)
    limits: dict[str, Any] = {"block_size": 1, "max_num_batched_tokens": 3, "dtype": "float32"}
    plan = plan_for(checkpoint, layout, **limits)
    # Short texts fit together until they have grown.
    room = max(plan.block_bytes(place.rank) for place in plan.places)
    limits |= {"kv_cache_memory_bytes": plan.kv_layout.blocks(12) * 2 * room, "max_model_len": 20, **LAYOUTS[layout]}
    with LLM(str(checkpoint), skip_tokenizer_init=True, executor="inline", **limits, **how) as llm:
        answers, _ = generate(llm, SHORT)
        preemptions = llm.stats().preemptions
    assert answers == truth.short
    assert preemptions > 0
