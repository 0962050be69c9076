"""Masks of tokens: in torch, C++ and Triton's interpreter, beside edits and filters, and through a whole engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu import checkpoints
from tests.cpu.draws import sampling_of
from tests.cpu.reference_sampler import EOS, Row, check_logprobs, expected, grid, mask_of, row_of, sampled
from weft import LLM, SamplingParams
from weft.engine.core.scheduled import ScheduledStep, StepLimits
from weft.engine.core.scheduler import Scheduler
from weft.engine.core.step import StepPlan
from weft.errors import OutputError
from weft.ranks.kernels.sampling import mask_words
from weft.ranks.kernels.streams import NOT_FINITE
from weft.ranks.worker.sampler import Sampler

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
no_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
KINDS = ["torch", "native", pytest.param("triton", marks=no_triton)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 7000])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_whose_bit_is_0_become_impossible(kind: str, vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    wide = torch.randn(6, vocab + 5, generator=generator).to(dtype)
    logits, rows = wide[:, :vocab], torch.tensor([4, 0, 2])
    # Bits beyond the vocabulary mean nothing.
    masks = torch.randint(-(2**31), 2**31, (3, mask_words(vocab)), generator=generator).int()
    masks[2] = -1
    before = wide.clone()
    sampling_of(kind, dtype).apply_masks(logits, rows, masks)
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    want = before.clone()
    for row, allowed in zip(rows.tolist(), bits, strict=True):
        want[row, :vocab][torch.from_numpy(allowed) == 0] = -torch.inf
    assert torch.equal(wide, want)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_no_work(kind: str) -> None:
    logits = torch.ones(2, 40)
    sampling_of(kind).apply_masks(logits, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int32))
    assert logits.eq(1).all()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), vocab=st.sampled_from([7, 300]), seed=st.integers(0, 10**6))
@settings(max_examples=15)
def test_masked_rows_give_the_tokens_of_the_reference(kind: str, data: st.DataObject, vocab: int, seed: int) -> None:
    """Beside all edits and filters. Rows without a mask are as they would be alone, and logprobs are the model's."""
    sampler = Sampler(vocab, 4, (EOS,), sampling_of(kind))
    rows = data.draw(st.lists(row_of(vocab), min_size=1, max_size=4))
    allowed = [data.draw(st.none() | st.sets(st.integers(0, vocab - 1), max_size=5)) for _ in rows]
    for slot, row in enumerate(rows):
        sampler.admit(row.admission(slot))
    logits = grid(vocab, len(rows), seed)
    masks = {slot: mask_of(ids, vocab) for slot, ids in enumerate(allowed) if ids is not None}
    late = sampled(sampler, logits, [*range(len(rows))], [row.position for row in rows], masks)
    for row, values, ids, token, logprobs in zip(rows, logits.tolist(), allowed, *late.result(), strict=True):
        assert token == expected(row, values, ids)
        if row.params.logprobs is not None and token != NOT_FINITE:
            check_logprobs(logprobs, values, token, min(row.params.logprobs, vocab))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_everything_changes_nothing(kind: str, dtype: torch.dtype) -> None:
    """Neither tokens, whose random numbers are the same, nor logprobs."""
    vocab, params = 500, SamplingParams(temperature=0.9, top_p=0.9, logprobs=2)
    logits = (torch.randn(8, vocab, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    sampler = Sampler(vocab, 8, (EOS,), sampling_of(kind, dtype))
    for slot in range(8):
        sampler.admit(Row(slot, params, [1], []).admission(slot))
    everything = dict.fromkeys(range(0, 8, 3), mask_of(range(vocab), vocab))
    slots, positions = [*range(8)], [*range(8)]
    assert (
        sampled(sampler, logits, slots, positions, everything).result()
        == sampled(sampler, logits, slots, positions).result()
    )


def test_a_mask_for_each_draft_token() -> None:
    """A slot has one for each of the tokens that it samples, in their order."""
    sampler = Sampler(50, 3, (EOS,), sampling_of("torch"))
    for slot in range(3):
        sampler.admit(Row(slot, SamplingParams(temperature=0), [1], []).admission(slot))
    masks = {2: mask_of([7], 50) + mask_of([8], 50) + mask_of([9], 50), 1: mask_of([5], 50)}
    late = sampled(sampler, grid(50, 5, 3), [1, 2, 2, 2, 0], [4, 4, 5, 6, 4], masks)
    assert late.result()[0][:4] == [5, 7, 8, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_is_forbidden_is_not_sampled_because_a_mask_allows_no_other(kind: str) -> None:
    sampler = Sampler(50, 2, (EOS,), sampling_of(kind))
    for slot, params in enumerate([SamplingParams(bad_word_ids=[[0]]), SamplingParams(allowed_token_ids=[3])]):
        sampler.admit(Row(slot, params, [1], []).admission(slot))
    masks = {0: mask_of([0], 50), 1: mask_of([0], 50)}
    assert sampled(sampler, grid(50, 2, 3), [0, 1], [4, 4], masks).result()[0] == [NOT_FINITE] * 2


def test_a_row_whose_mask_allows_nothing_fails_alone() -> None:
    sampler = Sampler(50, 3, (EOS,), sampling_of("torch"))
    for slot in range(3):
        sampler.admit(Row(slot, SamplingParams(), [1], []).admission(slot))
    logits = grid(50, 3, 3)
    logits[2, 4] = torch.nan
    batch = sampler.prepare_batch([0, 1, 2], [0, 1, 2], [4] * 3, {1: mask_of([], 50)})
    tensors = batch.arrays.with_tensors(map(torch.from_numpy, batch.arrays.flatten()))
    tokens = sampler.sample(logits, batch, tensors).result()[0]
    assert tokens[0] >= 0 and tokens[1:] == [NOT_FINITE] * 2
    assert {slot: failure.code for slot, failure in batch.failures(tokens, 0).items()} == {
        1: "no-allowed-token",
        2: "nan-logits",
    }


# --- whole engines ---

COMMON: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "kv_cache_memory_bytes": 10**6}
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10]]
FREE, CONSTRAINED = SamplingParams(max_tokens=6, ignore_eos=True), {20, 21, 22, 40}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("masks"))


