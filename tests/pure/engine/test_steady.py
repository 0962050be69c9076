"""steady() and Scheduler.advance: many rounds at once are as single steps."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.pure.scheduling import LIMITS, Engine, layout, request
from weft.engine.core.kv import KVManager
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Request
from weft.engine.core.scheduler import Scheduler
from weft.engine.core.step import StepPlan, StepResult
from weft.engine.core.token_ids import TokenIds
from weft.engine.core.view import SchedulerSettings
from weft.plan.plan import Speculation
from weft.study.simulate.steady import blocks_of_rounds, steady


class Keyed:
    """A scheduler whose requests sample their own key again and again: those with one key have equal contents."""

    def __init__(
        self, stages: int, ahead: bool, blocks: int, caching: bool, policy: Any, windows: tuple[int | None, ...]
    ) -> None:
        settings = SchedulerSettings(
            max_num_seqs=6,
            max_num_batched_tokens=32,
            max_num_queued=100,
            max_model_len=64,
            stages=stages,
            policy=policy,
            lookahead=ahead,
        )
        kv = KVManager(layout(windows, chunk=32), blocks, max_num_seqs=6, caching=caching, counted=not caching)
        self.scheduler = Scheduler(settings, kv)
        self.depth = stages + ahead
        self.flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.keys: dict[int, int] = {}

    def sample(self, plan: StepPlan) -> StepResult:
        self.keys |= {admission.slot: admission.key for admission in plan.admitted}
        tokens = [self.keys[slot] for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        return StepResult(plan.id, tokens, [None] * len(tokens), {})

    def schedule(self) -> None:
        while len(self.flight) < self.depth and (scheduled := self.scheduler.schedule()):
            self.flight.append((scheduled.step, self.sample(scheduled.step)))

    def step(self) -> None:
        self.schedule()
        if self.flight:
            self.scheduler.apply(self.flight.popleft()[1])

    def advance(self, rounds: int) -> list[str]:
        """Advance at once. The rows of a step in flight may have another order then."""
        ended = self.scheduler.advance(rounds)
        self.flight = deque((plan, self.sample(plan)) for plan, _ in self.flight)
        return ended

    def state(self) -> Any:
        """State that must be equal on both ways."""
        scheduler, table, kv = self.scheduler, self.scheduler.table, self.scheduler.kv
        rows = [
            (row.request.id, row.tokens, row.computed, row.room, row.freed, row.outstanding, row.pending)
            for row in table.running.values()
        ]
        turns = [row.request.id for row in table.ready]
        return rows, scheduler.stats(), turns, list(table.unfinished), kv.promised, kv.reserved


REQUESTS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 12), st.integers(1, 6), st.integers(1, 30), st.integers(0, 2)),
    min_size=1,
    max_size=9,
)


@settings(deadline=None, max_examples=300)
@example(
    stages=1,
    ahead=True,  # the orders of two steps alternate
    blocks=24,
    caching=True,
    policy="fcfs",
    windows=(9,),
    requests=[
        (1, 0, 1, 12, 0),
        (1, 0, 6, 11, 0),
        (1, 2, 3, 13, 0),
        (1, 0, 1, 10, 0),
        (1, 1, 6, 11, 0),
        (1, 4, 4, 10, 0),
        (1, 4, 1, 1, 0),
    ],
    arrivals=[3],
    aborts={},
    part=1.0,
)
@given(
    stages=st.integers(1, 3),
    ahead=st.booleans(),
    blocks=st.integers(16, 60),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    windows=st.sampled_from([(None,), (None,), (3,), (9,), (None, 7), (1, None, 16)]),
    requests=REQUESTS,
    arrivals=st.lists(st.integers(0, 6), max_size=9),
    aborts=st.dictionaries(st.integers(0, 30), st.integers(0, 8), max_size=3),
    part=st.floats(0.0, 1.0),
)
def test_rounds_at_once_are_as_one_after_the_other(
    stages: int,
    ahead: bool,
    blocks: int,
    caching: bool,
    policy: str,
    windows: tuple[int | None, ...],
    requests: list[tuple[int, int, int, int, int]],
    arrivals: list[int],
    aborts: dict[int, int],
    part: float,
) -> None:
    ahead = ahead and stages == 1
    fast, slow = (Keyed(stages, ahead, blocks * len(windows), caching, policy, windows) for _ in range(2))
    waiting = deque(enumerate(requests))
    counts = iter(arrivals)
    turn = 0
    while waiting or slow.scheduler.table.unfinished or slow.flight:
        for _ in range(next(counts, len(waiting))):
            if not waiting:
                break
            number, (key, shared, own, answer, priority) = waiting.popleft()
            for side in (fast, slow):
                params = SamplingParams(max_tokens=answer, ignore_eos=True)
                prompt = [0] * shared + [key] * own
                side.scheduler.add(
                    Request(id=str(number), prompt=TokenIds.pack(prompt), params=params, key=key, priority=priority)
                )
        if turn in aborts:
            for side in (fast, slow):
                side.scheduler.abort([str(aborts[turn])])
        turn += 1
        rest = steady(fast.scheduler.view) if len(fast.flight) < fast.depth else None
        if rest and (rounds := round(part * rest.rounds)):
            ended = fast.advance(rounds)
            unfinished = set(slow.scheduler.table.unfinished)
            for _ in range(rounds * len(rest.contexts)):
                slow.step()
            assert set(ended) == unfinished - set(slow.scheduler.table.unfinished)
        else:
            fast.step()
            slow.step()
        assert fast.state() == slow.state()
    assert not fast.scheduler.table.unfinished
    assert fast.scheduler.kv.used == slow.scheduler.kv.used == 0


def steady_after_prompt(change: dict[str, Any], **params: Any) -> int | None:
    """Rounds of a lone request that has its first token."""
    engine = Engine(LIMITS | change)
    engine.scheduler.add(request("a", [1, 2, 3], **params))
    engine.schedule()
    engine.apply()
    rest = steady(engine.scheduler.view)
    return rest and rest.rounds


def test_a_request_alone_decodes_to_its_end() -> None:
    assert steady_after_prompt({}, max_tokens=20) == 19
    # 3 tokens of the prompt and 21 of 24 others: as many as the cache holds, or as the model may have.
    assert steady_after_prompt({"num_blocks": 6}, max_tokens=None) == 20
    assert steady_after_prompt({"max_model_len": 10}, max_tokens=None) == 6


def test_contexts_are_those_of_the_first_round() -> None:
    engine = Engine(LIMITS)
    engine.scheduler.add(request("a", [1, 2, 3], max_tokens=9))
    engine.scheduler.add(request("b", [4] * 7, max_tokens=9))
    assert steady(engine.scheduler.view) is None, "nothing runs"
    engine.schedule()
    engine.apply()
    rest = steady(engine.scheduler.view)
    assert rest and rest.contexts == [[4, 8]]
    engine.scheduler.advance(3)
    plan = engine.schedule()
    assert plan and plan.starts == [6, 10]


@pytest.mark.parametrize(
    ("change", "params"),
    [
        ({"speculation": Speculation(tokens=3)}, {}),
        # The first token would end it, were it not for min_tokens.
        ({}, {"stop_ids": tuple(range(13)), "min_tokens": 5}),
    ],
    ids=["drafts", "end tokens"],
)
def test_a_state_that_needs_single_steps_is_not_steady(change: dict[str, Any], params: dict[str, Any]) -> None:
    assert steady_after_prompt(change, max_tokens=20, **params) is None


def test_a_shared_block_behind_a_window_is_no_room() -> None:
    """Two requests that share the first block of their prompt: it is free only once both have left it behind."""
    needed = {}
    for other in (8, 9):
        side = Keyed(stages=1, ahead=False, blocks=8, caching=True, policy="fcfs", windows=(5,))
        for number, token in enumerate([9, other]):
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            prompt = TokenIds.pack([token] * 4 + [number, number])
            side.scheduler.add(Request(id=str(number), prompt=prompt, params=params, key=number))
            side.step()
        needed[other] = blocks_of_rounds(side.scheduler.kv, side.scheduler.table.running.values(), 30)
    assert needed == {8: 0, 9: 2}
