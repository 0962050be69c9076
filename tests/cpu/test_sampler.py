"""The sampler against a reference that goes token by token, and what it promises about its random numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu.draws import MASK, chi_square
from tests.cpu.reference_sampler import EOS, Row, check_logprobs, distribution, expected, grid, row_of, sampled
from weft.engine.core.params import SamplingParams
from weft.engine.core.step import Admission
from weft.engine.core.token_ids import TokenIds
from weft.ranks.kernels import rows as kernel_rows
from weft.ranks.kernels.plain.sampling import weigh
from weft.ranks.kernels.random import SAMPLING_BLOCK, exponentials, race, seeds
from weft.ranks.kernels.streams import NOT_FINITE
from weft.ranks.worker import sampler as sampler_module
from weft.ranks.worker.sampler import Sampler


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Rows here are short: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


VOCABULARIES = (7, SAMPLING_BLOCK - 1, SAMPLING_BLOCK, 2 * SAMPLING_BLOCK + 3)


def sampler_of(vocab: int, rows: list[Row], first: int = 0) -> Sampler:
    sampler = Sampler(vocab, first + len(rows), (EOS,))
    for slot, row in enumerate(rows, first):
        sampler.admit(row.admission(slot))
    return sampler


def sample(sampler: Sampler, logits: torch.Tensor, rows: list[Row], slots: list[int] | None = None) -> list[int]:
    slots = slots or list(range(len(rows)))
    return sampled(sampler, logits, slots, [row.position for row in rows]).result()[0]


@given(data=st.data(), vocab=st.sampled_from(VOCABULARIES), seed=st.integers(0, 10**6))
@settings(max_examples=75)
def test_tokens_are_those_of_the_reference(data: st.DataObject, vocab: int, seed: int) -> None:
    rows = data.draw(st.lists(row_of(vocab), min_size=1, max_size=5))
    sampler = sampler_of(vocab, rows)
    for step in range(3):
        logits = grid(vocab, len(rows), seed + step)
        found = sample(sampler, logits, rows)
        assert found == [expected(row, values) for row, values in zip(rows, logits.tolist(), strict=True)]
        rows = [row.then(token) for row, token in zip(rows, found, strict=True)]


@given(data=st.data(), vocab=st.sampled_from(VOCABULARIES), seed=st.integers(0, 10**6))
@settings(max_examples=50)
def test_a_token_depends_on_its_own_row_alone(data: st.DataObject, vocab: int, seed: int) -> None:
    rows = data.draw(st.lists(row_of(vocab), min_size=2, max_size=6))
    logits = grid(vocab, len(rows), seed)
    together = sample(sampler_of(vocab, rows), logits, rows)

    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample(sampler_of(vocab, rows), logits[order], [rows[i] for i in order], list(order))
    assert shuffled == [together[i] for i in order]
    for i, row in enumerate(rows):
        assert sample(sampler_of(vocab, [row], first=3), logits[i : i + 1], [row], [3]) == [together[i]]


@given(data=st.data(), seed=st.integers(0, 10**6))
@settings(max_examples=50)
def test_a_preempted_request_goes_on_as_if_it_had_not_been(data: st.DataObject, seed: int) -> None:
    vocab, row = 40, data.draw(row_of(40))
    staying, moving = sampler_of(vocab, [row]), sampler_of(vocab, [row, row])
    slot, now = 0, row
    for step in range(4):
        logits = grid(vocab, 1, seed + step)
        token = sample(staying, logits, [now])[0]
        assert sample(moving, logits, [now], [slot]) == [token]
        now = now.then(token)
        moving.release(slot)
        slot = 1 - slot
        moving.admit(now.admission(slot))


def test_chunks_do_not_change_tokens_or_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(top_p=0.8, logprobs=2), SamplingParams(temperature=0), SamplingParams(top_k=4, logprobs=0)]
    rows = [Row(key, params[key % 3], [5], []) for key in range(40)]
    logits = grid(300, 40, 0)
    positions = [1] * 40
    at_once = sampled(sampler_of(300, rows), logits, list(range(40)), positions).result()
    monkeypatch.setattr(kernel_rows, "CPU_ELEMENTS", 0)
    assert sampled(sampler_of(300, rows), logits, list(range(40)), positions).result() == at_once


def test_the_stream_is_never_changed_by_accident() -> None:
    """These tokens are a promise to everybody who has written a seed down."""
    logits = torch.tensor([[(i * 7919 % 1009) / 100 for i in range(1000)]])
    rows = [Row(key, SamplingParams(), [0], []) for key in (0, 1, 2**63, MASK)]
    sampler = sampler_of(1000, rows)
    found = [sampled(sampler, logits.expand(4, -1), [0, 1, 2, 3], [p] * 4).result()[0] for p in (1, 2, 1000)]
    assert found == [[482, 357, 805, 277], [521, 726, 8, 73], [963, 640, 391, 620]]


def test_no_generator_of_torch_is_read() -> None:
    row = Row(3, SamplingParams(), [0], [])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    sample(sampler_of(50, [row]), grid(50, 1, 0), [row])
    assert torch.equal(torch.get_rng_state(), before)


# Randomness. Seeds are fixed, so these pass or fail for good.


@pytest.mark.parametrize("vary", ["key", "position"])
def test_exponentials_are_exponential(vary: str) -> None:
    many = np.arange(4000, dtype=np.uint64)
    keys, positions = (many, many * 0) if vary == "key" else (many * 0, many)
    times = exponentials(torch.from_numpy(seeds(keys, positions.astype(np.int64))), 32)
    uniform = torch.exp(-times)
    assert times.min() > 0
    assert times.isfinite().all()
    for numbers in (uniform.flatten(), uniform[:, 0], uniform[:, 31]):
        counts = torch.histc(numbers, 50, 0, 1).numpy()
        assert abs(chi_square(counts, np.full(50, 1 / 50))) < 4
    # Neighbours, in the stream and across streams, know nothing of each other.
    for first, second in ((uniform[:, :-1], uniform[:, 1:]), (uniform[:-1], uniform[1:])):
        pair = torch.stack([first.flatten(), second.flatten()])
        assert abs(torch.corrcoef(pair)[0, 1]) < 4 / math.sqrt(pair.shape[1])


def test_frequencies_are_those_of_the_distribution() -> None:
    vocab, draws = 2 * SAMPLING_BLOCK + 30, 30_000
    weights = torch.rand(vocab, generator=torch.Generator().manual_seed(1)) ** 4
    weights[::5] = 0
    weights[[0, SAMPLING_BLOCK, vocab - 1]] = torch.tensor([5.0, 20.0, 10.0])
    streams = torch.from_numpy(seeds(np.arange(draws, dtype=np.uint64), np.full(draws, 17)))
    found = torch.cat([race(weights.expand(len(part), -1), part) for part in streams.split(2000)])
    counts = np.bincount(found.numpy(), minlength=vocab)
    assert abs(chi_square(counts, (weights.double() / weights.double().sum()).numpy())) < 4


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_k=9),
        SamplingParams(temperature=1.4, top_p=0.713),
        SamplingParams(min_p=0.11, top_p=0.9371, top_k=30),
    ],
)
def test_sampled_frequencies_match(params: SamplingParams) -> None:
    row = Row(0, params, TokenIds.pack([0]), [])
    logits = grid(60, 3, 5)[:1] / 2
    sampler = sampler_of(60, [row])
    positions = range(1, 20_001)
    found = []
    for at in range(0, len(positions), 1000):
        part = [*positions[at : at + 1000]]
        found += sampled(sampler, logits.expand(len(part), -1), [0] * len(part), part).result()[0]
    weights = np.array(distribution(row, logits[0].tolist()))
    assert 1 < (weights > 0).sum() <= 60
    assert abs(chi_square(np.bincount(found, minlength=60), weights / weights.sum())) < 4


def test_rounding_in_the_logits_hardly_ever_changes_a_token() -> None:
    """Layouts differ in the last bits of fp32; this is worse. Against one cumulative sum, about 18 of these 800
    tokens change."""
    rows = [Row(key, SamplingParams(), [0], []) for key in range(50)]
    sampler = sampler_of(20_000, rows)
    generator = torch.Generator().manual_seed(0)
    changed = 0
    for position in range(16):
        logits = torch.randn(50, 20_000, generator=generator) * 2
        noise = torch.randn(50, 20_000, generator=generator) * 1e-4
        first, second = (
            sampled(sampler, x, list(range(50)), [position] * 50).result()[0] for x in (logits + noise, logits)
        )
        changed += sum(a != b for a, b in zip(first, second, strict=True))
    assert changed <= 1


@pytest.mark.parametrize("spread", [0.001, 1.0, 6.0])
def test_top_p_finds_a_nucleus_of_any_size(spread: float) -> None:
    """Flat logits need far more tokens than the few that are tried first, steep ones fewer."""
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)) * spread
    shares = [0.0713, 0.5001, 0.9371, 0.99]
    weights = weigh(logits, np.array([[1.0, -np.inf, 0.0, share] for share in shares]))
    for row, share, values in zip(weights, shares, logits, strict=True):
        best_first = values.double().softmax(-1).sort(descending=True)
        needed = int((best_first.values.cumsum(-1) < share).sum()) + 1
        kept = row.nonzero().flatten()
        # Weights are float32: some that differ in float64 are as great as the last one.
        assert needed <= len(kept) <= needed + 2
        assert {*kept.tolist()} == {*best_first.indices[: len(kept)].tolist()}


# Single wishes.


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, 1000)
    logits[0, [700, 20, 999]] = 3.0
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1)):
        rows = [Row(9, params, TokenIds.pack([0]), [])] * 2
        assert sample(sampler_of(1000, rows), logits, rows) == [20, 0]


def test_min_tokens_holds_back_what_would_end_the_answer() -> None:
    logits = torch.zeros(1, 10)
    logits[0, [EOS, 4, 5]] = torch.tensor([9.0, 8.0, 7.0])

    def first(**params: object) -> list[int]:
        row = Row(0, SamplingParams(temperature=0, stop_token_ids=(4,), **params), [2, 2], [])  # type: ignore[arg-type]
        sampler, got = sampler_of(10, [row]), []
        for _ in range(3):
            got += sample(sampler, logits, [row])
            row = row.then(got[-1])
        return got

    assert first() == [EOS, EOS, EOS]
    assert first(min_tokens=2) == [5, 5, EOS]
    # Then it ends nothing.
    assert first(min_tokens=2, ignore_eos=True) == [EOS, EOS, EOS]


def test_without_an_allowed_token_the_first_allowed_id_comes() -> None:
    logits = torch.randn(3, 300)
    forbidding = {"allowed_token_ids": (7, EOS), "bad_word_ids": ((7,), (EOS,)), "repetition_penalty": 1.5}
    rows = [Row(0, SamplingParams(temperature=t, **forbidding), [7], []) for t in (0.0, 0.1, 2.0)]  # type: ignore[arg-type]
    assert sample(sampler_of(300, rows), logits, rows) == [7, 7, 7]
    everything = SamplingParams(temperature=0.5, bad_word_ids=tuple((i,) for i in range(300)))
    row = Row(0, everything, [7], [])
    assert sample(sampler_of(300, [row]), logits[:1], [row]) == [0]


def test_ids_outside_the_vocabulary_touch_no_other_row() -> None:
    beyond = {"logit_bias": {10: 50.0, 3: 1.0}, "allowed_token_ids": (3, 12), "bad_word_ids": ((14,), (3, 15))}
    rows = [
        Row(0, SamplingParams(temperature=0, min_tokens=1, stop_token_ids=(16,), **beyond), [0], [3]),  # type: ignore[arg-type]
        Row(0, SamplingParams(temperature=0), [0], []),
    ]
    logits = torch.arange(20.0).reshape(2, 10)
    assert sample(sampler_of(10, rows), logits, rows) == [3, 9]


def test_nan_stays_in_its_row() -> None:
    params = [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"presence_penalty": 1.0}]
    rows = [Row(5, SamplingParams(logprobs=2, **p), [0], [1]) for p in params for _ in range(2)]  # type: ignore[arg-type]
    logits = grid(600, 12, 3)
    hurt = logits.clone()
    hurt[0::4, 17] = torch.nan
    hurt[2::4] = torch.nan
    slots, positions = list(range(12)), [2] * 12
    tokens, logprobs = sampled(sampler_of(600, rows), hurt, slots, positions).result()
    clean, clean_logprobs = sampled(sampler_of(600, rows), logits, slots, positions).result()
    assert tokens[1::2] == clean[1::2]
    assert logprobs[1::2] == clean_logprobs[1::2]
    assert tokens[0::2] == [NOT_FINITE] * 6 and all(0 <= token < 600 for token in tokens[1::2])
    assert all(scores is not None and math.isnan(scores.logprob) for scores in logprobs[0::2])


def test_a_slot_keeps_nothing_of_who_was_there_before() -> None:
    sampler = Sampler(50, 1, (EOS,))
    logits = grid(50, 1, 0)
    full = SamplingParams(top_k=2, top_p=0.5, min_p=0.2, logprobs=3, logit_bias={5: 100.0}, presence_penalty=2.0)
    row = Row(8, SamplingParams(), [1], [])
    for leave in (True, False):
        sampler.admit(Row(7, full, [1], [2, 3]).admission(0))
        sample(sampler, logits, [row])
        if leave:
            sampler.release(0)
        sampler.admit(row.admission(0))
        assert sampled(sampler, logits, [0], [1]).result() == ([expected(row, logits[0].tolist())], [None])


def test_wishes_with_nothing_to_do_leave_the_logits_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A min_tokens that is reached, bad words that have not begun: 16-bit logits are not widened for them."""

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the logits are changed")

    monkeypatch.setattr(sampler_module, "apply_edits", refuse)
    rows = [
        Row(0, SamplingParams(min_tokens=2), [3], [7, 8]),
        Row(1, SamplingParams(bad_word_ids=((5, 6),)), [3], []),
        Row(2, SamplingParams(presence_penalty=1.0), [3], []),
        Row(3, SamplingParams(min_tokens=3), [3], [7, 8]),
    ]
    sampler, logits = sampler_of(50, rows), grid(50, 4, 0).bfloat16()
    assert sample(sampler, logits[:3], rows[:3]) == [*map(expected, rows[:3], logits[:3].tolist())]
    with pytest.raises(AssertionError, match="are changed"):
        sample(sampler, logits[3:], rows[3:], [3])


