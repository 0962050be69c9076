"""while_connected: work that stops when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Receive

LEAVING = "weft.leaving"  # key of a scope: the LeaveNotice of its client

T = TypeVar("T")


class LeaveNotice(Protocol):
    """Reports that a client has disconnected, without a task that waits for it."""

    def on_leave(self, call: Callable[[], None] | None) -> None:
        """Call `call` when the client has disconnected, at once if it has; None: call nothing any more."""
        ...


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`. If the client disconnects first, cancel `work` and return None.

    The work has its own task, which costs a short answer less than passing each token through all callers.
    """
    task, this_task = asyncio.ensure_future(work), asyncio.current_task()
    assert this_task is not None
    gone = False

    def leave() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    notice: LeaveNotice = request.scope.get(LEAVING) or WaitingTask(request.receive)
    notice.on_leave(leave)
    try:
        return await task
    except asyncio.CancelledError:
        if not gone or this_task.cancelling():  # by somebody else
            raise
        return None
    finally:
        notice.on_leave(None)


class WaitingTask:
    """The LeaveNotice for a server that does not report disconnects."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    def on_leave(self, call: Callable[[], None] | None) -> None:
        """Call `call` when the client has disconnected; None: call nothing any more."""
        if self._task is not None:
            self._task.cancel()
        self._task = None if call is None else asyncio.create_task(self._wait(call))

    async def _wait(self, call: Callable[[], None]) -> None:
        await wait_for_disconnect(self._receive)
        call()
