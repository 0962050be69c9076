"""Threads for work that would block the event loop, which feeds other clients' streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from threading import Thread
from typing import TypeVar

from weft.engine.templates.limits import LIMITS
from weft.http.errors import HttpError

T = TypeVar("T")


class WorkThreads:
    """Runs at most `places` pieces of work at a time, each in its own daemon thread.

    Daemon threads do not keep the process from ending, however long they run. Create and use it in one event loop.
    """

    def __init__(self, places: int) -> None:
        self._free = asyncio.Semaphore(places)
        self._waiting = 0

    async def result(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, and return or raise what it does.

        Raises HttpError 503 if no place becomes free within `LIMITS.work_s`, or if the work takes longer than that.
        Work that has begun keeps running, and keeps its place, until it is done.
        """
        await self._take_place()
        loop = asyncio.get_running_loop()
        future: Future[T] = Future()
        future.add_done_callback(lambda _: _call_in_loop(loop, self._free.release))
        Thread(target=_run_into, args=(future, work), daemon=True, name="weft-request").start()
        try:
            async with asyncio.timeout(LIMITS.work_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise too_slow_error() from None
        finally:
            del future  # an error in it keeps this frame (see `engine.sandbox.isolated.Isolated.call`)

    async def _take_place(self) -> None:
        busy = HttpError(
            503, "the server is busy reading other large requests; try again", code="overloaded", retry_after_s=5
        )
        if self._waiting >= LIMITS.waiting:
            raise busy
        self._waiting += 1
        try:
            async with asyncio.timeout(LIMITS.work_s):
                await self._free.acquire()
        except TimeoutError:
            raise busy from None
        finally:
            self._waiting -= 1


class WorkSteps:
    """Runs the steps of one piece of work of a `kind`: in the loop if a `gate` lets such work in, else in a thread."""

    def __init__(self, kind: Callable[..., object], threads: WorkThreads, gate: LoopGate | None) -> None:
        self._kind, self._threads, self._gate = kind, threads, gate

    @property
    def are_quick(self) -> bool:
        """True if a step may run in the loop now."""
        return self._gate is not None and self._gate.allows(self._kind)

    def run_here(self, step: Callable[[], T]) -> T:
        """Run a step in the loop."""
        return step() if self._gate is None else self._gate.timed(self._kind, step)

    async def run_in_thread(self, step: Callable[[], T]) -> T:
        """Run a step in a thread, with the context of the caller. Raises as `WorkThreads.result`."""
        return await self._threads.result(partial(copy_context().run, self.run_here, step))


def too_slow_error() -> HttpError:
    """Return the error of a request that is not prepared in time."""
    return HttpError(
        503,
        f"reading this request (its template, its tokens) took longer than {LIMITS.work_s:g} s; send less",
        code="request-too-slow",
        retry_after_s=1,
    )


class LoopGate:
    """Decides which kinds of work are quick enough for the event loop.

    A kind is allowed if it has run before and has not taken longer than `LIMITS.tiny_s` during the last
    `LIMITS.tiny_after_s`. A slow template or tokenizer thus blocks the loop at most once a minute.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._allowed_from_s: dict[Callable[..., object], float] = {}  # by kind

    def allows(self, kind: Callable[..., object]) -> bool:
        """Return True if work of this kind may run in the event loop now."""
        return self._clock() >= self._allowed_from_s.get(kind, float("inf"))

    def timed(self, kind: Callable[..., object], work: Callable[[], T]) -> T:
        """Run `work`, and count its duration for its kind."""
        began_s = self._clock()
        try:
            return work()
        finally:
            now = self._clock()
            if now - began_s > LIMITS.tiny_s:
                self._allowed_from_s[kind] = now + LIMITS.tiny_after_s
            else:
                self._allowed_from_s.setdefault(kind, now)


def _run_into(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        del future  # as in `WorkThreads.result`


def _call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop may have closed
        loop.call_soon_threadsafe(call)
