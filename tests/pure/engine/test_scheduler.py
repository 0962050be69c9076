"""Scheduler: who takes part in a step, who waits, who goes, and how a request ends."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from tests.pure.ranks import expected
from tests.pure.scheduling import LIMITS, Engine, request
from tests.refusals import refuses
from weft.engine.core.step import UNKNOWN, SlotFailure, StepPlan
from weft.errors import QueueFullError, RequestError
from weft.plan.plan import Speculation

# Batches


def test_decodes_come_first_then_chunks_of_prompts() -> None:
    engine = Engine(LIMITS | {"max_num_batched_tokens": 8})
    engine.scheduler.add(request("a", [1, 2], max_tokens=9))
    engine.schedule()
    engine.apply()
    engine.scheduler.add(request("b", [3] * 18, max_tokens=9))
    engine.scheduler.add(request("c", [4] * 3, max_tokens=9))
    shapes = []
    for _ in range(4):
        plan = engine.schedule()
        assert plan
        shapes.append((plan.counts, plan.samples))
        engine.apply()
    assert shapes == [
        ([1, 7], [True, False]),
        ([1, 7], [True, False]),
        ([1, 4, 3], [True, True, True]),
        ([1, 1, 1], [True, True, True]),
    ]


def test_a_small_budget_goes_round() -> None:
    """Four run, a step has two tokens: nobody is ever two tokens ahead."""
    engine = Engine(LIMITS | {"max_num_batched_tokens": 4})
    for id in "abcd":
        engine.scheduler.add(request(id, [7], max_tokens=20))
    engine.schedule()
    engine.apply()
    msgspec.structs.force_setattr(engine.scheduler.settings, "max_num_batched_tokens", 2)
    for _ in range(20):
        engine.schedule()
        engine.apply()
        lengths = [len(engine.tokens(id)) for id in "abcd"]
        assert max(lengths) - min(lengths) <= 1


def test_a_prompt_is_not_starved_by_answers() -> None:
    engine = Engine(LIMITS | {"max_num_batched_tokens": 3})
    for id, prompt in {"a": [1], "b": [2], "c": [3] * 20}.items():
        engine.scheduler.add(request(id, prompt, max_tokens=60))
    while not engine.outputs.get("c"):
        engine.schedule()
        engine.apply()
    assert len(engine.tokens("a")) <= 21


def test_each_stage_has_its_micro_batch() -> None:
    engine = Engine(LIMITS | {"stages": 3})
    for i in range(8):
        engine.scheduler.add(request(f"r{i}", [i], max_tokens=30))
    for _ in range(3):
        engine.schedule()
    assert [len(plan.slots) for plan in engine.flight] == [3, 3, 2]
    # And goes on so, also after some have left.
    engine.scheduler.abort(["r0", "r1"])
    for _ in range(12):
        engine.apply()
        engine.schedule()
    assert [len(plan.slots) for plan in engine.flight] == [2, 2, 2]
    # A single long prompt keeps all stages busy: chunks need no results.
    alone = Engine(LIMITS | {"stages": 2, "max_num_batched_tokens": 8})
    alone.scheduler.add(request("a", [1] * 20, max_tokens=2))
    assert alone.schedule() and alone.schedule()
    assert [plan.starts for plan in alone.flight] == [[0], [8]]
    alone.run(depth=2)


def test_nothing_to_run_is_no_step() -> None:
    engine = Engine(LIMITS)
    assert engine.schedule() is None
    engine.scheduler.add(request("a", [1, 2], max_tokens=2))
    assert engine.schedule()
    # Its next token is not known yet.
    assert engine.schedule() is None


# Ends


def test_end_tokens() -> None:
    prompt = [1, 2, 3]
    answer, _ = expected(request("x", prompt, max_tokens=12), 64)
    end = answer[2]
    at = answer.index(end)
    engine = Engine(LIMITS)
    engine.run(request("model", prompt, max_tokens=12, stop_ids=(end,)))
    last = engine.outputs["model"][-1]
    assert engine.tokens("model") == answer[: at + 1] and (last.finish_reason, last.stop_reason) == ("stop", None)
    engine.run(request("own", prompt, max_tokens=12, stop_ids=(end,), stop_token_ids=[end]))
    assert engine.outputs["own"][-1].stop_reason == end
    # As many as min_tokens come before an end token is one.
    engine.run(request("min", prompt, max_tokens=12, min_tokens=at + 1, stop_ids=(end,)))
    assert len(engine.tokens("min")) > at + 1


def test_a_lone_request_ends_where_the_cache_does() -> None:
    engine = Engine(LIMITS | {"num_blocks": 3})
    engine.run(request("a", [1] * 5, max_tokens=None))
    assert len(engine.tokens("a")) == 7 and engine.outputs["a"][-1].finish_reason == "length"


def test_an_aborted_request_has_no_more_outputs() -> None:
    engine = Engine(LIMITS | {"max_num_seqs": 2})
    for id in "abc":
        engine.scheduler.add(request(id, [1, 2, 3, 4, 5], max_tokens=5))
    engine.schedule()
    engine.scheduler.abort(["a", "c"])
    assert list(engine.scheduler.table.unfinished) == ["b"] and engine.scheduler.table.waiting == 0
    assert [output.id for output in engine.apply()] == ["b"]
    # The slot is released with the next step, before another takes it.
    engine.scheduler.add(request("d", [1, 2, 3, 4, 5], max_tokens=5))
    plan = engine.schedule()
    assert plan and plan.released == [plan.admitted[0].slot]
    engine.run()
    assert engine.tokens("d") == engine.tokens("b") and "a" not in engine.outputs


def test_aborted_ones_do_not_pile_up() -> None:
    engine = Engine(LIMITS | {"max_num_seqs": 1, "policy": "priority"})
    engine.scheduler.add(request("a", [1], max_tokens=50))
    engine.schedule()
    for i in range(1000):
        engine.scheduler.add(request(f"r{i}", [1], priority=9))
        engine.scheduler.abort([f"r{i}"])
    assert not any(len(owner.queue) for owner in engine.scheduler.table.owners.values())


# Who waits, who goes


def test_the_queue_is_bounded() -> None:
    engine = Engine(LIMITS | {"max_num_seqs": 2, "max_num_queued": 3})
    for i in range(5):
        engine.scheduler.add(request(f"r{i}", [i]))
    with refuses(QueueFullError, "queue-full"):
        engine.scheduler.add(request("more", [1]))
    engine.schedule()
    with refuses(QueueFullError, "queue-full") as refused:
        engine.scheduler.add(request("more", [1]))
    assert "3" in str(refused.value) and "--max-num-queued-reqs" in str(refused.value)
    engine.scheduler.abort(["r4"])
    engine.scheduler.add(request("more", [1]))
    assert engine.scheduler.table.waiting == 3


@pytest.mark.parametrize(
    ("prompt", "change", "code", "values"),
    [
        ([], {}, "empty-prompt", []),
        ([1] * 64, {}, "prompt-too-long", [64, 63]),
        ([1] * 40, {"num_blocks": 10}, "prompt-exceeds-cache", [40, 11, 10]),
    ],
)
def test_a_request_that_can_never_run_is_refused(
    prompt: list[int], change: dict[str, Any], code: str, values: list[int]
) -> None:
    engine = Engine(LIMITS | change)
    with refuses(RequestError, code) as refused:
        engine.scheduler.add(request("a", prompt))
    assert refused.value.param == "prompt"
    assert all(f" {value}" in str(refused.value) for value in values)
    assert not engine.scheduler.table.unfinished


def test_ids_differ() -> None:
    engine = Engine(LIMITS)
    engine.scheduler.add(request("a", [1]))
    with refuses(RequestError, "duplicate-request-id") as refused:
        engine.scheduler.add(request("a", [2]))
    assert "'a'" in str(refused.value)


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "bdac")])
def test_order_of_admission(policy: str, order: str) -> None:
    engine = Engine(LIMITS | {"max_num_seqs": 1, "policy": policy})
    priorities = {"a": 5, "b": -1, "c": 5, "d": 0}
    engine.run(*(request(id, [1], priority=p, max_tokens=2) for id, p in priorities.items()))
    assert "".join(engine.outputs) == order


def test_order_holds_when_others_leave_the_queue() -> None:
    engine = Engine(LIMITS | {"max_num_seqs": 1, "policy": "priority"})
    random = Random(0)
    priorities = {f"r{i}": random.randint(0, 50) for i in range(60)}
    for id, priority in priorities.items():
        engine.scheduler.add(request(id, [1], priority=priority, max_tokens=1))
    gone = random.sample(sorted(priorities), 40)
    engine.scheduler.abort(gone)
    engine.run()
    stayed = [id for id in priorities if id not in gone]
    assert list(engine.outputs) == sorted(stayed, key=lambda id: priorities[id])


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "cabd"), ("priority", "cbad")])
def test_a_request_that_is_not_prepared_keeps_its_place_and_holds_nobody_up(policy: str, order: str) -> None:
    engine = Engine(LIMITS | {"max_num_seqs": 1, "policy": policy})
    scheduler = engine.scheduler
    priorities = {"a": 5, "b": 0, "c": 7, "d": 9}
    for id, priority in priorities.items():
        scheduler.add(request(id, [1], priority=priority, max_tokens=2), prepared=id not in "ab")
    assert (scheduler.table.waiting, scheduler.stats().waiting, scheduler.active) == (4, 4, 1)
    engine.schedule()
    assert list(scheduler.table.running) == ["c"]
    # Before d, which was there when they were not prepared.
    for id in ("b", "a", "d", "nobody"):
        scheduler.mark_prepared(id)
    engine.run()
    assert "".join(engine.outputs) == order


def test_what_is_not_prepared_counts_in_the_queue_and_can_be_aborted() -> None:
    engine = Engine(LIMITS | {"max_num_seqs": 1, "max_num_queued": 1})
    for id in "ab":
        engine.scheduler.add(request(id, [1]), prepared=False)
    with refuses(QueueFullError, "queue-full"):
        engine.scheduler.add(request("c", [1]))
    assert engine.schedule() is None
    engine.scheduler.abort(["a"])
    engine.scheduler.mark_prepared("a")
    engine.scheduler.add(request("c", [1], max_tokens=1))
    engine.run()
    assert engine.outputs.keys() == {"c"} and engine.scheduler.table.waiting == 1


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "b"), ("priority", "a")])
def test_the_order_of_preemption(policy: str, victim: str) -> None:
    """Two need a fourth block each, and there are seven."""
    engine = Engine(LIMITS | {"num_blocks": 7, "policy": policy, "prefix_caching": False})
    requests = [request("a", [1] * 11, priority=1, max_tokens=4), request("b", [2] * 11, priority=0, max_tokens=4)]
    for item in requests:
        engine.scheduler.add(item)
    while not engine.scheduler.stats().preemptions:
        engine.schedule()
        engine.apply()
    assert engine.scheduler.table.waiting == 1
    survivor = "b" if victim == "a" else "a"
    assert list(engine.scheduler.table.running) == [survivor]
    engine.run()
    for item in requests:
        assert engine.tokens(item.id) == expected(item, 64)[0]
    # Once is enough: it comes back when there is room for it.
    assert engine.scheduler.stats().preemptions == 1


def test_after_preemption_a_request_brings_its_answer_along() -> None:
    engine = Engine(LIMITS | {"num_blocks": 7, "prefix_caching": False})
    a, b = request("a", [1] * 11, max_tokens=4), request("b", [2] * 11, max_tokens=4)
    engine.run(a, b)
    admissions = [
        admission for plan in engine.plans for admission in msgspec.msgpack.decode(plan, type=StepPlan).admitted
    ]
    again = admissions[2]
    assert again.prompt == b.prompt and again.output == engine.tokens("b")[: len(again.output)] != []


def test_a_token_on_its_way_survives_preemption() -> None:
    """a takes b's blocks while a step brings b's token: it is kept, and b waits for it before it comes back."""
    engine = Engine(LIMITS | {"num_blocks": 6, "prefix_caching": False, "stages": 2})
    a, b = request("a", [1] * 13, max_tokens=6), request("b", [2] * 4, max_tokens=9)
    engine.scheduler.add(a)
    engine.scheduler.add(b)
    assert engine.schedule() and engine.schedule()
    while not engine.scheduler.stats().preemptions:
        engine.apply()
        engine.schedule()
    before = len(engine.tokens("b"))
    assert list(engine.scheduler.table.running) == ["a"] and len(engine.flight) == 2
    assert [output.id for output in engine.apply()] == ["b"]
    assert len(engine.tokens("b")) == before + 1
    engine.run(depth=2)
    assert engine.tokens("b") == expected(b, 64)[0]


def test_a_token_on_its_way_may_be_the_last() -> None:
    """The same situation, and that token ends b while b waits to come back."""
    engine = Engine(LIMITS | {"num_blocks": 6, "prefix_caching": False, "stages": 2})
    engine.scheduler.add(request("a", [1] * 13, max_tokens=6))
    engine.scheduler.add(request("b", [2] * 4, max_tokens=4))
    assert engine.schedule() and engine.schedule()
    while not engine.scheduler.stats().preemptions:
        engine.apply()
        engine.schedule()
    (last,) = engine.apply()
    assert (last.id, last.finish_reason) == ("b", "length")
    assert list(engine.scheduler.table.unfinished) == ["a"] and engine.scheduler.table.waiting == 0
    engine.run()
    assert len(engine.tokens("b")) == 4


def test_newcomers_leave_room_for_those_who_run() -> None:
    """c would fit now, and would cost a or b their blocks a few tokens later."""
    engine = Engine(LIMITS | {"num_blocks": 8})
    for id, prompt in {"a": [1] * 11, "b": [2] * 11, "c": [3] * 3}.items():
        engine.scheduler.add(request(id, prompt, max_tokens=6))
    plan = engine.schedule()
    assert plan and len(plan.slots) == 2 and engine.scheduler.kv.pool.free == 2
    engine.run()
    assert engine.scheduler.stats().preemptions == 0


def test_blocks_that_a_prompt_still_needs_are_not_given_away() -> None:
    """In a step without b, which has two chunks in flight and one to come, c would fit at b's cost."""
    engine = Engine(LIMITS | {"num_blocks": 10, "max_num_batched_tokens": 8, "stages": 2})
    engine.scheduler.add(request("a", [1], max_tokens=4))
    engine.scheduler.add(request("b", [2] * 24, max_tokens=2))
    assert engine.schedule() and engine.schedule()
    engine.apply()
    engine.scheduler.add(request("c", [3] * 12, max_tokens=2))
    plans = [engine.schedule(), engine.schedule()]
    assert [plan and (plan.starts, plan.admitted) for plan in plans] == [([8], []), ([1], [])]
    assert engine.scheduler.kv.pool.free == 5
    engine.run(depth=2)
    assert engine.scheduler.stats().preemptions == 0


