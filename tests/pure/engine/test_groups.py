"""GroupedScheduler: every group is a scheduler of its own, and all take every step."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.engine.test_scheduler_properties import OPERATIONS, asked, limits
from tests.pure.ranks import Ranks, expected, pooled
from tests.pure.scheduling import LIMITS, create_scheduler, request
from tests.refusals import refuses
from weft.engine.core.commands import Command, Done, Replies, Sleep, Wake
from weft.engine.core.engine import EngineCore
from weft.engine.core.groups import GroupedScheduler
from weft.engine.core.request import Output, Request
from weft.engine.core.scheduled import UNLIMITED, StepLimits
from weft.engine.core.step import LockStep, LockStepResult, StepPlan, StepResult
from weft.errors import QueueFullError, RequestError


def create_ranks(limits: dict[str, Any]) -> Ranks:
    names = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "windows", "states")
    return Ranks(**{name: limits[name] for name in names})


@dataclass
class Groups:
    """Schedulers of several groups, and obedient ranks of each. An executor too, whose steps are done at once."""

    limits: dict[str, Any]
    count: int = 2
    scheduler: GroupedScheduler = field(init=False)
    ranks: list[Ranks] = field(init=False)
    flight: deque[LockStep] = field(default_factory=deque)
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    steps: int = 0
    step_limits: StepLimits = UNLIMITED
    prompt_tokens: int = 0  # of the last step
    newcomer_tokens: int = 0

    def __post_init__(self) -> None:
        self.limits = LIMITS | self.limits
        self.scheduler = GroupedScheduler([create_scheduler(self.limits) for _ in range(self.count)])
        self.ranks = [create_ranks(self.limits) for _ in range(self.count)]

    def schedule(self) -> LockStep | None:
        scheduled = self.scheduler.schedule(self.step_limits)
        if scheduled is None:
            return None
        step, _, self.prompt_tokens, self.newcomer_tokens = scheduled
        self.steps += 1
        tokens = [len(plan.tokens) for plan in step.plans]
        assert any(tokens) and all(plan.group_tokens == tokens for plan in step.plans)
        single = {count for plan in step.plans for count in plan.counts} == {1}
        assert all(plan.graph_rows == (max(tokens) if single else 0) for plan in step.plans)
        self.flight.append(step)
        return step

    def execute(self, step: LockStep) -> LockStepResult:
        return LockStepResult(
            [
                ranks.execute(plan) if plan.slots else StepResult(plan.id, [], [], {})
                for ranks, plan in zip(self.ranks, step.plans, strict=True)
            ]
        )

    def apply(self) -> None:
        for output in self.scheduler.apply(self.execute(self.flight.popleft())):
            self.outputs.setdefault(output.id, []).append(output)

    def run(self, depth: int = 1) -> None:
        while self.scheduler.stats().running or self.scheduler.stats().waiting or self.flight:
            while len(self.flight) < depth and self.schedule():
                pass
            self.apply()

    def tokens(self, id: str) -> list[int]:
        return [token for output in self.outputs.get(id, ()) for token in output.tokens]

    # As an executor

    def submit(self, step: LockStep) -> Future[LockStepResult]:
        future: Future[LockStepResult] = Future()
        future.set_result(self.execute(step))
        return future

    def call(self, command: Command) -> Future[Replies]:
        for ranks in self.ranks:
            ranks.kv.clear()
        future: Future[Replies] = Future()
        future.set_result([Done()])
        return future


@settings(max_examples=100)
@given(data=st.data(), limits=limits(), operations=OPERATIONS, count=st.integers(1, 3), depth=st.integers(1, 3))
def test_every_request_gets_its_tokens(
    data: st.DataObject, limits: dict[str, Any], operations: list[str], count: int, depth: int
) -> None:
    groups = Groups(limits, count)
    arriving = deque(data.draw(asked(f"r{i}")) for i in range(operations.count("add")))
    taken: dict[str, Request] = {}
    for number, operation in enumerate(operations):
        if operation == "add" and arriving:
            item = arriving.popleft()
            try:
                groups.scheduler.add(item)
                taken[item.id] = item
            except RequestError as error:
                assert error.code in ("prompt-too-long", "prompt-exceeds-cache")
        elif operation == "schedule" and len(groups.flight) < depth:
            groups.schedule()
        elif operation == "apply" and groups.flight:
            groups.apply()
        elif operation == "abort" and (ids := list(groups.scheduler._group_of)):
            id = ids[number % len(ids)]
            groups.scheduler.abort([id, "nobody"])
            del taken[id]
    groups.run(depth)
    scheduler = groups.scheduler
    longest = scheduler.groups[0].kv.layout.longest(groups.limits["num_blocks"], groups.limits["max_model_len"])
    for id, item in taken.items():
        if item.pooling is not None:
            assert [output.pooled for output in groups.outputs[id]] == [pooled(list(item.prompt))]
        else:
            assert groups.tokens(id) == expected(item, longest)[0]
    assert scheduler._load == [0] * count and not scheduler._group_of and not scheduler._tokens_of
    stats = scheduler.stats()
    assert stats.generation_tokens == sum(len(groups.tokens(id)) for id in groups.outputs)
    assert stats.steps == groups.steps == sum(stats.step_sizes)
    assert stats.computed_tokens == sum(ranks.computed for ranks in groups.ranks)
    assert stats.blocks_total == count * groups.limits["num_blocks"] and stats.blocks_used == 0


def test_a_request_goes_where_the_fewest_tokens_are() -> None:
    groups = Groups({}, 2)
    for id, length, answer in (("a", 30, 5), ("b", 9, 5), ("c", 9, 5), ("d", 20, 5)):
        groups.scheduler.add(request(id, [1] * length, max_tokens=answer))
    assert groups.scheduler._group_of == {"a": 0, "b": 1, "c": 1, "d": 1}
    groups.scheduler.add(request("later", [1], max_tokens=1), prepared=False)
    groups.scheduler.mark_prepared("later")
    groups.scheduler.mark_prepared("nobody")
    groups.scheduler.abort(["a"])
    groups.scheduler.add(request("e", [1], max_tokens=1))
    assert groups.scheduler._group_of["e"] == 0
    with refuses(RequestError, "duplicate-request-id", "'d'"):
        groups.scheduler.add(request("d", [1]))
    groups.run()
    assert groups.scheduler._load == [0, 0]


def test_a_group_without_requests_takes_the_step_empty() -> None:
    groups = Groups({}, 3)
    groups.scheduler.add(request("a", [1, 2, 3], max_tokens=2))
    step = groups.schedule()
    assert step and [plan.slots for plan in step.plans] == [[0], [], []]
    assert [plan.group_tokens for plan in step.plans] == [[3, 0, 0]] * 3
    assert [plan.graph_rows for plan in step.plans] == [0, 0, 0], "a prompt has no graph"
    assert groups.scheduler.schedule() is None
    groups.apply()
    decode = groups.schedule()
    assert decode and [plan.group_tokens for plan in decode.plans] == [[1, 0, 0]] * 3
    assert [plan.graph_rows for plan in decode.plans] == [1, 1, 1], "groups without rows replay it too"


def test_a_full_queue_is_full_when_all_groups_are() -> None:
    groups = Groups({"max_num_queued": 1, "max_num_seqs": 1}, 2)
    for number in range(4):
        # The first is a heavy one: all others would go to the other group.
        groups.scheduler.add(request(str(number), [1] * (1 if number else 40), max_tokens=1))
    assert sorted(groups.scheduler._group_of.values()) == [0, 0, 1, 1]
    # The numbers are those of both groups together.
    with refuses(QueueFullError, "queue-full", 4, 2):
        groups.scheduler.add(request("4", [1]))
    assert len(groups.scheduler._group_of) == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_the_core_drives_groups_like_one_scheduler(depth: int) -> None:
    groups = Groups({"stages": depth}, 2)
    core = EngineCore(groups.scheduler, groups, depth=depth)
    requests = [request(f"r{i}", [i] * (3 * i + 1), max_tokens=7) for i in range(7)]
    for item in requests:
        core.add(item)
    tokens: dict[str, list[int]] = {}

    def finish() -> None:
        for output in core.finish_oldest():
            tokens.setdefault(output.id, []).extend(output.tokens)

    for _ in range(3):
        core.pump()
        finish()
    core.call(Sleep(1))
    while core.pending:
        finish()
    core.pump()
    assert core.stats().sleep_level == 1 and core.stats().running == 0 and core.stats().waiting
    core.call(Wake())
    core.pump()
    while core.pending:
        finish()
        core.pump()
    assert tokens == {item.id: expected(item, 64)[0] for item in requests}
    assert core.stats().preemptions > 0 and core.stats().steps >= 7
    core.add(request("late", [1], max_tokens=1))
    core.abort(["late"])
    assert core.stats().waiting == 0


def test_a_pace_limits_the_prompts_of_each_group() -> None:
    groups = Groups({}, 2)
    for id in ("a", "b"):
        groups.scheduler.add(request(id, [1] * 4, max_tokens=9))
    groups.schedule()
    assert groups.prompt_tokens == 4
    groups.apply()
    for id in ("c", "d"):
        groups.scheduler.add(request(id, [2] * 8, max_tokens=9))
    groups.step_limits = StepLimits(prompt_tokens=3)
    step = groups.schedule()
    assert step and [plan.counts for plan in step.plans] == [[1, 3], [1, 3]]
    assert groups.prompt_tokens == 3
    assert isinstance(step.plans[0], StepPlan)


def test_a_pace_limits_prompts_beside_the_decodes_of_another_group() -> None:
    """All groups take the step: one that only prefills delays the tokens of the others."""
    groups = Groups({"prefix_caching": False}, 2)
    groups.step_limits = StepLimits(prompt_tokens=3)
    groups.scheduler.add(request("decodes", [1] * 4, max_tokens=9))
    groups.schedule()
    groups.apply()
    groups.scheduler.add(request("long", [2] * 8, max_tokens=1))
    assert groups.scheduler._group_of == {"decodes": 0, "long": 1}
    steps = [step for _ in range(2) if (step := groups.schedule()) and not groups.apply()]
    assert [[plan.counts for plan in step.plans] for step in steps] == [[[1], [3]], [[1], [3]]]
    groups.scheduler.abort(["decodes"])
    step = groups.schedule()
    assert step and [plan.counts for plan in step.plans] == [[], [2]]


def test_a_fair_pace_hears_of_newcomers_and_limits_the_steps_of_each_group() -> None:
    groups = Groups({"policy": "fair", "prefix_caching": False}, 2)
    for number in range(4):
        groups.scheduler.add(request(f"big-{number}", [number] * 30, owner=1, max_tokens=20))
    for _ in range(3):
        groups.schedule()
        groups.apply()
    groups.step_limits = StepLimits(step_tokens=4, busy_tokens=4)
    step = groups.schedule()
    assert step and groups.newcomer_tokens == 0
    assert max(len(plan.tokens) for plan in step.plans) <= 4
    groups.apply()
    for owner, length in ((2, 9), (3, 5)):
        groups.scheduler.add(request(f"small-{owner}", [owner] * length, owner=owner, max_tokens=1))
    told = [groups.schedule() and groups.newcomer_tokens]
    groups.apply()
    assert told == [5]
    groups.run()
