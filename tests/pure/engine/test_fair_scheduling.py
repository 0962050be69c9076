"""The policy "fair": in steps and tokens, how long one owner waits for another."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.pure.scheduling import LIMITS, Engine, request
from tests.refusals import refuses
from weft.engine.core.request import Request
from weft.engine.core.scheduled import StepLimits
from weft.errors import QueueFullError

ROOMY = LIMITS | {
    "policy": "fair",
    "num_blocks": 1024,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 32,
    "max_num_queued": 2000,
    "max_model_len": 256,
}


def busy(limits: dict[str, Any], requests: int, prompt: int = 8, owner: int = 1) -> Engine:
    """An engine that has taken steps with the requests of one owner."""
    engine = Engine(ROOMY | limits)
    for number in range(requests):
        body = [number % 7] * prompt + [number % 11, number // 11 % 11]
        engine.scheduler.add(request(f"big{owner}-{number}", body, owner=owner, max_tokens=100))
    for _ in range(12):
        step(engine)
    return engine


def step(engine: Engine) -> int:
    """Take a step; return its number of tokens."""
    plan = engine.schedule()
    assert plan
    engine.apply()
    return len(plan.tokens)


def tokens_until_first(engine: Engine, id: str) -> int:
    """Tokens of the steps until a request has its first token."""
    total = 0
    while not engine.tokens(id):
        total += step(engine)
    return total


@pytest.mark.parametrize("length", [1, 30, 200])
@pytest.mark.parametrize("big", [{"requests": 200}, {"requests": 60, "prompt": 120}], ids=str)
def test_a_first_token_comes_as_if_nobody_else_were_there(big: dict[str, Any], length: int) -> None:
    alone = Engine(ROOMY)
    small = request("small", [9] * length, owner=2, max_tokens=4)
    alone.scheduler.add(small)
    engine = busy({}, **big)
    engine.scheduler.add(small)
    # Shares are equal but for a step's tokens. Not counted is the step that runs when it comes.
    assert tokens_until_first(engine, "small") <= 2 * tokens_until_first(alone, "small") + (length > 32) * 32


@pytest.mark.parametrize("big", [{"requests": 200}, {"requests": 60, "prompt": 120}], ids=str)
def test_a_short_prompt_in_chunks_takes_no_turns(big: dict[str, Any]) -> None:
    """Two clients that always wait take turns. One that was quiet has a part in every step until its first token."""
    engine = busy({"max_num_batched_tokens": 256}, **big)
    engine.step_limits = StepLimits(step_tokens=20)
    engine.scheduler.add(request("small", [9] * 50, owner=2, max_tokens=4))
    computed = 0
    while not engine.tokens("small"):
        assert step(engine) <= 20
        sequence = engine.scheduler.table.running["small"]
        assert sequence.computed > computed
        computed = sequence.computed


def test_a_newcomer_does_not_wait_for_a_slot_and_its_answer_goes_on() -> None:
    engine = busy({}, 200)
    assert len(engine.scheduler.table.running) == 32
    engine.scheduler.add(request("small", [9] * 4, owner=2, max_tokens=20))
    for _ in range(22):
        step(engine)
    assert len(engine.tokens("small")) == 20
    assert engine.scheduler.stats().preemptions == 1


def test_blocks_are_given_up_too() -> None:
    engine = busy({"num_blocks": 64, "max_model_len": 120}, 30, prompt=40)
    assert engine.scheduler.stats().waiting and engine.scheduler.table.slots
    engine.scheduler.add(request("small", [9] * 60, owner=2, max_tokens=4))
    assert tokens_until_first(engine, "small") <= 2 * 60
    # A request above its owner's share waits for its turn, and gets it.
    engine.scheduler.add(request("large", [8] * 110, owner=2, max_tokens=2))
    engine.run()
    assert len(engine.tokens("large")) == 2


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_owners_with_enough_to_do_are_served_by_their_weights(weight: float) -> None:
    engine = busy({}, 100)
    for number in range(100):
        item = request(f"other-{number}", [number % 5, number % 13], owner=2, weight=weight, max_tokens=100)
        engine.scheduler.add(item)
    engine.step_limits = StepLimits(step_tokens=32)
    owners = engine.scheduler.table.owners
    before = [owners[number].served * owners[number].weight for number in (1, 2)]
    for _ in range(150):
        step(engine)
    after = [owners[number].served * owners[number].weight for number in (1, 2)]
    first, second = (now - past for now, past in zip(after, before, strict=True))
    assert second / first == pytest.approx(weight, rel=0.1)


def test_time_without_requests_is_no_credit() -> None:
    engine = busy({}, 20, owner=2)
    engine.run()
    for number in range(100):
        engine.scheduler.add(request(f"long-{number}", [1, 2, number % 9], owner=1, max_tokens=50))
    for _ in range(50):
        step(engine)
    for number in range(32):
        engine.scheduler.add(request(f"back-{number}", [3, number % 9], owner=2, max_tokens=50))
    served = engine.scheduler.table.owners[1].served
    for _ in range(20):
        step(engine)
    assert engine.scheduler.table.owners[1].served > served + 20 * 8


@pytest.mark.parametrize("who", [2, 3])
def test_little_use_is_no_credit(who: int) -> None:
    """Neither for the one that has had little to do, number 3, nor for a newcomer beside it, number 2."""
    engine = Engine(ROOMY)
    engine.scheduler.add(request("light", [9], owner=3, max_tokens=240))
    for number in range(1500):
        engine.scheduler.add(request(f"busy-{number}", [number % 9, 2], owner=1, max_tokens=4))
    for _ in range(100):
        step(engine)
    for number in range(700):
        engine.scheduler.add(request(f"heavy-{number}", [number % 9, 3], owner=who, max_tokens=4))
    before = [tokens_of(engine, name) for name in ("busy", "heavy")]
    for _ in range(60):
        step(engine)
    busy, heavy = (tokens_of(engine, name) - past for name, past in zip(("busy", "heavy"), before, strict=True))
    assert busy == pytest.approx(heavy, rel=0.2)


def test_two_long_prompts_share_the_steps() -> None:
    engine = Engine(ROOMY)
    for owner in (1, 2):
        engine.scheduler.add(request(f"long-{owner}", [owner] * 240, owner=owner, max_tokens=1))
    for _ in range(5):
        step(engine)
    first, second = (engine.scheduler.table.running[f"long-{number}"].computed for number in (1, 2))
    assert abs(first - second) <= 32


def tokens_of(engine: Engine, name: str) -> int:
    """Tokens of all answers whose requests' names begin like this."""
    return sum(len(engine.tokens(id)) for id in engine.outputs if id.startswith(name))


