"""Work in the event loop, and the return of memory to the system."""

from __future__ import annotations

import pytest

from weft.engine.replicas import memory
from weft.engine.replicas.memory import QUIET_S, DelayedRelease
from weft.engine.templates.limits import LIMITS
from weft.http.threads import LoopGate


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_memory_is_released_once_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[float] = []
    clock = Clock()
    monkeypatch.setattr(memory, "release", lambda: released.append(clock.now_s))
    delayed = DelayedRelease(clock)
    delayed.release_if_due()
    assert delayed.wait_s is None and not released
    delayed.schedule()
    clock.now_s = 1.0
    delayed.schedule()
    clock.now_s = QUIET_S + 0.5
    delayed.release_if_due()
    assert delayed.wait_s == 0.5 and not released
    clock.now_s = QUIET_S + 1.0
    delayed.release_if_due()
    delayed.release_if_due()
    assert delayed.wait_s is None and released == [QUIET_S + 1.0]


def test_work_is_done_in_the_loop_only_if_its_kind_has_been_quick() -> None:
    clock = Clock()
    share = LoopGate(clock)

    def take(seconds: float) -> str:
        clock.now_s += seconds
        return "done"

    assert not share.allows(take)
    assert share.timed(take, lambda: take(LIMITS.tiny_s / 2)) == "done" and share.allows(take)
    assert not share.allows(print)
    share.timed(take, lambda: take(2 * LIMITS.tiny_s))
    assert not share.allows(take)
    share.timed(take, lambda: take(0.0))
    assert not share.allows(take)
    clock.now_s += LIMITS.tiny_after_s
    assert share.allows(take)


def test_slow_work_that_fails_counts_too() -> None:
    clock = Clock()
    share = LoopGate(clock)

    def fail() -> None:
        clock.now_s += 1.0
        raise ValueError

    share.timed(fail, lambda: None)
    with pytest.raises(ValueError):
        share.timed(fail, fail)
    assert not share.allows(fail)
