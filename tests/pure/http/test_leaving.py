"""Clients that leave while a request of theirs is worked on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
from starlette.requests import Request

from tests.pure.http.test_connections import asking, post
from tests.pure.servers import weft_server
from tests.pure.worlds import FakeEngine, World, endless
from weft.http.leaving import LEAVING, while_connected


class Notice:
    """The LeaveNotice of a client that a test lets leave."""

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None

    def on_leave(self, call: Callable[[], None] | None) -> None:
        self.call = call

    def leave(self) -> None:
        assert self.call is not None
        self.call()


def request(notice: Notice | None = None) -> Request:
    """A request whose client has sent a body and has left, as far as one asks; with a notice nobody may ask."""

    messages = [{"type": "http.disconnect"}, {"type": "http.request"}]

    async def receive() -> MutableMapping[str, Any]:
        assert notice is None
        return messages.pop()

    return Request({"type": "http", LEAVING: notice}, receive)


async def stuck(began: asyncio.Event, ended: list[str]) -> None:
    try:
        began.set()
        await asyncio.Event().wait()
    finally:
        ended.append("stuck")


@pytest.mark.parametrize("told", [True, False])
async def test_a_client_that_leaves_ends_the_work(told: bool) -> None:
    notice, began, ended = Notice() if told else None, asyncio.Event(), list[str]()
    task = asyncio.create_task(while_connected(request(notice), stuck(began, ended)))
    await began.wait()
    if notice is not None:
        notice.leave()
    assert await task is None
    assert ended and not task.cancelling() and (notice is None or notice.call is None)


async def test_no_task_waits_for_a_client_whose_server_tells() -> None:
    notice, before = Notice(), asyncio.all_tasks()

    async def work() -> str:
        await asyncio.sleep(0)
        assert asyncio.all_tasks() - {asyncio.current_task()} == before and notice.call is not None
        return "done"

    assert await while_connected(request(notice), work()) == "done"
    assert notice.call is None


async def test_errors_of_the_work_and_cancellations_by_others_go_on() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await while_connected(request(Notice()), fail())
    for leaves in (False, True):
        notice, began = Notice(), asyncio.Event()
        task = asyncio.create_task(while_connected(request(notice), stuck(began, [])))
        await began.wait()
        if leaves:
            notice.leave()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_connection_that_is_lost_ends_its_request() -> None:
    world = World(FakeEngine(endless))
    async with weft_server(world) as live:
        client = await live.connect()
        await client.send(post(asking()))
        while not world.engine.open:
            await asyncio.sleep(0)
        client.writer.transport.abort()
        while world.service.streams:
            await asyncio.sleep(0)
    assert len(world.engine.aborted) == 1 and not world.engine.open
