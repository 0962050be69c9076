"""Scheduler: whatever happens, every request gets its tokens and every block is where it should be."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks import VOCAB, Ranks, expected, logprob
from shapes import SMOLLM2
from weft.core.params import SamplingParams
from weft.core.request import Output, Request
from weft.core.scheduler import Scheduler
from weft.core.speculation import Guesser
from weft.core.step import UNKNOWN, StepPlan
from weft.errors import QueueFullError, RequestError
from weft.planner.plan import Draft, Speculation

LIMITS: dict[str, Any] = {
    "num_blocks": 64,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_num_queued": 100,
    "max_model_len": 64,
    "stages": 1,
    "policy": "fcfs",
    "prefix_caching": True,
    "lookahead": False,
    "speculation": None,
}
DRAFT = Draft(checkpoint="", load_format="dummy", shape=SMOLLM2)
AHEAD: list[dict[str, Any]] = [
    {},
    {"lookahead": True},
    {"speculation": Speculation(tokens=3, lookup_min=1, lookup_max=2)},
    {"speculation": Speculation(tokens=4, draft=DRAFT)},
]


def request(id: str, prompt: list[int], *, priority: int = 0, stop_ids: tuple[int, ...] = (), **params: Any) -> Request:
    return Request(id=id, prompt=prompt, params=SamplingParams(**params), stop_ids=stop_ids, priority=priority)


@dataclass
class Engine:
    """A scheduler and obedient ranks, driven by hand: steps wait in `flight` until `apply` executes one."""

    limits: dict[str, Any]
    scheduler: Scheduler = field(init=False)
    ranks: Ranks = field(init=False)
    flight: deque[StepPlan] = field(default_factory=deque)
    plans: list[bytes] = field(default_factory=list)
    outputs: dict[str, list[Output]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(**self.limits)
        names = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")
        self.ranks = Ranks(**{name: self.limits[name] for name in names})

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan:
            self.flight.append(plan)
            self.plans.append(msgspec.msgpack.encode(plan))
        self.check_blocks()
        return plan

    def apply(self) -> list[Output]:
        outputs = self.scheduler.apply(self.ranks.execute(self.flight.popleft()))
        for output in outputs:
            self.outputs.setdefault(output.id, []).append(output)
        self.check_blocks()
        return outputs

    def run(self, *requests: Request, depth: int = 1) -> None:
        """Everything to its end. Each turn brings something nearer it, or there is a deadlock."""
        for item in requests:
            self.scheduler.add(item)
        turns = 0
        while self.scheduler.has_unfinished or self.flight:
            while len(self.flight) < depth and self.schedule():
                pass
            assert self.flight, "unfinished requests, and nothing to run"
            self.apply()
            turns += 1
            assert turns < 20000, "no end in sight"

    def tokens(self, id: str) -> list[int]:
        return [token for output in self.outputs.get(id, ()) for token in output.tokens]

    def check_blocks(self) -> None:
        """Each reference belongs to a running request's table, and what is not referenced is free."""
        pool = self.scheduler.pool
        running = self.scheduler._running.values()
        held = Counter(block for sequence in running for block in sequence.blocks)
        assert pool.references == [held[block] for block in range(pool.num_blocks)]
        assert pool.free == pool.num_blocks - len(held)
        assert self.scheduler._promised == sum(sequence.promised for sequence in running) >= 0
        stats = self.scheduler.stats()
        assert stats.blocks_used == len(held) and stats.running == len(running) <= self.scheduler.max_num_seqs


# Anything at all


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "num_blocks": draw(st.integers(2, 14)),
        "block_size": draw(st.integers(1, 4)),
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.integers(1, 12)),
        "max_num_queued": 1000,
        "max_model_len": draw(st.integers(6, 40)),
        "stages": draw(st.integers(1, 3)),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "prefix_caching": draw(st.booleans()),
        **draw(st.sampled_from(AHEAD)),
    }


@st.composite
def asked(draw: st.DrawFn, id: str) -> Request:
    """Prompts of few kinds, so that they share beginnings."""
    prompt = [draw(st.integers(0, 1))] * draw(st.integers(1, 10)) + [2] * draw(st.integers(0, 10))
    most = draw(st.none() | st.integers(1, 12))
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
    )