def test_rows_take_turns_within_the_limit_of_a_step() -> None:
    engine = busy({}, 32)
    before = [len(engine.tokens(f"big1-{number}")) for number in range(32)]
    engine.step_limits = StepLimits(busy_tokens=20)
    assert [step(engine) for _ in range(16)] == [20] * 16
    assert [len(engine.tokens(f"big1-{number}")) - before[number] for number in range(32)] == [10] * 32
    engine.scheduler.add(request("other", [9], owner=2, max_tokens=20))
    tokens_until_first(engine, "other")
    # Half of them, so that prompts of either have the other half.
    assert [step(engine) for _ in range(8)] == [10] * 8


def test_only_the_prompts_of_newcomers_have_longer_steps() -> None:
    engine = busy({"max_num_batched_tokens": 256}, 40, prompt=120)
    engine.step_limits = StepLimits(step_tokens=60, busy_tokens=20)
    assert [step(engine) for _ in range(3)] == [20] * 3
    assert engine.newcomer_tokens == 0
    engine.scheduler.add(request("small", [9] * 100, owner=2, max_tokens=4))
    assert step(engine) == 60 and engine.newcomer_tokens == 100
    assert tokens_until_first(engine, "small") <= 60 and engine.newcomer_tokens == 0
    engine.scheduler.add(request("large", [8] * 200, owner=3, max_tokens=4))
    # It is new for a quarter of 256 tokens: then it is as busy as the others.
    assert [step(engine) for _ in range(2)] == [60, 60] and max(step(engine) for _ in range(10)) <= 20
    drain(engine)
    engine.scheduler.add(request("alone", [7] * 50, owner=2, max_tokens=1))
    assert step(engine) == 50 and engine.newcomer_tokens == 0, "nobody else had work"


