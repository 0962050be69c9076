"""Isolated: a function that runs in sandboxed child processes, and coroutines that wait for its results.

A coroutine that prepares a request awaits `Isolated.call` and nothing else. Its driver runs the steps between by
`advance`, and decides how to wait: `run_blocking` waits in the caller's thread, a server awaits the `pool`.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from weft.engine.processes.framing import MAX_FRAME, Channel, FrameError
from weft.engine.sandbox.limits import Limits
from weft.engine.sandbox.messages import (
    Broken,
    FromWorker,
    JobRefused,
    JobResult,
    Registration,
    SandboxJob,
    WorkerReady,
)
from weft.engine.sandbox.pool import Outcome, Pool
from weft.engine.sandbox.zygote import WorkerEnds, close_unused, forgotten, numbers, spawn_worker
from weft.errors import RequestError

T = TypeVar("T")
MOST_BYTES = MAX_FRAME - 64  # of a job: with its frame, one message


class Isolated:
    """A function of bytes that runs in child processes: `target` makes it of the bytes that `setup` returns.

    `target` is "module:function". A job that breaks the `limits`, or the process, ends as a RequestError with the text
    `refusal`, that `param` and that `code`. A `lasting` worker takes many jobs, another one only one.
    """

    def __init__(
        self,
        target: str,
        setup: Callable[[], bytes],
        limits: Limits,
        *,
        refusal: str,
        param: str,
        code: str,
        lasting: bool = True,
    ) -> None:
        self.limits = limits
        self.lasting = lasting
        self._target, self._setup = target, setup
        self._refusal, self._param, self._code = refusal, param, code
        self._number = next(numbers)
        self._pools: list[Pool] = []
        weakref.finalize(self, forgotten.append, self._number)

    @cached_property
    def registration(self) -> Registration:
        """The message by which the zygote learns of the function; it takes as long as `setup`."""
        return Registration(self._number, self._target, self._setup(), self.limits)

    @property
    def pool(self) -> Pool:
        """The workers of the running event loop."""
        loop = asyncio.get_running_loop()
        for pool in self._pools:
            if pool.loop is loop:
                return pool
        for ended in [pool for pool in self._pools if pool.loop.is_closed()]:
            ended.close()
            self._pools.remove(ended)
        self._pools.append(Pool(self))
        return self._pools[-1]

    @cached_property
    def caller(self) -> BlockingCaller:
        """The worker of callers that wait in their threads."""
        return BlockingCaller(self)

    async def call(self, data: bytes) -> bytes:
        """Return the function's result. Raises the RequestError that it raises, or the RequestError of a broken
        limit."""
        if len(data) > MOST_BYTES:
            raise self.broken(f"it has {len(data):,} bytes; the limit is {MOST_BYTES:,}")
        outcome = await Call(self, data)
        try:
            if isinstance(outcome, RequestError):
                raise outcome
            return outcome
        finally:
            del outcome  # an error keeps the frames that it passes: in a circle, the job would stay until a collection

    def close(self) -> None:
        """End the workers, and the process that forks them if it has no other user. A later call starts them again."""
        for pool in self._pools:
            pool.close()
        if "caller" in vars(self):
            self.caller.close()
        forgotten.append(self._number)
        close_unused()

    def outcome(self, reply: FromWorker | None) -> Outcome:
        """Return the result, or the error, of a worker's reply; None stands for a worker that has ended instead."""
        match reply:
            case JobResult(data):
                return data
            case JobRefused(message, param, code):
                return RequestError(message, param=param, code=code)
            case Broken(reason):
                return self.broken(reason)
            case _:
                return self.broken("the process that did it has ended")

    def broken(self, reason: str) -> RequestError:
        """Return the error of a job that broke a limit."""
        limits = self.limits
        return RequestError(
            f"{self._refusal} ({reason:.300}); it may use {limits.cpu_s} s of CPU time and {limits.memory >> 20} MiB",
            param=self._param,
            code=self._code,
        )


class Call(NamedTuple):
    """A call that its driver makes: awaiting it hands it to the driver, which sends the outcome back."""

    function: Isolated
    data: bytes

    def __await__(self) -> Generator[Call, Outcome, Outcome]:
        return (yield self)


class Result(NamedTuple, Generic[T]):
    """The result of a coroutine that has ended."""

    value: T


def advance(work: Coroutine[Any, Any, T], arrived: list[Outcome]) -> Call | Result[T]:
    """Run a coroutine until its next call or its end. The outcome of the last call, if there was one, has `arrived`.

    It is taken out of the list, for the reason that `Isolated.call` gives.
    """
    try:
        call: Call = work.send(arrived.pop() if arrived else None)
    except StopIteration as end:
        return Result(end.value)
    return call


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; its calls wait in this thread."""
    step = advance(work, [])
    while isinstance(step, Call):
        step = advance(work, [step.function.caller.call(step.data)])
    return step.value


class BlockingCaller:
    """Calls a function from any thread, one call at a time."""

    def __init__(self, function: Isolated) -> None:
        self._function = weakref.proxy(function)
        self._lock = threading.Lock()
        self._worker: tuple[WorkerEnds, Channel[FromWorker]] | None = None
        weakref.finalize(function, self.close)

    def call(self, data: bytes) -> Outcome:
        """Return the outcome of one call, after at most the time that its limits give it."""
        function: Isolated = self._function
        with self._lock:
            try:
                reply = self._ask(function, data)
            except TimeoutError:
                self.close()
                return function.broken(f"it has taken {function.limits.wall_s:g} s")
            except (OSError, FrameError):
                reply = None
            if reply is None or isinstance(reply, Broken) or not function.lasting:
                self.close()
        return function.outcome(reply)

    def close(self) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker[0].close()
            self._worker = None

    def _ask(self, function: Isolated, data: bytes) -> FromWorker | None:
        if self._worker is not None and self._worker[0].ended:
            self.close()
        if self._worker is None:
            ends = spawn_worker(function.registration)
            self._worker = ends, Channel(ends.work, FromWorker)
        ends, channel = self._worker
        ends.work.settimeout(function.limits.wall_s)
        channel.send(SandboxJob(data))
        return next((message for message in channel if not isinstance(message, WorkerReady)), None)
