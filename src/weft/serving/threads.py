"""Threads for work that would keep the event loop, which has other clients' streams to feed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from weft.serving.errors import HttpError
from weft.text.limits import LIMITS

T = TypeVar("T")


class WorkThreads:
    """At most `places` pieces of work at a time, each in a daemon thread of its own: no work, however long, keeps the
    process from ending. Made and used in one event loop."""

    def __init__(self, places: int) -> None:
        self._free = asyncio.Semaphore(places)
        self._waiting = 0

    async def result(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. HttpError 503 if no place becomes free, or if the work is not done, within
        `LIMITS.work_s`; work that has begun goes on, and keeps its place until it is done."""
        await self._take_place()
        loop = asyncio.get_running_loop()
        future: Future[T] = Future()
        future.add_done_callback(lambda _: _call_in_loop(loop, self._free.release))
        Thread(target=_settle, args=(future, work), daemon=True, name="weft-request").start()
        try:
            async with asyncio.timeout(LIMITS.work_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise HttpError(
                503,
                f"reading this request (its template, its tokens) took longer than {LIMITS.work_s:g} s; send less",
                code="request_too_slow",
            ) from None

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


class LoopGate:
    """Which kinds of work are quick enough for the event loop: those that have run before, and have not taken longer
    than `LIMITS.tiny_s` for `LIMITS.tiny_after_s`. A template or a tokenizer that is slow stops the loop once a minute
    at most."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._from_s: dict[Callable[..., object], float] = {}  # when each kind may run in the loop

    def allows(self, kind: Callable[..., object]) -> bool:
        return self._clock() >= self._from_s.get(kind, float("inf"))

    def timed(self, kind: Callable[..., object], work: Callable[[], T]) -> T:
        """Result of `work`, whose time counts for its kind."""
        began_s = self._clock()
        try:
            return work()
        finally:
            now = self._clock()
            if now - began_s > LIMITS.tiny_s:
                self._from_s[kind] = now + LIMITS.tiny_after_s
            else:
                self._from_s.setdefault(kind, now)


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
        loop.call_soon_threadsafe(call)
