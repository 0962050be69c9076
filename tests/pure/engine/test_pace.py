"""Prompts beside running requests: how much of them a step may have, by the clock."""

from __future__ import annotations

import pytest

from tests.pure.scheduling import LIMITS, Engine, request
from weft.engine.core.pace import (
    CACHED_TOKENS,
    FAIR_S,
    FIRST_SHARE,
    MIN_SHARE,
    MIN_TOKENS,
    NEWCOMER_S,
    STEP_S,
    FairPace,
    Pace,
)
from weft.engine.core.scheduled import StepLimits


class Machine:
    """A clock, and steps that take `fixed_s` and `token_s` for each prompt token."""

    def __init__(self, most: int, token_s: float, fixed_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.pace = Pace(lambda: self.now_s, most)
        self._token_s, self._fixed_s = token_s, fixed_s

    def step(self, prompt_tokens: int | None = None) -> float:
        """Seconds of one step; as many prompt tokens as may be, unless it is said."""
        count = self.pace.tokens if prompt_tokens is None else prompt_tokens
        took_s = self._fixed_s + count * self._token_s
        self.pace.step_started(count, 1)
        self.now_s += took_s
        self.pace.step_finished()
        return took_s


def test_a_slow_machine_takes_prompts_in_small_pieces() -> None:
    machine = Machine(2048, token_s=0.0005)
    assert machine.step(2048) > STEP_S
    assert max(machine.step() for _ in range(50)) <= STEP_S
    assert machine.pace.tokens == 2048 // FIRST_SHARE


def test_a_fast_machine_soon_takes_whole_steps_of_prompts() -> None:
    machine = Machine(8192, token_s=1e-5)
    for _ in range(3):
        machine.step()
    assert machine.pace.tokens == 8192


def test_a_part_of_the_planned_tokens_is_always_allowed() -> None:
    machine = Machine(2048, token_s=0.1)
    machine.step()
    machine.step()
    assert machine.pace.tokens == 2048 // MIN_SHARE


def test_streams_of_a_busy_machine_keep_their_gap() -> None:
    """A third of two cores, with a prompt of 3,000 tokens behind: 12 ms a token, where a decode step takes 30 ms.

    An eighth of the planned tokens took 0.4 s then. What is aimed at leaves room for a step that takes half as long
    again, within a gap of a quarter of a second.
    """
    machine = Machine(256, token_s=0.012, fixed_s=0.03)
    for _ in range(30):
        machine.step(0)
    took_s = [machine.step() for _ in range(50)]
    assert max(took_s[2:]) <= machine.pace.limit_s <= 0.25 / 1.5
    assert 256 // MIN_SHARE <= machine.pace.tokens < 256 // FIRST_SHARE


def test_beside_slow_decode_steps_prompts_may_take_as_long_again() -> None:
    """Else a large model on a slow machine would read prompts in the smallest pieces, each for all of its weights."""
    machine = Machine(512, token_s=0.001, fixed_s=0.4)
    for _ in range(5):
        machine.step(0)
    assert machine.pace.limit_s == pytest.approx(0.8)
    for _ in range(20):
        machine.step()
    assert 200 <= machine.pace.tokens <= 400


def test_a_step_that_waited_for_another_is_not_slow() -> None:
    times_s = iter([0.0, 0.0, 0.07, 0.14])
    pace = Pace(lambda: next(times_s), 2048)
    pace.step_started(256, 1)
    pace.step_started(256, 1)
    pace.step_finished()
    pace.step_finished()
    assert pace.tokens == 512


class FairMachine:
    """A clock, and steps under the policy "fair" that take `fixed_s`, and `token_s` for each token."""

    def __init__(self, token_s: float, fixed_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.pace = FairPace(lambda: self.now_s, 2048)
        self._token_s, self._fixed_s = token_s, fixed_s

    def step(self, prompt_tokens: int, rows: int, newcomer_tokens: int = 0) -> float:
        """Seconds of a step of as many of these as may be, of the rows up to half."""
        most = self.pace.tokens
        rows = min(rows, most // 2)
        prompt_tokens = min(prompt_tokens, most - rows)
        took_s = self._fixed_s + (prompt_tokens + rows) * self._token_s
        self.pace.step_started(prompt_tokens, rows, newcomer_tokens)
        self.now_s += took_s
        self.pace.step_finished()
        return took_s


@pytest.mark.parametrize("work", [(2000, 0), (0, 256), (2000, 256)], ids=str)
def test_fair_steps_are_short_and_no_shorter_than_need_be(work: tuple[int, int]) -> None:
    machine = FairMachine(0.002, fixed_s=0.01)
    machine.step(0, 1)
    machine.pace.step_started(0, 8)
    machine.now_s += 5.0  # once, something else had the processor
    machine.pace.step_finished()
    assert machine.pace.tokens == MIN_TOKENS
    took_s = [machine.step(*work) for _ in range(40)]
    assert max(took_s) <= FAIR_S
    # Rows alone fill half a step, so that prompts that come have the other half.
    assert took_s[-1] > (0.85 if work[0] else 0.4) * FAIR_S


def test_fair_steps_of_a_large_model_take_twice_its_smallest_ones() -> None:
    """0.4 s for the weights alone: of 0.1 s, nothing but the smallest steps would be left."""
    machine = FairMachine(0.002, fixed_s=0.4)
    for _ in range(10):
        machine.step(0, 4)
    took_s = [machine.step(2000, 64) for _ in range(30)]
    assert 0.7 <= took_s[-1] <= machine.pace.limit_s == pytest.approx(0.816, rel=0.05)


@pytest.mark.parametrize("tokens", [2, 60, 400])
def test_after_a_newcomer_steps_take_no_longer_than_its_prompt(tokens: int) -> None:
    machine = FairMachine(0.0005, fixed_s=0.01)
    for _ in range(12):
        machine.step(0, 4)
        machine.step(1000, 0)
    assert machine.pace.busy_limit_s == FAIR_S, "nobody came"
    machine.step(400, 0, tokens)
    for _ in range(20):
        limits = machine.pace.limits()
        took_s = machine.step(limits.busy_tokens, 0)
    # A smallest step takes 12 ms, and a prompt as long as its tokens in a full step.
    prompt_s = tokens * FAIR_S / limits.step_tokens
    assert took_s <= min(FAIR_S, max(2 * 0.012, prompt_s))
    assert limits.step_tokens * 0.0005 > 0.85 * (FAIR_S - 0.01), "its own prompt needs no more steps than before"
    machine.now_s += NEWCOMER_S + 1
    machine.pace.limits()
    for _ in range(5):
        machine.step(1000, 0)
    limits = machine.pace.limits()
    assert limits.busy_tokens == limits.step_tokens


def test_only_who_runs_alone_has_steps_full_of_its_prompt() -> None:
    engine = Engine({**LIMITS, "prefix_caching": False})
    limits = StepLimits(prompt_tokens=8)
    engine.scheduler.add(request("long", [1] * 40, max_tokens=4))
    scheduled = engine.scheduler.schedule(limits)
    assert scheduled and scheduled.step.counts == [40] and scheduled.prompt_tokens == 40

    engine = Engine({**LIMITS, "prefix_caching": False, "lookahead": True})
    engine.scheduler.add(request("running", [1], max_tokens=20))
    assert engine.scheduler.schedule(limits) is not None
    engine.scheduler.add(request("long", [2] * 20, max_tokens=1))
    steps = [step for _ in range(3) if (step := engine.scheduler.schedule(limits))]
    counts = [(step.step.counts, step.prompt_tokens) for step in steps]
    assert counts[0] == ([1, 8], 8)


def test_cached_prompts_are_bounded_beside_decodes() -> None:
    """A row that finds its prompt in the cache computes one token, and attention still reads all of it."""
    sizes = {"num_blocks": 40, "block_size": 512, "max_model_len": 4096, "max_num_batched_tokens": 4096}
    engine = Engine({**LIMITS, **sizes})
    engine.step_limits = StepLimits(prompt_tokens=8)
    prompt = [7] * (2 * CACHED_TOKENS + 1)
    engine.scheduler.add(request("first", prompt, max_tokens=20))
    assert engine.schedule() and engine.apply()
    for number in range(6):
        engine.scheduler.add(request(f"same {number}", prompt, max_tokens=20))
    step = engine.schedule()
    # The decode, and rows that count as 1 + 2 tokens each while less than 8 are taken.
    assert step is not None and step.counts == [1, 1, 1, 1]
    # The pace is told what they count as: else steps full of such rows would never let it grow.
    assert engine.prompt_tokens == 3 * (1 + 2)
