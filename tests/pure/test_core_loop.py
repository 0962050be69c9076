"""The loop that steps a core."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.refusals import refuses
from weft.client.local import CoreThread, Query
from weft.client.messages import CallDone, CallRanks
from weft.client.process import CoreProcess
from weft.core.commands import ResetPrefixCache
from weft.core.request import Stats
from weft.errors import CORE, Cause, EngineError

CAUSE = Cause(rank=CORE, phase="step", code="test-over", cause="the test is over")


class FakeCore:
    """A core without requests, which counts how often it may submit steps."""

    def __init__(self) -> None:
        self.commands = SimpleNamespace(wake=None, fail=lambda error: None)
        self.pending: list[Any] = []
        self.pumps = 0

    def pump(self) -> None:
        self.pumps += 1

    def take_uncompiled(self) -> list[Any]:
        return []

    def stats(self) -> Stats:
        return Stats()

    def call(self, command: Any) -> Future[list[Any]]:
        promise: Future[list[Any]] = Future()
        promise.set_result([])
        return promise


def test_a_caller_that_asks_again_and_again_does_not_keep_the_steps_waiting() -> None:
    core, seen = FakeCore(), list[int]()
    done: Future[None] = Future()
    thread = CoreThread(core)  # type: ignore[arg-type]

    def ask(_: Any) -> None:
        seen.append(core.pumps)
        if len(seen) < 20:
            thread.send(Query(ask, Future()))
        else:
            done.set_result(None)

    thread.send(Query(ask, Future()))
    done.result(timeout=30)
    thread.send_failure(CAUSE)
    thread.join()
    assert max(Counter(seen).values()) <= 2


class BrokenParent:
    """A parent to whom no reply to a command can be sent, as if an exception struck there. A rank fails afterwards."""

    def __init__(self, failure: Future[Cause]) -> None:
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self._failure = failure

    def send(self, message: Any) -> None:
        if isinstance(message, CallDone):
            raise RuntimeError("injected")
        self._failure.set_result(CAUSE)  # else a loop that has lost the exception would wait for ever


def test_an_exception_while_a_caller_is_answered_ends_the_core() -> None:
    failure: Future[Cause] = Future()
    parent = BrokenParent(failure)
    process = CoreProcess(cast(Any, parent), cast(Any, FakeCore()), failure)
    parent.inbox.put(CallRanks(0, ResetPrefixCache()))
    with pytest.raises(RuntimeError):
        process.step_until_failure()


def test_a_rank_that_has_failed_before_the_loop_ends_it() -> None:
    failure: Future[Cause] = Future()
    failure.set_result(CAUSE)
    process = CoreProcess(cast(Any, BrokenParent(failure)), cast(Any, FakeCore()), failure)
    with refuses(EngineError, CAUSE.code):
        process.step_until_failure()