OPERATIONS = st.lists(st.sampled_from(["add", "add", "schedule", "schedule", "apply", "apply", "abort"]), max_size=60)


def play(limits: dict[str, Any], requests: list[Request], operations: list[str], depth: int) -> tuple[Engine, set[str]]:
    """Operations as they come, then everything to its end. Returns those that were taken in and not aborted."""
    engine = Engine(limits)
    arriving = deque(requests)
    taken: set[str] = set()
    for operation in operations:
        if operation == "add" and arriving:
            item = arriving.popleft()
            try:
                engine.scheduler.add(item)
                taken.add(item.id)
            except RequestError:
                longest = min(limits["max_model_len"], limits["num_blocks"] * limits["block_size"])
                assert len(item.prompt) >= longest
        elif operation == "schedule" and len(engine.flight) < depth:
            engine.schedule()
        elif operation == "apply" and engine.flight:
            engine.apply()
        elif operation == "abort" and (ids := engine.scheduler.unfinished):
            # Not the first always: some that run, some that wait.
            id = ids[len(engine.plans) % len(ids)]
            engine.scheduler.abort([id, "nobody"])
            engine.check_blocks()
            taken.discard(id)
    engine.run(depth=depth)
    return engine, taken


def check(engine: Engine, requests: list[Request], taken: set[str]) -> None:
    """All that must hold at the end."""
    longest = min(engine.limits["max_model_len"], engine.limits["num_blocks"] * engine.limits["block_size"])
    for item in requests:
        outputs = engine.outputs.get(item.id, [])
        if item.id not in taken:
            assert all(output.finish_reason is None for output in outputs[:-1])
            continue
        answer, reason = expected(item, longest)
        assert engine.tokens(item.id) == answer
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [reason]
        asked_for = item.params.logprobs is not None
        logprobs = [one for output in outputs for one in output.logprobs]
        assert logprobs == [logprob(t) if asked_for else None for t in answer]
        pieces = [output.prompt_logprobs for output in outputs]
        whole = None if item.params.prompt_logprobs is None else [logprob(t) for t in item.prompt[1:]]
        assert pieces == [whole] + [None] * (len(outputs) - 1)
        assert all(0 <= output.cached_tokens < len(item.prompt) for output in outputs)
    stats = engine.scheduler.stats()
    assert stats.running == stats.waiting == stats.blocks_used == 0
    assert stats.generation_tokens == sum(len(engine.tokens(id)) for id in engine.outputs)
    assert stats.prompt_tokens == sum(len(r.prompt) for r in requests if r.id in engine.outputs)
    assert stats.steps == len(engine.plans)
    # Nothing of them is left behind.
    assert all(sequence.done for _, sequence in engine.scheduler._queue)
    assert sorted(engine.scheduler._slots) == list(range(engine.limits["max_num_seqs"]))
    assert not engine.scheduler._ready


@settings(max_examples=300)
@given(data=st.data(), limits=limits(), operations=OPERATIONS, depth=st.integers(1, 4))
def test_every_request_gets_its_tokens(
    data: st.DataObject, limits: dict[str, Any], operations: list[str], depth: int
) -> None:
    requests = [data.draw(asked(f"r{i}")) for i in range(operations.count("add"))]
    engine, taken = play(limits, requests, operations, depth)
    check(engine, requests, taken)


@pytest.mark.parametrize("start", range(0, 1600, 200))
def test_every_request_gets_its_tokens_when_it_is_crowded(start: int) -> None:
    """Longer than what hypothesis draws of its own accord: many requests, few blocks, much in flight."""
    for seed in range(start, start + 200):
        random = Random(seed)
        limits = {
            "num_blocks": random.randint(2, 14),
            "block_size": random.randint(1, 4),
            "max_num_seqs": random.randint(1, 6),
            "max_num_batched_tokens": random.randint(1, 14),
            "max_num_queued": 1000,
            "max_model_len": random.randint(6, 40),
            "stages": random.randint(1, 3),
            "policy": random.choice(["fcfs", "priority"]),
            "prefix_caching": random.random() < 0.7,
            **random.choice(AHEAD),
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
            )
            for i in range(20)
        ]
        weights = [3, 3, 3, random.choice([0, 1])]
        operations = random.choices(["add", "schedule", "apply", "abort"], weights, k=200)
        engine, taken = play(limits, requests, operations, random.randint(1, 4))
        check(engine, requests, taken)