def test_blocks_that_are_computed_again_can_be_found_again() -> None:
    """b is preempted and a uses up its blocks; once b is through, its beginning is in the cache anew."""
    engine = Engine(LIMITS | {"num_blocks": 7})
    engine.run(request("a", [1] * 11, max_tokens=17), request("b", [2] * 11, max_tokens=4))
    assert engine.scheduler.stats().preemptions == 1 and engine.outputs["b"][-1].cached_tokens == 0
    engine.run(request("c", [2] * 11, max_tokens=1))
    assert engine.outputs["c"][-1].cached_tokens == 8


# One step ahead


def test_a_step_is_ready_before_the_token_that_it_needs() -> None:
    engine = Engine(LIMITS | {"lookahead": True})
    item = request("a", [1, 2, 3], max_tokens=4)
    engine.scheduler.add(item)
    assert engine.schedule() is not None
    ahead = engine.schedule()
    assert ahead is not None and ahead.tokens == [UNKNOWN] and ahead.starts == [3]
    assert engine.schedule() is None, "a second token on its way"
    engine.run(depth=2)
    assert engine.tokens("a") == expected(item, 64)[0]
    assert engine.ranks.computed == 3 + 3, "nothing is computed beyond a length that is known"


def test_the_step_after_an_end_that_nobody_foresaw_is_dropped() -> None:
    free = request("a", [1, 2, 3], max_tokens=9)
    stop = expected(free, 64)[0][2]
    item = request("a", [1, 2, 3], max_tokens=9, stop_ids=(stop,))
    engine = Engine(LIMITS | {"lookahead": True})
    engine.run(item, depth=2)
    tokens = expected(item, 64)[0]
    assert engine.tokens("a") == tokens and engine.outputs["a"][-1].finish_reason == "stop"
    assert engine.ranks.computed == 3 + len(tokens), "one more than without"
    assert engine.scheduler.stats().generation_tokens == len(tokens)


