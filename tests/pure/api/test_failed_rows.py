"""NaN in the KV of a request: what of it the prefix cache keeps, and whom it reaches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.ranks import Ranks, expected
from tests.pure.scheduling import LIMITS, Engine, request
from weft.engine.core.blocks import NumberedBlocks
from weft.engine.core.step import Pooling, SlotFailure, StepPlan, StepResult

NAN = SlotFailure("nan-logits", "rank 0: NaN")
NONE_ALLOWED = SlotFailure("no-allowed-token", "none can be sampled")
PROMPT = list(range(17))  # four blocks, and one token


def fail(engine: Engine, *ids: str, failure: SlotFailure = NAN) -> list[str]:
    """Execute the oldest step in flight, in which these requests fail; return the ids of those that are told."""
    rows = engine.scheduler.table.in_flight[0].rows
    slots = engine.flight[0].slots
    result = engine.ranks.execute(engine.flight.popleft())
    result.failed = {slot: failure for slot, row in zip(slots, rows, strict=True) if row.request.id in ids}
    for slot in result.failed:
        result.pooled.pop(slot, None)
    assert result.failed
    return [output.id for output in engine.scheduler.apply(result) if output.error == failure]


def starts(engine: Engine, id: str, prompt: list[int] = PROMPT) -> list[int]:
    """The first positions that a new request computes."""
    engine.scheduler.add(request(id, prompt, max_tokens=2))
    plan = engine.schedule()
    assert plan is not None
    return plan.starts


@pytest.mark.parametrize("failure", [NAN, NONE_ALLOWED])
@pytest.mark.parametrize("limits", [{}, {"lookahead": True}, {"windows": (None, 6)}, {"states": 1}])
def test_nothing_of_a_failed_row_is_reused(limits: dict[str, Any], failure: SlotFailure) -> None:
    engine = Engine(LIMITS | limits)
    engine.scheduler.add(request("a", PROMPT, max_tokens=4))
    engine.schedule()
    assert fail(engine, "a", failure=failure) == ["a"]
    assert starts(engine, "b") == [0]
    engine.check_blocks()


def test_blocks_that_a_failed_row_matched_leave_the_cache_too() -> None:
    """The NaN may have come from them. Others that hold them go on, and register nothing of them again."""
    engine = Engine(LIMITS)
    engine.run(request("first", PROMPT, max_tokens=1))
    for id in ("a", "b"):
        engine.scheduler.add(request(id, PROMPT, max_tokens=9))
    plan = engine.schedule()
    assert plan is not None and plan.starts == [16, 16]
    assert fail(engine, "a") == ["a"]
    assert starts(engine, "c")[-1] == 0
    engine.run()
    for id in ("b", "c"):
        assert engine.scheduler.knows(id) is False and engine.outputs[id][-1].finish_reason == "length"
    assert starts(engine, "d") == [16], "of the blocks that c has computed"


def test_a_request_that_was_aborted_or_has_ended_meanwhile_leaves_nothing() -> None:
    engine = Engine(LIMITS | {"lookahead": True})
    engine.scheduler.add(request("a", PROMPT, max_tokens=9))
    engine.schedule()
    engine.scheduler.abort(["a"])
    assert fail(engine, "a") == [], "nobody waits for it"
    assert starts(engine, "b") == [0]


def test_a_pooled_request_leaves_nothing() -> None:
    engine = Engine(LIMITS)
    engine.scheduler.add(request("a", PROMPT, pooling=Pooling()))
    engine.schedule()
    assert starts(engine, "b") == [16], "its blocks are free and known at once"
    assert fail(engine, "a") == ["a"]
    engine.apply()
    assert starts(engine, "c")[-1] == 0


def test_a_preempted_request_that_fails_leaves_cache_and_queue() -> None:
    engine = Engine(LIMITS)
    engine.scheduler.add(request("a", PROMPT, max_tokens=4))
    engine.schedule()
    engine.scheduler._preempt(engine.scheduler.table.running["a"])
    assert fail(engine, "a") == ["a"]
    table = engine.scheduler.table
    assert not any(len(owner.queue) for owner in table.owners.values()) and table.waiting == 0
    assert starts(engine, "b") == [0]


def test_other_texts_stay() -> None:
    engine = Engine(LIMITS)
    engine.run(request("other", [7] * 9, max_tokens=1))
    engine.scheduler.add(request("a", PROMPT, max_tokens=4))
    engine.schedule()
    fail(engine, "a")
    assert starts(engine, "b", [7] * 9) == [8]


class NanRanks(Ranks):
    """Ranks on which NaN spreads: a row that reads it writes it, and yields no token."""

    def __init__(self, bad_step: int | None, bad_row: int, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.bad_step, self._bad_row = bad_step, bad_row
        self._nan: set[object] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        ends: list[tuple[int, bool]] = []
        for number, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            chosen = plan.id == self.bad_step and number == self._bad_row % len(plan.slots)
            written = set(self._places(slot, range(start, start + count)))
            self._nan -= written
            if chosen or self._nan.intersection(self._places(slot, range(start))):
                self._nan |= written
                ends.append((slot, plan.samples[number]))
        result.failed = {slot: NAN for slot, samples in ends if samples}
        return result

    def _places(self, slot: int, positions: range) -> Iterator[object]:
        for group in range(len(self.windows)):
            for position in positions:
                yield group, self.place(self.live[slot], group, position)


@settings(max_examples=150, deadline=None)
@given(
    depth=st.integers(1, 3),
    lookahead=st.booleans(),
    chunk=st.sampled_from([5, 8, 64]),
    bad_step=st.integers(0, 12),
    bad_row=st.integers(0, 3),
    lengths=st.lists(st.integers(1, 17), min_size=2, max_size=6),
)
def test_nan_does_not_outlive_the_requests_that_met_it(
    depth: int, lookahead: bool, chunk: int, bad_step: int, bad_row: int, lengths: list[int]
) -> None:
    limits = LIMITS | {"lookahead": lookahead, "max_num_batched_tokens": chunk, "stages": 1 if lookahead else depth}
    engine = Engine(limits)
    sizes = {name: limits[name] for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")}
    engine.ranks = ranks = NanRanks(bad_step, bad_row, **sizes)
    requests = [request(f"r{number}", PROMPT[:length], max_tokens=5) for number, length in enumerate(lengths)]
    engine.run(*requests, depth=depth)
    for item in requests:
        assert engine.outputs[item.id][-1].finish_reason in ("error", "length")
    ranks.bad_step = None
    after = [request(f"after{number}", PROMPT[:length], max_tokens=5) for number, length in enumerate(lengths)]
    engine.run(*after)
    for item in after:
        assert engine.tokens(item.id) == expected(item, engine.longest)[0]
    pool = engine.scheduler.kv.pool
    assert isinstance(pool, NumberedBlocks) and pool.free == limits["num_blocks"]
