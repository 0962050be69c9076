"""Clients that leave while a request of theirs is worked on."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from weft.serving.watches import ClientWatches, while_connected

GONE = {"type": "http.disconnect"}


class Inbox:
    """What a client sends, and how often somebody has waited for it."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.waits = 0

    async def receive(self) -> MutableMapping[str, Any]:
        self.waits += 1
        return await self.messages.get()


async def test_a_short_request_is_not_watched() -> None:
    inbox, before = Inbox(), asyncio.all_tasks()

    async def work() -> str:
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        return "done"

    inbox.messages.put_nowait(GONE)
    watches = ClientWatches()
    assert [await while_connected(watches, inbox.receive, work()) for _ in range(3)] == ["done"] * 3
    await asyncio.sleep(0.05)  # until the timer has looked
    assert not inbox.waits


async def test_a_client_that_leaves_ends_the_work() -> None:
    inbox, ended = Inbox(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    inbox.messages.put_nowait({"type": "http.request"})
    inbox.messages.put_nowait(GONE)
    assert await while_connected(ClientWatches(), inbox.receive, work()) is None
    assert ended and not asyncio.current_task().cancelling()  # type: ignore[union-attr]


async def test_errors_of_the_work_and_cancellations_by_others_go_on() -> None:
    inbox, watches, left = Inbox(), ClientWatches(), asyncio.Event()

    async def work(error: Exception | None) -> None:
        left.set()
        if error is not None:
            raise error
        await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        await while_connected(watches, inbox.receive, work(ZeroDivisionError()))
    left.clear()
    task = asyncio.create_task(while_connected(watches, inbox.receive, work(None)))
    await left.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.05)
    assert not inbox.waits


async def test_a_cancellation_beside_the_clients_leaving_goes_on() -> None:
    inbox, began = Inbox(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            task.cancel()  # the server ends too
            raise

    inbox.messages.put_nowait(GONE)
    task = asyncio.create_task(while_connected(ClientWatches(), inbox.receive, work()))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert began.is_set()