@pytest.fixture
def constrain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[int, set[int]]], None]]:
    """Have the core constrain requests, by the lengths of their prompts."""
    schedule = Scheduler.schedule

    def install(allowed: Mapping[int, set[int]]) -> None:
        def masked(scheduler: Scheduler, limits: StepLimits) -> ScheduledStep[StepPlan] | None:
            scheduled = schedule(scheduler, limits)
            if scheduled is None:
                return None
            plan = scheduled.step
            running = {sequence.slot: sequence.prompt_length for sequence in scheduler.table.running.values()}
            for slot, drafts in zip(plan.slots, plan.draft_counts, strict=True):
                ids = allowed.get(running.get(slot, -1))
                if ids is not None:
                    plan.masks[slot] = mask_of(ids, checkpoints.VOCAB) * (1 + drafts)
            return scheduled

        monkeypatch.setattr(Scheduler, "schedule", masked)

    yield install


def answers(path: Path, params: SamplingParams, **how: Any) -> list[list[int]]:
    with LLM(str(path), **{**COMMON, "executor": "inline", **how}) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"attention_backend": "torch"},
        {"tensor_parallel_size": 2, "executor": "processes"},
        {"pipeline_parallel_size": 2},
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
    ids=["one", "torch", "tp2", "pp2", "ahead", "drafts"],
)
def test_a_mask_travels_from_the_core_to_the_output_rank(
    checkpoint: Path, how: dict[str, Any], constrain: Callable[[Mapping[int, set[int]]], None]
) -> None:
    free = answers(checkpoint, FREE)
    constrain({2: CONSTRAINED})
    first, second, third = answers(checkpoint, FREE, **how)
    assert [first, third] == [free[0], free[2]]
    assert len(second) == 6 and set(second) <= CONSTRAINED and set(free[1]) - CONSTRAINED


def test_a_constraint_that_allows_nothing_ends_its_request_alone(
    checkpoint: Path, constrain: Callable[[Mapping[int, set[int]]], None]
) -> None:
    constrain({2: set()})
    with LLM(str(checkpoint), executor="inline", **COMMON) as llm:
        with pytest.raises(OutputError) as caught:
            list(llm.stream([6, 7], FREE))
        assert caught.value.code == "no-allowed-token"
        whole = llm.generate(PROMPTS, FREE, use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in whole] == ["length", "error", "length"]
