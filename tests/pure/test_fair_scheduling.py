"""The policy "fair": in steps and tokens, how long one owner waits for another."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.scheduling import LIMITS, Engine, request
from tests.refusals import refuses
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


def test_a_newcomer_does_not_wait_for_a_slot_and_its_answer_goes_on() -> None:
    engine = busy({}, 200)
    assert len(engine.scheduler.running) == 32
    engine.scheduler.add(request("small", [9] * 4, owner=2, max_tokens=20))
    for _ in range(22):
        step(engine)
    assert len(engine.tokens("small")) == 20
    assert engine.scheduler.stats().preemptions == 1


def test_blocks_are_given_up_too() -> None:
    engine = busy({"num_blocks": 64, "max_model_len": 120}, 30, prompt=40)
    assert engine.scheduler.stats().waiting and engine.scheduler._slots
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
    engine.scheduler.row_limit = 16
    owners = engine.scheduler._queue.owners  # type: ignore[attr-defined]
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
    served = engine.scheduler._queue.owners[1].served  # type: ignore[attr-defined]
    for _ in range(20):
        step(engine)
    assert engine.scheduler._queue.owners[1].served > served + 20 * 8  # type: ignore[attr-defined]


def test_rows_take_turns_within_the_limit_of_a_step() -> None:
    engine = busy({}, 32)
    before = [len(engine.tokens(f"big1-{number}")) for number in range(32)]
    engine.scheduler.row_limit = 10
    assert [step(engine) for _ in range(16)] == [10] * 16
    assert [len(engine.tokens(f"big1-{number}")) - before[number] for number in range(32)] == [5] * 32


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
