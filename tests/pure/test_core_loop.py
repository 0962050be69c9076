"""The loop that steps a core."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from weft.client.local import CoreThread, Query
from weft.errors import CORE, Cause


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
    thread.send_failure(Cause(rank=CORE, phase="step", code="test-over", cause="the test is over"))
    thread.join()
    assert max(Counter(seen).values()) <= 2