@given(data=st.data(), limits=limits(), operations=OPERATIONS, depth=st.integers(1, 3))
def test_the_same_calls_give_the_same_steps(
    data: st.DataObject, limits: dict[str, Any], operations: list[str], depth: int
) -> None:
    requests = [data.draw(asked(f"r{i}")) for i in range(operations.count("add"))]
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


# Guesses


def test_right_guesses_save_steps_and_change_nothing() -> None:
    item = request("a", [1, 2, 3], max_tokens=20)
    plain = Engine(LIMITS)
    plain.run(item)
    engine = Engine(LIMITS | {"speculation": Speculation(tokens=4, draft=DRAFT)})
    engine.run(item)
    assert engine.tokens("a") == plain.tokens("a") == expected(item, 64)[0]
    stats = engine.scheduler.stats()
    assert stats.confirmed_tokens > 0 and stats.guessed_tokens > stats.confirmed_tokens
    assert stats.steps == 20 - stats.confirmed_tokens < plain.scheduler.stats().steps
    assert stats.generation_tokens == 20
    assert any(len(output.tokens) > 1 for output in engine.outputs["a"])


def test_an_end_among_confirmed_guesses_ends_it() -> None:
    free = request("a", [1, 2, 3], max_tokens=20)
    stop = expected(free, 64)[0][4]
    item = request("a", [1, 2, 3], max_tokens=20, stop_ids=(stop,))
    engine = Engine(LIMITS | {"speculation": Speculation(tokens=4, draft=DRAFT)})
    engine.run(item)
    assert (engine.tokens("a"), engine.outputs["a"][-1].finish_reason) == expected(item, 64)


def test_who_remembers_its_tokens_is_not_guessed() -> None:
    engine = Engine(LIMITS | {"speculation": Speculation(tokens=4, draft=DRAFT)})
    engine.run(request("a", [1, 2, 3], max_tokens=9, repetition_penalty=1.1))
    assert engine.scheduler.stats().guessed_tokens == 0


def test_what_came_before_is_guessed_again() -> None:
    guesser = Guesser(Speculation(tokens=4, lookup_min=2, lookup_max=3))
    assert guesser.guesses([1, 2, 3, 4, 5, 6, 1, 2], 9) == [3, 4, 5, 6]
    assert guesser.guesses([1, 2, 3, 4, 5, 6, 1, 2, 3], 2) == [4, 5]
    assert guesser.guesses([1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 8], 4) == []
    assert Guesser(Speculation(tokens=5)).guesses([7, 8, 9, 8, 9], 5) == [8, 9, 8, 9, 8], "round in a circle"
    later = Guesser(Speculation(tokens=1))
    assert later.guesses([1, 2, 3, 1, 2, 4, 1, 2], 1) == [4], "the latest of its places"


def test_guessing_rests_where_it_does_not_pay() -> None:
    guesser = Guesser(Speculation(tokens=4))
    text = [1, 2, 3, 4, 5, 1, 2]
    asked = 0
    for _ in range(100):
        found = guesser.guesses(text, 4)
        guesser.judge(len(found), 0)
        asked += len(found)
    assert asked < 40
    for _ in range(200):
        found = guesser.guesses(text, 4)
        guesser.judge(len(found), len(found))
    assert len(guesser.guesses(text, 4)) == 4, "and grows again where it does"


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


def test_who_remembers_its_tokens_waits_for_them() -> None:
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


# Prefixes


def test_a_prompt_that_was_seen_is_not_computed_again() -> None:
    engine = Engine(LIMITS)
    engine.run(request("a", list(range(12)), max_tokens=1))
    assert engine.ranks.computed == 12
    # All of it is cached; the last token has to be computed, and with it its block.
    engine.run(request("b", list(range(12)), max_tokens=1))
    assert engine.outputs["b"][0].cached_tokens == 8 and engine.ranks.computed == 16
    engine.run(request("c", [*range(12), 3], max_tokens=1))
    assert engine.outputs["c"][0].cached_tokens == 12 and engine.ranks.computed == 17
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (12 + 12 + 13, 8 + 12)


