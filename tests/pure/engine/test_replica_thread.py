"""ReplicaThread over engines that are fakes: callers of other threads while it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.pure.machines import host
from tests.pure.worlds import PLAN, READY
from tests.refusals import refuses
from weft.config import EngineConfig
from weft.engine.core.commands import Replies, ResetPrefixCache
from weft.engine.core.request import Request, Stats
from weft.engine.executors.ranks import CLOSED
from weft.engine.replicas import replica_thread
from weft.engine.replicas.replica_thread import ReplicaThread
from weft.engine.replicas.running import RunningReplica
from weft.errors import EngineError
from weft.planner.execution.replicas import ReplicaPlan

WAIT_S = 20


class FakeSet:
    """A set of engines whose end waits for the test, and whose commands end some turns of the loop after it."""

    made: FakeSet

    def __init__(self) -> None:
        self.plan, self.stats = PLAN, Stats()
        self.replicas = [RunningReplica(PLAN, READY)]
        self.called, self.closing, self.may_close = threading.Event(), threading.Event(), threading.Event()
        self.closed = asyncio.Event()

    @classmethod
    async def start(cls, planned: list[ReplicaPlan], config: EngineConfig, nodes: None) -> FakeSet:
        cls.made = cls()
        return cls.made

    async def call(self, command: ResetPrefixCache) -> Replies:
        self.called.set()
        await self.closed.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        raise EngineError(CLOSED)

    async def close(self) -> None:
        self.closing.set()
        await asyncio.to_thread(self.may_close.wait, WAIT_S)
        self.closed.set()


def test_a_set_that_is_collected_in_its_own_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs in any thread, the loop's among them: `close` must not wait for itself there."""
    monkeypatch.setattr(replica_thread, "ReplicaSet", FakeSet)
    made = ReplicaThread([ReplicaPlan(PLAN, host())], EngineConfig(model="m"))
    FakeSet.made.may_close.set()
    returned = threading.Event()

    def finalise() -> None:
        made.close()
        made.close()
        returned.set()

    made._loop.call_soon_threadsafe(finalise)
    assert returned.wait(WAIT_S)
    made._thread.join(WAIT_S)
    assert FakeSet.made.closed.is_set() and made._loop.is_closed()
    with refuses(EngineError, CLOSED.code):
        made.submit([])


class Caller(threading.Thread):
    """A thread that calls a function, and keeps its error."""

    def __init__(self, target: object, *args: object) -> None:
        super().__init__(daemon=True)
        self.work = target, args
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        function, args = self.work
        try:
            function(*args)  # type: ignore[operator]
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.join(WAIT_S)
        assert not self.is_alive(), "the caller hangs"
        if self.error is not None:
            raise self.error


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplicaThread]:
    monkeypatch.setattr(replica_thread, "ReplicaSet", FakeSet)
    made = ReplicaThread([ReplicaPlan(PLAN, host())], EngineConfig(model="m"))
    yield made
    FakeSet.made.may_close.set()
    made.close()


def test_callers_are_told_of_the_end(thread: ReplicaThread) -> None:
    """One whose command runs, one that comes while the engines end, and one that comes later."""
    early = Caller(thread.call, ResetPrefixCache())
    assert FakeSet.made.called.wait(WAIT_S)
    closer = Caller(thread.close)
    assert FakeSet.made.closing.wait(WAIT_S)
    late = Caller(thread.stats)
    FakeSet.made.may_close.set()
    closer.end()
    for caller in (early, late):
        with refuses(EngineError, "engine-closed"):
            caller.end()
    for call in (thread.stats, lambda: thread.submit(list[Request]())):
        with refuses(EngineError, "engine-closed"):
            call()


def test_no_work_is_given_to_a_loop_that_ends(thread: ReplicaThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that has seen the engines open gives its work before they end, or not at all."""
    run = asyncio.run_coroutine_threadsafe
    closers = []

    def close_meanwhile(work: object, loop: asyncio.AbstractEventLoop) -> object:
        monkeypatch.setattr(replica_thread, "asyncio", asyncio)
        FakeSet.made.may_close.set()
        closers.append(Caller(thread.close))
        assert not FakeSet.made.closing.wait(0.2)  # it waits for this caller
        return run(work, loop)  # type: ignore[arg-type]

    monkeypatch.setattr(replica_thread, "asyncio", SimpleNamespace(run_coroutine_threadsafe=close_meanwhile))
    caller = Caller(thread.stats)
    caller.end()
    closers[0].end()