def test_a_request_that_needs_its_tokens_waits_for_them() -> None:
    engine = Engine(LIMITS | {"lookahead": True})
    engine.run(request("a", [1, 2, 3], max_tokens=4, repetition_penalty=1.1), depth=2)
    assert all(UNKNOWN not in msgspec.msgpack.decode(plan, type=StepPlan).tokens for plan in engine.plans)


def test_a_block_is_found_only_once_its_tokens_are_known() -> None:
    engine = Engine(LIMITS | {"lookahead": True, "num_blocks": 32})
    first = request("a", [1, 2, 3], max_tokens=14)
    engine.run(first, depth=2)
    answer = engine.tokens("a")
    again = request("b", [1, 2, 3, *answer], max_tokens=1)
    engine.run(again, depth=2)
    # The last token of an answer is never computed, and a block counts when it is full.
    assert engine.outputs["b"][0].cached_tokens == (3 + 14 - 1) // 4 * 4


@pytest.mark.parametrize("more", [{}, {"lookahead": True}, {"speculation": Speculation(tokens=3)}], ids=str)
def test_a_slot_that_failed_ends_its_request_and_no_other(more: dict[str, Any]) -> None:
    engine = Engine(LIMITS | more)
    for id, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        engine.scheduler.add(request(id, prompt, max_tokens=5, ignore_eos=True))
    plan = engine.schedule()
    assert plan and len(plan.slots) == 2
    if "lookahead" in more:
        engine.schedule()
    result = engine.ranks.execute(engine.flight.popleft())
    failure = SlotFailure("nan-logits", "rank 0: NaN")
    result.failed = {plan.slots[1]: failure}
    first, second = engine.scheduler.apply(result)
    assert (first.id, first.tokens, first.finish_reason, first.error) == ("b", [], "error", failure)
    assert second.id == "a" and second.tokens and second.error is None
    engine.outputs["a"] = [second]
    engine.run()
    assert len(engine.tokens("a")) == 5 and "b" not in engine.outputs