def test_an_answer_is_a_prefix_too() -> None:
    engine = Engine(LIMITS)
    engine.run(request("a", [1, 2, 3], max_tokens=10))
    engine.run(request("b", [1, 2, 3, *engine.tokens("a")], max_tokens=1))
    # The answer's last token was never fed back: 12 of 13 were.
    assert engine.outputs["b"][0].cached_tokens == 12


def test_two_with_one_prompt_share_within_a_step() -> None:
    engine = Engine(LIMITS)
    for id in "abc":
        engine.scheduler.add(request(id, list(range(10)), max_tokens=3))
    plan = engine.schedule()
    assert plan and plan.counts == [10, 2, 2] and plan.starts == [0, 8, 8]
    # Two full blocks are shared, the third is each one's own.
    assert plan.blocks[0][:2] == plan.blocks[1][:2] == plan.blocks[2][:2]
    assert len({blocks[2] for blocks in plan.blocks}) == 3
    assert engine.scheduler.stats().blocks_used == 5
    engine.run()
    assert engine.tokens("a") == engine.tokens("b") == engine.tokens("c") != []


def test_prompt_logprobs_need_every_position() -> None:
    engine = Engine(LIMITS | {"max_num_batched_tokens": 5})
    engine.run(request("a", list(range(12)), max_tokens=2))
    engine.run(request("b", list(range(12)), max_tokens=2, prompt_logprobs=0))
    first, second = engine.outputs["b"]
    assert first.cached_tokens == 0 and second.prompt_logprobs is None
    assert first.prompt_logprobs == [logprob(t) for t in range(1, 12)]
    # It asked the cache for nothing, but others profit from it.
    assert engine.scheduler.stats().prefix_queries == 12


def test_without_prefix_caching_nothing_is_shared() -> None:
    engine = Engine(LIMITS | {"prefix_caching": False})
    engine.run(*(request(id, list(range(12)), max_tokens=1) for id in "ab"))
    assert engine.ranks.computed == 24
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (0, 0)


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
    engine.scheduler.max_num_batched_tokens = 2
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


def test_what_is_aborted_says_no_more() -> None:
    engine = Engine(LIMITS | {"max_num_seqs": 2})
    for id in "abc":
        engine.scheduler.add(request(id, [1, 2, 3, 4, 5], max_tokens=5))
    engine.schedule()
    engine.scheduler.abort(["a", "c"])
    assert engine.scheduler.unfinished == ["b"] and engine.scheduler.waiting == 0
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
    assert len(engine.scheduler._queue) == 0


# Who waits, who goes


def test_the_queue_is_bounded() -> None:
    engine = Engine(LIMITS | {"max_num_seqs": 2, "max_num_queued": 3})
    for i in range(5):
        engine.scheduler.add(request(f"r{i}", [i]))
    with pytest.raises(QueueFullError, match="--max-num-queued-reqs"):
        engine.scheduler.add(request("more", [1]))
    engine.schedule()
    with pytest.raises(QueueFullError, match="at most 3 may"):
        engine.scheduler.add(request("more", [1]))
    engine.scheduler.abort(["r4"])
    engine.scheduler.add(request("more", [1]))
    assert engine.scheduler.waiting == 3


@pytest.mark.parametrize(
    ("prompt", "change", "says"),
    [
        ([], {}, "empty"),
        ([1] * 64, {}, "send at most 63"),
        ([1] * 40, {"num_blocks": 10}, "needs 11 KV blocks, the cache has 10"),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], change: dict[str, Any], says: str) -> None:
    engine = Engine(LIMITS | change)
    with pytest.raises(RequestError, match=says) as refused:
        engine.scheduler.add(request("a", prompt))
    assert refused.value.param == "prompt"
    assert not engine.scheduler.has_unfinished