def test_no_rows_give_no_tokens() -> None:
    assert sampled(Sampler(50, 1), torch.empty(0, 50), [], []).result() == ([], [])


# Logprobs.


@given(data=st.data(), vocab=st.sampled_from(VOCABULARIES), seed=st.integers(0, 10**6))
@settings(max_examples=60)
def test_logprobs_are_the_models_own(data: st.DataObject, vocab: int, seed: int) -> None:
    rows = data.draw(st.lists(row_of(vocab), min_size=1, max_size=5))
    logits = grid(vocab, len(rows), seed)
    positions = [row.position for row in rows]
    found = sampled(sampler_of(vocab, rows), logits, list(range(len(rows))), positions).result()
    for row, values, token, logprobs in zip(rows, logits.tolist(), *found, strict=True):
        if row.params.logprobs is None:
            assert logprobs is None
        else:
            check_logprobs(logprobs, values, token, min(row.params.logprobs, vocab))


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_prompt_logprobs(top: int) -> None:
    sampler, logits = Sampler(11, 1), grid(11, 90, 4)
    targets = [random.Random(t).randrange(11) for t in range(90)]
    found = sampler.prompt_logprobs(logits, targets, top)
    for values, target, logprobs in zip(logits.tolist(), targets, found, strict=True):
        check_logprobs(logprobs, values, target, min(top, 11))
    assert sampler.prompt_logprobs(logits[:0], [], top) == []


