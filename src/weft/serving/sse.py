"""Server-sent events, and requests whose client may go away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.errors import WeftError
from weft.serving.errors import frame

log = logging.getLogger("weft.serving")

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"


def event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def gone(receive: Receive) -> None:
    """Returns when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def settle(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs and wait until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None, with `work` cancelled, where the client goes away first."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await settle(task, watch)


class Source(Protocol):
    """What the events are made from: closing it aborts its requests."""

    async def aclose(self) -> None: ...


async def reply(
    request: Request,
    source: Source,
    *,
    stream: bool,
    events: Callable[[], AsyncGenerator[bytes, None]],
    whole: Callable[[], Coroutine[Any, Any, Response]],
    keepalive_s: float,
) -> Response:
    """The answer of `source` as its events while they come, or whole; closed when the client goes away."""
    if stream:
        return EventStream(events(), source, keepalive_s=keepalive_s)
    try:
        made = await while_connected(request.receive, whole())
    finally:
        await source.aclose()
    return made or Response()  # which nobody reads


class EventStream(Response):
    """Streams `events`, and closes their `source` at the end, also when that is the client's going away.

    While there is nothing to send, a comment goes out every `keepalive_s` seconds, so that no proxy takes
    the silence for death. An error after the first byte goes out as an event, and then the connection is
    cut without the end mark of the body: a client must not take the torso for a whole answer.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], source: Source, *, keepalive_s: float) -> None:
        # X-Accel-Buffering: nginx would hold events back.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._keepalive_s = keepalive_s
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent_at = asyncio.get_running_loop().time()
        writer = asyncio.ensure_future(self._write(send))
        watch, beat = asyncio.ensure_future(gone(receive)), asyncio.ensure_future(self._beat(send))
        try:
            await asyncio.wait({writer, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await settle(writer, watch, beat)
            await self._events.aclose()
            await self._source.aclose()

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _write(self, send: Send) -> None:
        try:
            async for data in self._events:
                await self._send(send, data)
        except Exception as error:
            if not isinstance(error, WeftError):
                log.exception("a stream failed")
            await self._send(send, event(frame(error)))
        else:
            await self._send(send, b"", more=False)

    async def _beat(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._sent_at + self._keepalive_s - loop.time())
            if loop.time() >= self._sent_at + self._keepalive_s:
                await self._send(send, KEEPALIVE)