def test_ids_differ() -> None:
    engine = Engine(LIMITS)
    engine.scheduler.add(request("a", [1]))
    with pytest.raises(RequestError, match="'a'"):
        engine.scheduler.add(request("a", [2]))


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


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "b"), ("priority", "a")])
def test_who_is_preempted(policy: str, victim: str) -> None:
    """Two need a fourth block each, and there are seven."""
    engine = Engine(LIMITS | {"num_blocks": 7, "policy": policy, "prefix_caching": False})
    requests = [request("a", [1] * 11, priority=1, max_tokens=4), request("b", [2] * 11, priority=0, max_tokens=4)]
    for item in requests:
        engine.scheduler.add(item)
    while not engine.scheduler.stats().preemptions:
        engine.schedule()
        engine.apply()
    assert engine.scheduler.waiting == 1
    survivor = "b" if victim == "a" else "a"
    assert list(engine.scheduler._running) == [survivor]
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
    assert list(engine.scheduler._running) == ["a"] and len(engine.flight) == 2
    assert [output.id for output in engine.apply()] == ["b"]
    assert len(engine.tokens("b")) == before + 1
    engine.run(depth=2)
    assert engine.tokens("b") == expected(b, 64)[0]


def test_a_token_on_its_way_may_be_the_last() -> None:
    """As before, and that token ends b while it waits to come back."""
    engine = Engine(LIMITS | {"num_blocks": 6, "prefix_caching": False, "stages": 2})
    engine.scheduler.add(request("a", [1] * 13, max_tokens=6))
    engine.scheduler.add(request("b", [2] * 4, max_tokens=4))
    assert engine.schedule() and engine.schedule()
    while not engine.scheduler.stats().preemptions:
        engine.apply()
        engine.schedule()
    (last,) = engine.apply()
    assert (last.id, last.finish_reason) == ("b", "length")
    assert engine.scheduler.unfinished == ["a"] and engine.scheduler.waiting == 0
    engine.run()
    assert len(engine.tokens("b")) == 4


def test_newcomers_leave_room_for_those_who_run() -> None:
    """c would fit now, and would cost a or b their blocks a few tokens later."""
    engine = Engine(LIMITS | {"num_blocks": 8})
    for id, prompt in {"a": [1] * 11, "b": [2] * 11, "c": [3] * 3}.items():
        engine.scheduler.add(request(id, prompt, max_tokens=6))
    plan = engine.schedule()
    assert plan and len(plan.slots) == 2 and engine.scheduler.pool.free == 2
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
    assert engine.scheduler.pool.free == 5
    engine.run(depth=2)
    assert engine.scheduler.stats().preemptions == 0


def test_what_is_computed_again_can_be_found_again() -> None:
    """b is preempted and a uses up its blocks; once b is through, its beginning is in the cache anew."""
    engine = Engine(LIMITS | {"num_blocks": 7})
    engine.run(request("a", [1] * 11, max_tokens=17), request("b", [2] * 11, max_tokens=4))
    assert engine.scheduler.stats().preemptions == 1 and engine.outputs["b"][-1].cached_tokens == 0
    engine.run(request("c", [2] * 11, max_tokens=1))
    assert engine.outputs["c"][-1].cached_tokens == 8


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    seen=st.integers(0, 40),
)
def test_the_longest_run_that_came_before_counts(tokens: list[int], shortest: int, more: int, seen: int) -> None:
    guesser = Guesser(Speculation(tokens=3, lookup_min=shortest, lookup_max=shortest + more))
    if tokens[:seen]:
        guesser.guesses(tokens[:seen], 3)  # what has been seen is not looked at again
    end, want = len(tokens), list[int]()
    for length in range(shortest, min(shortest + more, end) + 1):
        places = [at for at in range(length, end) if tokens[at - length : at] == tokens[end - length :]]
        if places:
            want = [tokens[places[-1] + step % (end - places[-1])] for step in range(3)]
    assert guesser.guesses(tokens, 3) == want


def test_a_long_prompt_is_indexed_once_per_token() -> None:
    """Not once per token and length: with the widest lookup that was most of a gigabyte for 131,072 tokens."""
    guesser = Guesser(Speculation(tokens=3, lookup_min=1, lookup_max=32))
    tokens = [number * 7919 % 5003 for number in range(5000)]
    guesser.guesses(tokens, 3)
    assert len(guesser._index) <= len(tokens)
