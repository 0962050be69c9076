"""Prefixes: what was computed for one request is not computed again for the next."""

from __future__ import annotations

from tests.pure.ranks import logprob
from tests.pure.scheduling import LIMITS, Engine, request


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
    (rows,) = plan.blocks
    assert rows[0][:2] == rows[1][:2] == rows[2][:2]
    assert len({blocks[2] for blocks in rows}) == 3
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
