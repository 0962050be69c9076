"""Guessing goes on where it pays by the clock, and else is only tried from time to time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from tests.pure.scheduling import DRAFT, LIMITS, create_scheduler, request
from weft.engine.core import engine
from weft.engine.core.engine import EngineCore
from weft.engine.core.speculation_gate import LONG_TURN, SHORT_TURN, SKIPPED, SpeculationGate
from weft.engine.core.step import StepPlan, StepResult
from weft.plan.plan import Speculation

GUESSES = 3


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def decode(rows: int, guesses: int) -> StepPlan:
    return StepPlan(
        id=0,
        released=[],
        admitted=[],
        slots=[*range(rows)],
        starts=[1] * rows,
        counts=[1 + guesses] * rows,
        tokens=[],
        blocks=[],
        samples=[True] * rows,
        draft_counts=[guesses] * rows,
    )


def share(rows: int, step_s: Callable[[int], float], confirmed: float, steps: int = 3000) -> float:
    """Share of the steps with drafts, if a step takes `step_s` of its tokens and `confirmed` drafts are accepted."""
    clock = Clock()
    gate, guessing = SpeculationGate(clock), 0
    for _ in range(steps):
        guess = gate.allows_drafts(rows)
        guessing += guess
        plan = decode(rows, GUESSES * guess)
        gate.step_started(plan, rows)
        clock.now += step_s(sum(plan.counts)) / 1000
        gate.step_finished(int(rows * (1 + confirmed * guess)), ())
    return guessing / steps


def test_drafting_goes_on_if_it_pays() -> None:
    assert share(1, lambda tokens: 1 + 0.1 * tokens, confirmed=2) > 0.95


@pytest.mark.parametrize("confirmed", [0, 2])
def test_drafting_is_only_tried_if_it_does_not_pay(confirmed: int) -> None:
    assert share(32, lambda tokens: 1 + 1.0 * tokens, confirmed) < (SHORT_TURN + SKIPPED) / LONG_TURN


@pytest.mark.parametrize("reading", [0.02, 0.1])
def test_a_draft_that_has_much_to_read_first_is_tried_seldom(reading: float) -> None:
    """All that it has missed since it was asked last, in steps of 100 tokens, until its text ends."""
    clock, missed, tokens = Clock(), 0, 0
    gate = SpeculationGate(clock)
    while tokens < 100_000:
        guess = gate.allows_drafts(1)
        late = min(100, missed) if guess else 0
        missed = missed - late if guess else min(1000, missed + 1)
        plan = decode(1, 4 if guess and not missed else 0)
        plan.draft_requests = [4 * guess]
        gate.step_started(plan, 1)
        clock.now += 0.01 * (1 + reading * late + 5 * guess)
        answered = guess and not missed
        gate.step_finished(1 + 3 * sum(plan.draft_counts) // 4, [0] if answered else [])
        tokens += 1 + 3 * sum(plan.draft_counts) // 4
    assert clock.now - 100.0 < 0.01 * tokens * 1.04


def test_a_draft_that_never_comes_to_all_texts_ends_is_judged_as_it_is() -> None:
    """If requests arrive all the time, one of them always has something to be read."""
    clock, guessing = Clock(), 0
    gate = SpeculationGate(clock)
    for _ in range(6000):
        guess = gate.allows_drafts(8)
        guessing += guess
        plan = decode(8, 0)
        plan.draft_requests = [4 * guess] * 8
        gate.step_started(plan, 8)
        clock.now += 0.01 * (1 + 3 * guess)
        gate.step_finished(8, [*range(7)] if guess else [])
    assert guessing < 6000 / 16


@pytest.mark.parametrize("stalled", [[1], [2], [1, 2]])
def test_a_try_in_which_the_machine_stood_still_is_repeated_soon(stalled: list[int]) -> None:
    clock, seen, tries = Clock(), [False], 0
    gate = SpeculationGate(clock)
    for _ in range(3000):
        guess = gate.allows_drafts(1)
        tries += guess and not seen[-1]
        gate.step_started(decode(1, GUESSES * guess), 1)
        clock.now += 0.01 + 2.0 * (seen[-4:] == [False, True, True, True] and tries in stalled)
        gate.step_finished(1 + 2 * guess, ())
        seen.append(guess)
    assert sum(seen) > 3000 - 4 * LONG_TURN


def test_batches_of_other_sizes_find_out_for_themselves() -> None:
    clock = Clock()
    gate = SpeculationGate(clock)
    for rows, pays in [(1, True), (40, False)] * 400:
        guess = gate.allows_drafts(rows)
        plan = decode(rows, GUESSES * guess)
        gate.step_started(plan, rows)
        clock.now += 1.0 if rows == 1 else sum(plan.counts)
        gate.step_finished(2 * rows if guess and pays else rows, ())
    assert gate.allows_drafts(1) and not gate.allows_drafts(40)


def test_drafting_is_tried_again_when_the_text_changes() -> None:
    clock, confirmed = Clock(), 0
    gate = SpeculationGate(clock)
    seen = []
    for step in range(3000):
        if step == 1000:
            confirmed = 3
        guess = gate.allows_drafts(1)
        gate.step_started(decode(1, GUESSES * guess), 1)
        clock.now += 1.0 + 0.2 * guess
        gate.step_finished(1 + confirmed * guess, ())
        seen.append(guess)
    assert sum(seen[500:1000]) <= 2 * (SHORT_TURN + SKIPPED) and sum(seen[-300:]) > 280


def test_steps_that_read_prompts_and_time_without_steps_do_not_count() -> None:
    clock = Clock()
    gate = SpeculationGate(clock)
    for _ in range(300):
        guess = gate.allows_drafts(2)
        gate.step_started(decode(2, GUESSES * guess), 2)
        clock.now += 1.0
        gate.step_finished(2 + 2 * guess, ())
        # As slow as can be, but never because of guesses.
        plan = decode(2, 0)
        plan.counts[1] = 500
        gate.step_started(plan, 2)
        clock.now += 50.0 * guess
        gate.step_finished(1, ())
        clock.now += 1000.0 * guess
    assert gate.allows_drafts(2)


class Ranks:
    """Their steps take a second, and as much again for each guess; every one of those is wrong."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.drafted = clock, 0

    def submit(self, step: StepPlan) -> Future[StepResult]:
        asked = sum(step.draft_requests)
        self.clock.now += 1.0 + sum(step.draft_counts) + asked
        self.drafted += asked
        sampled = sum(1 + guesses for samples, guesses in zip(step.samples, step.draft_counts, strict=True) if samples)
        guesses = (
            {slot: [9] * asks for slot, asks in zip(step.slots, step.draft_requests, strict=True)}
            if step.draft_requests
            else {}
        )
        future: Future[StepResult] = Future()
        future.set_result(StepResult(step.id, [7] * sampled, [None] * sampled, {}, guesses))
        return future


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    fake_clock = Clock()
    monkeypatch.setattr(engine, "monotonic", fake_clock)
    yield fake_clock


def test_a_core_stops_asking_a_draft_that_costs_more_than_it_brings(clock: Clock) -> None:
    limits = {**LIMITS, "max_model_len": 2000, "speculation": Speculation(tokens=4, draft=DRAFT)}
    ranks = Ranks(clock)
    core = EngineCore(create_scheduler(limits | {"num_blocks": 600, "prefix_caching": False}), ranks, depth=1)
    core.add(request("a", [1, 2, 3], max_tokens=600, ignore_eos=True))
    steps = 0
    core.pump()
    while core.pending:
        core.finish_oldest()
        core.pump()
        steps += 1
    tries = 1 + 600 // LONG_TURN
    assert steps == 600 and 0 < ranks.drafted <= 4 * tries * (SHORT_TURN + SKIPPED)