def test_a_newcomer_s_tokens_are_those_that_no_cache_has() -> None:
    engine = busy({}, 10)
    for id in ("first", "again"):
        engine.scheduler.add(request(id, [9] * 22, owner=2, max_tokens=1))
        assert step(engine)
        assert engine.newcomer_tokens == {"first": 22, "again": 2}[id]
        tokens_until_first(engine, id)


def test_each_owner_has_its_own_queue_limit() -> None:
    engine = busy({"max_num_seqs": 4, "max_num_queued": 6}, 10)
    with refuses(QueueFullError, "queue-full"):
        engine.scheduler.add(request("more", [1], owner=1))
    for number in range(6):
        engine.scheduler.add(request(f"own-{number}", [1], owner=2))
    with refuses(QueueFullError, "queue-full"):
        engine.scheduler.add(request("own-6", [1], owner=2))
    engine.run()


def test_two_large_requests_do_not_take_turns_without_end() -> None:
    engine = Engine(ROOMY | {"max_num_seqs": 1, "max_num_batched_tokens": 1, "prefix_caching": False})
    for owner in (1, 2, 3):
        engine.scheduler.add(request(f"of-{owner}", [owner] * 20, owner=owner, max_tokens=5))
    engine.run()
    assert engine.scheduler.stats().preemptions == 0


# Throughput


