"""Server-sent events, and responses that end when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.errors import WeftError
from weft.http.errors import AnthropicErrorFrame, error_frame
from weft.http.leaving import wait_for_disconnect, while_connected

log = logging.getLogger("weft.serving")

WRITER = "weft.writer"  # key of a scope: the ChunkWriter of its response
RESET = "weft.reset"  # key of an http.response.body after which the connection is reset
PREFIX_HEADER = "X-Weft-Prefix"
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"


@dataclass(frozen=True)
class StreamFormat:
    """The way in which an API streams.

    `encode_error` makes the last part of a stream that breaks. `keepalive` is sent while there is nothing to say; empty
    if clients of the API could not skip it.
    """

    media_type: str
    encode_error: Callable[[Exception], bytes]
    keepalive: bytes


class HeaderReport(Protocol):
    """The value of PREFIX_HEADER of a response; None as long as it is not known."""

    def header(self) -> str | None: ...

    def end(self) -> None: ...


def encode_event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def encode_error_event(error: Exception, path: str = "") -> bytes:
    """The event of an error, in the shape of the API that `path` belongs to."""
    frame = error_frame(error, path)
    name = b"event: error\n" if isinstance(frame, AnthropicErrorFrame) else b""
    return name + encode_event(frame)


OPENAI_STREAM = StreamFormat("text/event-stream", encode_error_event, KEEPALIVE)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks that still run, and wait until all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Closable(Protocol):
    """The engine's stream behind a response; closing it aborts its unfinished requests."""

    async def aclose(self) -> None: ...


async def send_reply(
    request: Request,
    source: Closable,
    *,
    streaming: bool,
    events: Callable[[], AsyncGenerator[bytes, None]],
    whole: Callable[[], Coroutine[Any, Any, Response]],
    keepalive_s: float,
    stream_format: StreamFormat = OPENAI_STREAM,
    report: HeaderReport | None = None,
) -> Response:
    """Response of `source`: its `events` as they arrive if `streaming`, else `whole`. `report` makes one more header.

    `source` is closed when the response ends or the client disconnects.
    """
    if streaming:
        return EventStream(
            events(),
            source,
            keepalive_s=keepalive_s,
            stream_format=stream_format,
            report=report,
            resets=request.app.state.service.options.reset_on_error,
        )
    try:
        response = await while_connected(request, whole())
    finally:
        if report is not None:
            report.end()
        await source.aclose()
    if response is not None and report is not None:
        response.headers[PREFIX_HEADER] = report.header() or ""
    return response or Response()  # the client has disconnected


class ChunkWriter(Protocol):
    """Writes chunks of a response, bypassing the layers of the application that change only its head."""

    @property
    def usable(self) -> bool:
        """True if the response has begun, and its body is sent in chunks."""
        ...

    def write_now(self, data: bytes) -> bool:
        """Write a chunk, which is not empty, or drop it if the client is gone or the response has ended. Returns False,
        and writes nothing, if the client has to take earlier ones first."""
        ...


class EventStream(Response):
    """Response that streams `events` and closes their `source` at the end, even if the client disconnects.

    While there is nothing to send, a comment goes out every `keepalive_s` seconds, so that no proxy closes the
    connection as idle. An error after the first byte is sent as `stream_format` says. The connection is then cut
    without the end mark of the body, so that a client cannot take the truncated response for a complete response. If it
    `resets`, the error is only logged, and the connection is reset: some clients notice nothing else.

    With a `report`, whose header is known once the engine has looked at the prompt, nothing is sent until then.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: Closable,
        *,
        keepalive_s: float,
        stream_format: StreamFormat = OPENAI_STREAM,
        report: HeaderReport | None = None,
        resets: bool = False,
    ) -> None:
        # X-Accel-Buffering: nginx would buffer events.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=stream_format.media_type)
        self._format = stream_format
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._keepalive_s = keepalive_s
        self._report, self._resets = report, resets
        self._begun = asyncio.Event()
        self._sent_at = 0.0
        self._writer: ChunkWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = scope.get(WRITER)
        if self._report is None:
            await self._begin(send)
        writer = asyncio.ensure_future(self._send_events(send))
        watch = asyncio.ensure_future(wait_for_disconnect(receive))
        keepalive = asyncio.ensure_future(self._send_keepalives(send))
        try:
            await asyncio.wait({writer, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(writer, watch, keepalive)
            await self._events.aclose()
            if self._report is not None:
                self._report.end()
            await self._source.aclose()

    async def _begin(self, send: Send) -> None:
        """Send the head of the response, once."""
        if self._begun.is_set():
            return
        if self._report is not None:
            self.headers[PREFIX_HEADER] = self._report.header() or ""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent_at = asyncio.get_running_loop().time()
        if self._writer is not None and not self._writer.usable:
            self._writer = None
        self._begun.set()

    async def _send(self, send: Send, data: bytes, *, more_body: bool = True) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        if self._writer is not None and more_body and self._writer.write_now(data):
            return
        await send({"type": "http.response.body", "body": data, "more_body": more_body})

    async def _send_events(self, send: Send) -> None:
        held = b""  # until the report is available
        try:
            async for data in self._events:
                if self._begun.is_set():
                    if data:
                        await self._send(send, data)
                    continue
                held += data
                if self._report is not None and self._report.header() is not None:
                    await self._begin(send)
                    await self._send(send, held)
                    held = b""
            await self._begin(send)
        except Exception as error:
            if not isinstance(error, WeftError):
                log.exception("a stream failed")
            await self._begin(send)
            if self._resets:
                log.warning("a stream is reset: %s", error)
                await send({"type": "http.response.body", "body": b"", "more_body": True, RESET: True})
            else:
                await self._send(send, held + self._format.encode_error(error))
        else:
            await self._send(send, held, more_body=False)

    async def _send_keepalives(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        await self._begun.wait()
        while self._format.keepalive:
            await asyncio.sleep(self._sent_at + self._keepalive_s - loop.time())
            if loop.time() >= self._sent_at + self._keepalive_s:
                await self._send(send, self._format.keepalive)
