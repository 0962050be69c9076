"""ClientWatches: callers are told when a client leaves. while_connected: work that stops then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

WATCH_AFTER_S = 0.02

T = TypeVar("T")


class Watch:
    """The watch on the client of one request, which began at `began_s` by the monotonic clock."""

    __slots__ = ("_leave", "_receive", "_task", "began_s")

    def __init__(self, receive: Receive, leave: Callable[[], None]) -> None:
        self._receive, self._leave = receive, leave
        self._task: asyncio.Task[None] | None = None
        self.began_s = time.monotonic()

    def start(self) -> None:
        """Wait for the client's leaving from now on."""
        self._task = asyncio.create_task(self._wait())

    def stop(self) -> None:
        """Wait no longer."""
        if self._task is not None:
            self._task.cancel()

    async def _wait(self) -> None:
        await wait_for_disconnect(self._receive)
        self._leave()


class ClientWatches:
    """Watches on the clients of all requests of an event loop.

    Short requests end before they are watched: one timer for all looks for those that are older than WATCH_AFTER_S.
    """

    def __init__(self) -> None:
        self._waiting: dict[Watch, None] = {}  # in the order of their beginning
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, receive: Receive, leave: Callable[[], None]) -> Watch:
        """Call `leave` when `receive` tells that the client has disconnected, unless `end` comes before."""
        watch = Watch(receive, leave)
        self._waiting[watch] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._look)
        return watch

    def end(self, watch: Watch) -> None:
        """Forget a watch."""
        self._waiting.pop(watch, None)
        watch.stop()

    def _look(self) -> None:
        """Start the watches that have waited for WATCH_AFTER_S."""
        self._timer = None
        now = time.monotonic()
        while self._waiting:
            watch = next(iter(self._waiting))
            remaining_s = watch.began_s + WATCH_AFTER_S - now
            if remaining_s > 0:
                self._timer = asyncio.get_running_loop().call_later(remaining_s, self._look)
                return
            del self._waiting[watch]
            watch.start()


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(watches: ClientWatches, receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`. If the client disconnects first, cancel `work` and return None."""
    task = asyncio.current_task()
    assert task is not None
    cancelling, gone = task.cancelling(), False

    def leave() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    watch = watches.begin(receive, leave)
    try:
        return await work
    except asyncio.CancelledError:
        if not gone or task.uncancel() > cancelling:  # somebody else has cancelled the task
            raise
        return None
    finally:
        watches.end(watch)
