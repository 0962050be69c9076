"""Prefixes: what was computed for one request is not computed again for the next."""

from __future__ import annotations

import msgspec
import pytest

from tests.pure.ranks import logprob
from tests.pure.scheduling import LIMITS, Engine, request
from weft.engine.core.blocks import block_digest
from weft.engine.core.identity import PLAIN, RequestIdentity
from weft.engine.core.request import Request
from weft.engine.core.sequence import Sequence
from weft.engine.core.waiting import Owner


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


# Of each pair of neighbours, one could be taken for the other if fields ran into each other.
IDENTITIES = [
    PLAIN,
    RequestIdentity(adapter="a"),
    RequestIdentity(cache_salt="a"),
    RequestIdentity(content=(b"a",)),
    RequestIdentity(content=(b"a", b"")),
    RequestIdentity(content=(b"", b"a")),
    RequestIdentity(adapter="a", cache_salt="b"),
    RequestIdentity(adapter="ab"),
    RequestIdentity(adapter="a", cache_salt="b", content=(b"c",)),
]


@pytest.mark.parametrize("change", [{}, {"windows": (5, None), "num_blocks": 128}, {"states": 1}], ids=str)
def test_requests_of_other_identity_share_nothing(change: dict[str, object]) -> None:
    engine = Engine(LIMITS | change)
    for number, identity in enumerate(IDENTITIES):
        engine.run(request(f"first {number}", list(range(14)), max_tokens=1, identity=identity))
        engine.run(request(f"again {number}", list(range(14)), max_tokens=1, identity=identity))
    for number in range(len(IDENTITIES)):
        assert [engine.outputs[f"{turn} {number}"][0].cached_tokens for turn in ("first", "again")] == [0, 12]


def test_within_a_step_only_one_identity_shares() -> None:
    engine = Engine(LIMITS)
    for id, salt in [("a", "x"), ("b", "y"), ("c", "x")]:
        engine.scheduler.add(
            request(id, list(range(10)), max_tokens=3, identity=RequestIdentity(cache_salt=salt)),
        )
    plan = engine.schedule()
    assert plan and plan.counts == [10, 10, 2]
    engine.run()
    assert engine.tokens("a") == engine.tokens("b") == engine.tokens("c") != []


def test_digests_begin_from_the_identity() -> None:
    def first_digest(asked: Request) -> bytes:
        sequence = Sequence(asked, Owner(), (0, 0), 100)
        sequence.unpack_prompt()
        return sequence.digests(2, 4)[0]

    prompt = list(range(8))
    # Without an identity they are those of the tokens alone, and an identity from a message is like any other.
    assert first_digest(request("a", prompt)) == block_digest(b"", prompt[:4])
    digests = [first_digest(request("a", prompt, identity=identity)) for identity in IDENTITIES]
    assert len(set(digests)) == len(digests)
    sent = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(request("a", prompt, identity=identity)), type=Request)
        for identity in IDENTITIES
    ]
    assert [first_digest(asked) for asked in sent] == digests
