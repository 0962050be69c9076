"""Guesses: right ones save steps, wrong ones cost none, and neither changes an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.ranks import expected
from tests.pure.scheduling import DRAFT, LIMITS, Engine, request
from weft.engine.core.speculation import DraftProposer
from weft.plan.plan import Speculation


def test_right_guesses_save_steps_and_change_nothing() -> None:
    item = request("a", [1, 2, 3], max_tokens=20)
    plain = Engine(LIMITS)
    plain.run(item)
    engine = Engine(LIMITS | {"speculation": Speculation(tokens=4, draft=DRAFT)})
    engine.run(item)
    assert engine.tokens("a") == plain.tokens("a") == expected(item, 64)[0]
    stats = engine.scheduler.stats()
    assert stats.accepted_tokens > 0 and stats.draft_tokens > stats.accepted_tokens
    assert stats.steps == 20 - stats.accepted_tokens < plain.scheduler.stats().steps
    assert stats.generation_tokens == 20
    assert any(len(output.tokens) > 1 for output in engine.outputs["a"])


def test_an_end_among_confirmed_guesses_ends_it() -> None:
    free = request("a", [1, 2, 3], max_tokens=20)
    stop = expected(free, 64)[0][4]
    item = request("a", [1, 2, 3], max_tokens=20, stop_ids=(stop,))
    engine = Engine(LIMITS | {"speculation": Speculation(tokens=4, draft=DRAFT)})
    engine.run(item)
    assert (engine.tokens("a"), engine.outputs["a"][-1].finish_reason) == expected(item, 64)


def test_a_request_that_needs_its_tokens_gets_no_drafts() -> None:
    engine = Engine(LIMITS | {"speculation": Speculation(tokens=4, draft=DRAFT)})
    engine.run(request("a", [1, 2, 3], max_tokens=9, repetition_penalty=1.1))
    assert engine.scheduler.stats().draft_tokens == 0


def test_drafts_for_an_earlier_text_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests take all tokens of a step; when one is gone, the draft says nothing any more."""
    engine = Engine(LIMITS | {"speculation": Speculation(tokens=2, draft=DRAFT), "max_num_batched_tokens": 2})
    engine.scheduler.add(request("a", [1], max_tokens=9))
    engine.scheduler.add(request("b", [2], max_tokens=9))
    for says in ([9, 9], None, None):
        monkeypatch.setattr(engine.ranks, "guess", lambda row, count, says=says: says)
        engine.schedule()
        engine.apply()
    engine.scheduler.abort(["b"])
    plan = engine.schedule()
    assert plan and plan.draft_counts == [0]


def test_drafts_before_a_preemption_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text comes back as a prompt, after which the draft says nothing."""
    engine = Engine(LIMITS | {"speculation": Speculation(tokens=2, draft=DRAFT), "stages": 2})
    monkeypatch.setattr(engine.ranks, "guess", lambda row, count: [9] * count)
    engine.scheduler.add(request("a", [1], max_tokens=9))
    engine.schedule()
    engine.scheduler._preempt(engine.scheduler.table.running["a"])
    engine.apply()
    monkeypatch.setattr(engine.ranks, "guess", lambda row, count: None)
    engine.schedule()
    engine.apply()
    plan = engine.schedule()
    assert plan and plan.draft_counts == [0]


def test_drafts_that_came_before_a_preemption_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were kept for the next token, and readmission samples one before the draft model is asked again."""
    engine = Engine(LIMITS | {"speculation": Speculation(tokens=2, draft=DRAFT)})
    monkeypatch.setattr(engine.ranks, "guess", lambda row, count: [9] * count)
    engine.scheduler.add(request("a", [1], max_tokens=9))
    engine.schedule()
    engine.apply()
    engine.scheduler._preempt(engine.scheduler.table.running["a"])
    monkeypatch.setattr(engine.ranks, "guess", lambda row, count: None)
    engine.schedule()
    engine.apply()
    plan = engine.schedule()
    assert plan and plan.draft_counts == [0]


def test_a_repeated_text_gives_drafts() -> None:
    proposer = DraftProposer(Speculation(tokens=4, lookup_min=2, lookup_max=3))
    assert proposer.propose([1, 2, 3, 4, 5, 6, 1, 2], 9) == [3, 4, 5, 6]
    assert proposer.propose([1, 2, 3, 4, 5, 6, 1, 2, 3], 2) == [4, 5]
    assert proposer.propose([1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 8], 4) == []
    assert DraftProposer(Speculation(tokens=5)).propose([7, 8, 9, 8, 9], 5) == [8, 9, 8, 9, 8], "round in a circle"
    later = DraftProposer(Speculation(tokens=1))
    assert later.propose([1, 2, 3, 1, 2, 4, 1, 2], 1) == [4], "the latest of its places"


def test_guessing_rests_where_it_does_not_pay() -> None:
    proposer = DraftProposer(Speculation(tokens=4))
    text = [1, 2, 3, 4, 5, 1, 2]
    asked = 0
    for _ in range(100):
        found = proposer.propose(text, 4)
        proposer.record_accepted(len(found), 0)
        asked += len(found)
    assert asked < 40
    for _ in range(200):
        found = proposer.propose(text, 4)
        proposer.record_accepted(len(found), len(found))
    assert len(proposer.propose(text, 4)) == 4, "and grows again where it does"


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    seen=st.integers(0, 40),
)
def test_the_longest_run_that_came_before_counts(tokens: list[int], shortest: int, more: int, seen: int) -> None:
    proposer = DraftProposer(Speculation(tokens=3, lookup_min=shortest, lookup_max=shortest + more))
    if tokens[:seen]:
        proposer.propose(tokens[:seen], 3)  # what has been seen is not looked at again
    end, want = len(tokens), list[int]()
    for length in range(shortest, min(shortest + more, end) + 1):
        places = [at for at in range(length, end) if tokens[at - length : at] == tokens[end - length :]]
        if places:
            want = [tokens[places[-1] + step % (end - places[-1])] for step in range(3)]
    assert proposer.propose(tokens, 3) == want


def test_a_long_prompt_is_indexed_once_per_token() -> None:
    """Not once per token and length: with the widest lookup that was most of a gigabyte for 131,072 tokens."""
    proposer = DraftProposer(Speculation(tokens=3, lookup_min=1, lookup_max=32))
    tokens = [number * 7919 % 5003 for number in range(5000)]
    proposer.propose(tokens, 3)
    assert len(proposer._index) <= len(tokens)
