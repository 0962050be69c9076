"""Scheduler: whatever happens, every request gets its tokens and every block is where it should be."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.ranks import VOCAB, expected, logprob, pooled
from tests.pure.scheduling import AHEAD, DRAFT, LIMITS, Engine, request
from weft.engine.core.request import Request
from weft.engine.core.step import Pooling
from weft.errors import RequestError
from weft.plan.plan import Speculation

WINDOWS: list[tuple[int | None, ...]] = [(None,), (None,), (None, None), (1,), (4,), (7, None), (2, 9), (None, 5, 5)]


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    windows = draw(st.sampled_from(WINDOWS))
    ahead = draw(st.sampled_from(AHEAD))
    return {
        "num_blocks": draw(st.integers(2, 14)) * len(windows),
        "windows": windows,
        # A state that has read a rejected draft token cannot go back.
        "states": 0 if "speculation" in ahead else draw(st.sampled_from([0, 0, 1, 2])),
        "block_size": draw(st.integers(1, 4)),
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.integers(1, 12)),
        "max_num_queued": 1000,
        "max_model_len": draw(st.integers(6, 40)),
        "stages": draw(st.integers(1, 3)),
        "policy": draw(st.sampled_from(["fcfs", "priority", "fair"])),
        "prefix_caching": draw(st.booleans()),
        **ahead,
    }


@st.composite
def asked(draw: st.DrawFn, id: str) -> Request:
    """Prompts of few kinds, so that they share beginnings."""
    prompt = [draw(st.integers(0, 1))] * draw(st.integers(1, 10)) + [2] * draw(st.integers(0, 10))
    most = draw(st.none() | st.integers(1, 12))
    shares: dict[str, Any] = {"owner": draw(st.integers(0, 2)), "weight": draw(st.sampled_from([1.0, 1.0, 3.0]))}
    if draw(st.sampled_from([False, False, True])):
        return request(id, prompt, priority=draw(st.integers(0, 2)), pooling=Pooling(), **shares)
    return request(
        id,
        prompt,
        priority=draw(st.integers(0, 2)),
        stop_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))),
        max_tokens=most,
        min_tokens=draw(st.integers(0, 12 if most is None else most)),
        logprobs=draw(st.none() | st.just(0)),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        **shares,
    )


ADDING = ("add", "add unprepared")
OPERATIONS = st.lists(
    st.sampled_from([*ADDING, "add", "schedule", "schedule", "apply", "apply", "abort", "prepare"]), max_size=60
)


def play(limits: dict[str, Any], requests: list[Request], operations: list[str], depth: int) -> tuple[Engine, set[str]]:
    """Operations as they come, then everything to its end. Returns those that were taken in and not aborted."""
    engine = Engine(limits)
    arriving = deque(requests)
    taken: set[str] = set()
    for operation in operations:
        if operation in ADDING and arriving:
            item = arriving.popleft()
            try:
                engine.scheduler.add(item, prepared=operation == "add")
                taken.add(item.id)
            except RequestError:
                assert len(item.prompt) >= engine.longest
        elif operation == "schedule" and len(engine.flight) < depth:
            engine.schedule()
        elif operation == "apply" and engine.flight:
            engine.apply()
        elif operation == "abort" and (ids := list(engine.scheduler.table.unfinished)):
            # Not the first always: some that run, some that wait.
            id = ids[len(engine.plans) % len(ids)]
            engine.scheduler.abort([id, "nobody"])
            engine.check_blocks()
            taken.discard(id)
        elif operation == "prepare" and (unprepared := list(engine.scheduler.table.unprepared)):
            engine.scheduler.mark_prepared(unprepared[len(engine.plans) % len(unprepared)])
    engine.run(depth=depth)
    check_unprepared(engine)
    engine.run(depth=depth)
    return engine, taken


def check_unprepared(engine: Engine) -> None:
    """The others have ended, and those that are not prepared have nothing yet. Then prepare them, last one first."""
    scheduler = engine.scheduler
    unprepared = list(scheduler.table.unprepared)
    assert list(scheduler.table.unfinished) == unprepared
    assert scheduler.table.waiting == scheduler.stats().waiting == len(unprepared)
    assert scheduler.active == scheduler.kv.used == 0 and scheduler.schedule() is None
    assert not engine.outputs.keys() & set(unprepared)
    for id in reversed(unprepared):
        scheduler.mark_prepared(id)
        scheduler.mark_prepared(id)
    assert not scheduler.table.unprepared and scheduler.table.waiting == len(unprepared)


def check(engine: Engine, requests: list[Request], taken: set[str]) -> None:
    """All that must hold at the end."""
    for item in requests:
        outputs = engine.outputs.get(item.id, [])
        if item.id not in taken:
            assert all(output.finish_reason is None for output in outputs[:-1])
            continue
        if item.pooling is not None:
            assert [output.pooled for output in outputs] == [pooled(list(item.prompt))]
            assert outputs[0].finish_reason == "stop"
            assert not outputs[0].tokens and 0 <= outputs[0].cached_tokens < len(item.prompt)
            continue
        answer, reason = expected(item, engine.longest)
        assert engine.tokens(item.id) == answer
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [reason]
        asked_for = item.params.logprobs is not None
        logprobs = [one for output in outputs for one in output.logprobs]
        assert logprobs == [logprob(t) if asked_for else None for t in answer]
        pieces = [output.prompt_logprobs for output in outputs]
        whole = None if item.params.prompt_logprobs is None else [logprob(t) for t in list(item.prompt)[1:]]
        assert pieces == [whole] + [None] * (len(outputs) - 1)
        assert all(0 <= output.cached_tokens < len(item.prompt) for output in outputs)
    stats = engine.scheduler.stats()
    assert stats.running == stats.waiting == stats.blocks_used == 0
    assert stats.generation_tokens == sum(len(engine.tokens(id)) for id in engine.outputs)
    assert stats.prompt_tokens == sum(len(r.prompt) for r in requests if r.id in engine.outputs)
    assert stats.steps == len(engine.plans)
    # Nothing of them is left behind.
    assert not any(len(owner.queue) for owner in engine.scheduler.table.owners.values())
    assert sorted(engine.scheduler.table.slots) == list(range(engine.limits["max_num_seqs"]))
    assert not engine.scheduler.table.ready and not engine.scheduler.table.pooling


@settings(max_examples=300)
@given(data=st.data(), limits=limits(), operations=OPERATIONS, depth=st.integers(1, 4))
def test_every_request_gets_its_tokens(
    data: st.DataObject, limits: dict[str, Any], operations: list[str], depth: int
) -> None:
    requests = [data.draw(asked(f"r{i}")) for i in range(sum(operation in ADDING for operation in operations))]
    engine, taken = play(limits, requests, operations, depth)
    check(engine, requests, taken)


@pytest.mark.parametrize(
    "start", [0, 200, *(pytest.param(start, marks=pytest.mark.long) for start in range(400, 1600, 200))]
)
def test_every_request_gets_its_tokens_when_it_is_crowded(start: int) -> None:
    """Longer than what hypothesis draws of its own accord: many requests, few blocks, much in flight."""
    for seed in range(start, start + 200):
        random = Random(seed)
        windows, ahead = random.choice(WINDOWS), random.choice(AHEAD)
        limits = {
            "num_blocks": random.randint(2, 14) * len(windows),
            "windows": windows,
            "states": 0 if "speculation" in ahead else random.choice([0, 0, 1]),
            "block_size": random.randint(1, 4),
            "max_num_seqs": random.randint(1, 6),
            "max_num_batched_tokens": random.randint(1, 14),
            "max_num_queued": 1000,
            "max_model_len": random.randint(6, 40),
            "stages": random.randint(1, 3),
            "policy": random.choice(["fcfs", "priority"]),
            "prefix_caching": random.random() < 0.7,
            **ahead,
        }
        requests = [
            request(
                f"r{i}",
                [random.randint(0, 1)] * random.randint(1, 10) + [2] * random.randint(0, 10),
                priority=random.randint(0, 2),
                stop_ids=(random.randrange(3 * VOCAB),),
                max_tokens=random.choice([None, *range(1, 13)]),
                prompt_logprobs=random.choice([None, None, 0]),
                frequency_penalty=random.choice([0.0, 0.0, 0.5]),
                pooling=random.choice([None, None, Pooling()]),
            )
            for i in range(20)
        ]
        weights = [3, random.choice([0, 1]), 3, 3, random.choice([0, 1]), 1]
        operations = random.choices([*ADDING, "schedule", "apply", "abort", "prepare"], weights, k=200)
        engine, taken = play(limits, requests, operations, random.randint(1, 4))
        check(engine, requests, taken)


@given(data=st.data(), limits=limits(), operations=OPERATIONS, depth=st.integers(1, 3))
def test_the_same_calls_give_the_same_steps(
    data: st.DataObject, limits: dict[str, Any], operations: list[str], depth: int
) -> None:
    requests = [data.draw(asked(f"r{i}")) for i in range(sum(operation in ADDING for operation in operations))]
    first, second = (play(limits, requests, operations, depth)[0] for _ in range(2))
    assert first.plans == second.plans


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 1},
        {"num_blocks": 9},
        {"num_blocks": 9, "prefix_caching": False},
        {"prefix_caching": False},
        {"max_num_seqs": 1},
        {"stages": 3},
        {"lookahead": True},
        {"lookahead": True, "num_blocks": 9},
        {"speculation": Speculation(tokens=3, lookup_min=1)},
        {"speculation": Speculation(tokens=4, draft=DRAFT)},
        {"speculation": Speculation(tokens=4, draft=DRAFT), "num_blocks": 9, "max_num_batched_tokens": 11},
        {"speculation": Speculation(tokens=4, draft=DRAFT), "stages": 2},
    ],
    ids=str,
)
def test_the_same_tokens_however_they_are_computed(change: dict[str, Any], depth: int) -> None:
    requests = [request(f"r{i}", [i % 3] * 9 + [5, i], max_tokens=14) for i in range(7)]
    engine = Engine(LIMITS | change)
    engine.run(*requests, depth=depth)
    for item in requests:
        assert engine.tokens(item.id) == expected(item, 64)[0]
    if change.get("num_blocks"):
        assert engine.scheduler.stats().preemptions > 0