def drain(engine: Engine) -> int:
    """Number of steps until all requests have ended."""
    steps = 0
    while engine.scheduler.table.unfinished:
        step(engine)
        steps += 1
    assert engine.scheduler.stats().blocks_used == 0
    return steps


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((120, 8, 40), (120, 8, 40), id="equal"),
        pytest.param((120, 8, 40), (3, 8, 400), id="three-long-answers"),
        pytest.param((150, 4, 8), (60, 60, 40), id="short-beside-long"),
        pytest.param((100, 30, 60), (300, 3, 1), id="one-token-answers"),
        pytest.param((30, 150, 60), (30, 150, 60), id="full-cache"),
    ],
)
def test_two_owners_share_steps(first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
    """All requests of both are there from the start, so that both always wait: as many steps as in order of arrival."""
    limits = {"num_blocks": 700, "max_num_seqs": 32, "max_num_batched_tokens": 128, "max_model_len": 512}
    steps = []
    for policy in ("fair", "fcfs"):
        engine = Engine(ROOMY | limits | {"policy": policy})
        for owner, (count, prompt, answer) in ((1, first), (2, second)):
            for number in range(count):
                body = [owner, number % 7, number // 7] + [number % 11] * (prompt - 3)
                engine.scheduler.add(request(f"{owner}-{number}", body[:prompt], owner=owner, max_tokens=answer))
        steps.append(drain(engine))
    assert steps[0] <= steps[1] / 0.9


def test_requests_for_which_there_is_no_room_do_not_empty_the_steps() -> None:
    """The less served owner waits for blocks: its one running row is no reason to compute nothing else."""
    limits = {"num_blocks": 2000, "max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": 3000}
    engine = busy(limits, 300, 4)
    for number in range(10):
        engine.scheduler.add(request(f"long-{number}", [number] * 2400, owner=2, max_tokens=300))
    for _ in range(40):
        step(engine)
    assert engine.scheduler.stats().waiting and "long-0" in engine.scheduler.table.running
    rows = len(engine.scheduler.table.running)
    assert sum(step(engine) for _ in range(50)) >= 0.9 * 50 * rows


# Blocks


def test_small_requests_pass_one_for_which_there_is_no_room() -> None:
    engine = busy({"num_blocks": 128, "max_num_seqs": 16, "max_model_len": 500}, 30, prompt=40)
    engine.scheduler.add(request("large", [8] * 400, owner=2, max_tokens=4))
    for _ in range(3):
        step(engine)
    for owner in (3, 4):
        engine.scheduler.add(request(f"small-{owner}", [owner] * 20, owner=owner, max_tokens=8))
    assert tokens_until_first(engine, "small-3") <= 2 * 32
    assert tokens_until_first(engine, "small-4") <= 2 * 32
    for number in range(200):  # and however many there are of these, its turn comes
        engine.scheduler.add(request(f"more-{number}", [number % 9] * 20, owner=3 + number % 2, max_tokens=8))
    while not engine.tokens("large"):
        step(engine)
    assert engine.scheduler.stats().waiting > 50


def test_the_owner_that_outgrows_its_share_gives_up_its_blocks() -> None:
    engine = busy({"num_blocks": 64, "max_num_seqs": 8, "max_model_len": 200}, 8, prompt=16)
    engine.scheduler.add(request("small", [9] * 40, owner=2, max_tokens=40))
    tokens_until_first(engine, "small")
    preemptions = engine.scheduler.stats().preemptions
    while not any(output.finish_reason for output in engine.outputs["small"]):
        assert "small" in engine.scheduler.table.running
        step(engine)
    assert engine.scheduler.stats().preemptions > preemptions, "or there was no want of blocks"
    engine.run()


def test_blocks_that_are_only_promised_are_given_up_too() -> None:
    """Eight prompts, of which little is computed yet, are promised nearly all blocks."""
    engine = Engine(ROOMY | {"num_blocks": 256, "max_num_seqs": 9, "max_num_batched_tokens": 115, "max_model_len": 240})
    for number in range(10):
        engine.scheduler.add(request(f"large-{number}", [number, *[5] * 116], owner=1, max_tokens=20))
    engine.step_limits = StepLimits(step_tokens=2)
    for _ in range(17):
        step(engine)
    assert engine.scheduler.stats().blocks_used < 128
    engine.scheduler.add(request("small", [9] * 60, owner=2, max_tokens=4))
    assert tokens_until_first(engine, "small") <= 2 * 60 + 2


def test_a_request_goes_on_if_the_one_before_it_has_to_give_up_its_blocks() -> None:
    """With two stages a step takes one of two requests. After a command both await their turn, and none is in flight:
    if the first one gets no block, and is preempted, nobody but the second one keeps the engine going."""
    engine = Engine(ROOMY | {"num_blocks": 5, "stages": 2, "prefix_caching": False})
    for owner, length in ((1, 8), (2, 4)):
        engine.scheduler.add(request(f"of-{owner}", [owner] * length, owner=owner, max_tokens=10))
    while engine.scheduler.table.unfinished:
        while len(engine.flight) < 2 and engine.schedule():
            pass
        assert engine.flight, "unfinished requests, and nothing to run"
        while engine.flight:
            engine.apply()
    assert [len(engine.tokens(f"of-{owner}")) for owner in (1, 2)] == [10, 10]
    assert engine.scheduler.stats().preemptions


# Any owners and requests


@st.composite
def loads(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[int, Request]]]:
    """Limits of a scheduler, and requests with the numbers of the steps before which they come."""
    slots = draw(st.integers(2, 8))
    blocks = draw(st.integers(24, 80))
    limits = LIMITS | {
        "num_blocks": blocks,
        "max_num_seqs": slots,
        "max_num_batched_tokens": draw(st.sampled_from([slots, 16, 64])),
        "max_num_queued": 1000,
        "max_model_len": 4 * blocks,
        "stages": draw(st.integers(1, 2)),
        "lookahead": draw(st.booleans()),
        "prefix_caching": draw(st.booleans()),
    }
    came: list[tuple[int, Request]] = []
    for owner in range(1, draw(st.integers(2, 4)) + 1):
        weight = draw(st.sampled_from([0.5, 1.0, 1.0, 4.0]))
        longest = draw(st.sampled_from([6, 30, 3 * blocks]))
        for number in range(draw(st.sampled_from([1, 3, 25]))):
            prompt = [owner, number] * draw(st.integers(1, longest // 2))
            answer = draw(st.integers(1, 20))
            body = request(f"{owner}-{number}", prompt, owner=owner, weight=weight, max_tokens=answer)
            came.append((draw(st.integers(0, 60)), body))
    return limits, sorted(came, key=lambda each: each[0])


def play(limits: dict[str, Any], came: list[tuple[int, Request]]) -> int:
    """Number of steps until all requests have ended."""
    engine, left, turns = Engine(limits), deque(came), 0
    lead = limits["stages"] + limits["lookahead"]
    while left or engine.scheduler.table.unfinished:
        while left and (left[0][0] <= turns or not engine.scheduler.table.unfinished):
            engine.scheduler.add(left.popleft()[1])
        while len(engine.flight) < lead and schedule_in_turn(engine):
            pass
        assert engine.flight, "unfinished requests, and nothing to run"
        engine.apply()
        turns += 1
    assert engine.scheduler.stats().blocks_used == 0
    return turns


def schedule_in_turn(engine: Engine) -> bool:
    """Schedule a step. It admits no request of an owner that was served more than one that still waits will have been
    after its next request: so that one's turn comes once the running requests have ended."""
    scheduler = engine.scheduler
    if engine.limits["policy"] != "fair":
        return engine.schedule() is not None
    owners, running = dict(scheduler.table.owners), set(scheduler.table.running)
    served = {number: owner.served for number, owner in owners.items()}
    heads = {number: owner.queue.first() for number, owner in owners.items()}
    plan = engine.schedule()
    admitted = {scheduler.table.unfinished[id].request.owner for id in scheduler.table.running.keys() - running}
    for number, head in heads.items():
        if head is not None and head is owners[number].queue.first():
            most = served[number] + len(head.tokens or head.request.prompt) / owners[number].weight
            assert all(served[other] <= most for other in admitted - {number})
    return plan is not None


@settings(max_examples=30, deadline=None)
@given(load=loads())
def test_nobody_starves_and_steps_stay_full(load: tuple[dict[str, Any], list[tuple[int, Request]]]) -> None:
    """All requests end, and blocks are conserved with every step: Engine checks that."""
    limits, came = load
    assert play(limits | {"policy": "fair"}, came) <= 1.2 * play(limits | {"policy": "fcfs"}, came) + 10


@settings(max_examples=30, deadline=None)
@given(
    slots=st.integers(2, 32),
    budget=st.integers(32, 256),
    heavy=st.tuples(st.integers(10, 60), st.integers(2, 120), st.integers(20, 100)),
    length=st.integers(1, 200),
    warm=st.integers(1, 40),
    limit=st.integers(1, 32),
)
def test_a_newcomer_s_first_token_comes_within_twice_its_time_alone(
    slots: int, budget: int, heavy: tuple[int, int, int], length: int, warm: int, limit: int
) -> None:
    limits = ROOMY | {"max_num_seqs": slots, "max_num_batched_tokens": budget, "num_blocks": 256, "max_model_len": 240}
    small = request("small", [9] * length, owner=2, max_tokens=4)
    alone, engine = Engine(limits), Engine(limits)
    alone.scheduler.add(small)
    count, prompt, answer = heavy
    for number in range(count):
        body = [number % 7, number // 7, *([5] * prompt)]
        engine.scheduler.add(request(f"big-{number}", body, owner=1, max_tokens=answer))
    alone.step_limits = engine.step_limits = StepLimits(step_tokens=2 * limit)
    for _ in range(warm):
        assume(len(engine.scheduler.table.unfinished) > 1)
        step(engine)
    assume(len(engine.scheduler.table.unfinished) > 1)
    engine.scheduler.add(small)
    most = min(budget, 2 * limit)
    more = most if length + slots > most else 0  # if it does not fit into a step: they take turns
    assert tokens_until_first(engine, "small") <= 2 * tokens_until_first(alone, "small") + more


def test_a_preempted_request_that_its_step_in_flight_ends_does_not_wait() -> None:
    engine = Engine(LIMITS | {"policy": "fair"})
    for id in "ab":
        engine.scheduler.add(request(id, [1] * 9, max_tokens=1, owner=1))
    engine.schedule()
    for sequence in list(engine.scheduler.table.running.values()):
        engine.scheduler._preempt(sequence)
    engine.apply()
    scheduler = engine.scheduler
    assert len(scheduler.table.owners[1].queue) == scheduler.table.owners[1].unfinished == scheduler.table.waiting == 0