def test_only_its_result_waits_for_the_device_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device there is no data, so whatever asks for some before the end fails."""
    waits = []

    def tolist(tensor: torch.Tensor) -> list[float]:
        waits.append(tensor.device.type)
        return [0.0] * tensor.numel()

    meta = torch.device("meta")
    shaping = {"logit_bias": {3: 1.0}, "allowed_token_ids": (1, 2, 3), "repetition_penalty": 1.1, "min_tokens": 3}
    rows = [
        Row(0, SamplingParams(temperature=0, logprobs=4), [1], []),
        Row(1, SamplingParams(top_p=0.9, top_k=20, min_p=0.1, **shaping), [1], [2]),  # type: ignore[arg-type]
        Row(2, SamplingParams(top_p=0.9, logprobs=0), [1], [2]),
    ]
    sampler = Sampler(1000, 3, (EOS,))
    for slot, row in enumerate(rows):
        sampler.admit(row.admission(slot))
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    late = sampled(sampler, torch.empty(3, 1000, device=meta), [0, 1, 2], [1, 2, 2])
    assert waits == []
    late.result()
    assert waits == ["meta"]


def test_a_token_that_comes_late_is_not_noted_for_who_has_the_slot_by_then() -> None:
    """On a GPU the next step may give an aborted request's slot away before the last one's tokens have arrived."""
    sampler, params = Sampler(8, 2), SamplingParams(temperature=0, repetition_penalty=2.0)
    logits = torch.arange(1.0, 9.0)[None]
    sampler.admit(Admission(0, 1, params, TokenIds.pack([0]), []))
    late = sampled(sampler, logits, [0], [1])
    sampler.release(0)
    sampler.admit(Admission(0, 2, params, TokenIds.pack([0]), []))
    assert late.result()[0] == [7]
    assert sampled(sampler, logits, [0], [1]).result()[0] == [7]
    assert sampled(sampler, logits, [0], [2]).result()[0] == [6]
