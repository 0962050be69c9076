"""Flow of bytes to and from one client, on top of uvicorn's: back-pressure, joined writes, and a time for each part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

JOINED = "weft.joined"  # key of an http.response.start whose body follows at once, and is not empty


class Backlog(Protocol):
    """The part of a connection that flow control uses: requests wait for answers, and bytes for the client."""

    def queue_full(self) -> bool: ...

    def note_unread(self, unread: bool) -> None: ...


class CycleWriter:
    """The ChunkWriter of `cycle`, uvicorn's response."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def usable(self) -> bool:
        cycle = self._cycle
        return cycle.response_started and bool(cycle.chunked_encoding) and cycle.scope["method"] != "HEAD"

    def write_now(self, data: bytes) -> bool:
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete:
            return True
        if cycle.flow.write_paused:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class BoundedFlowControl(FlowControl):
    """Flow control that resumes reading only while the connection has room for more requests, and notes when the client
    takes no more bytes."""

    def __init__(self, connection: Backlog, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if self.read_paused and not self._connection.queue_full():
            super().resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connection.note_unread(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connection.note_unread(False)


class JoinedTransport:
    """Stands in for the transport of `cycle`, uvicorn's response, until its second write."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._transport: asyncio.Transport = cycle.transport
        self._head = b""
        cycle.transport = self

    def write(self, data: bytes) -> None:
        """Hold the first bytes; send them together with the next."""
        if self._head:
            self._cycle.transport = self._transport
            self._transport.write(self._head + data)
        self._head = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def send_whole(
    cycle: Any, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, stays_open: bool
) -> None:
    """Send a complete response of `cycle`, uvicorn's, in one write. The names and values of the headers are valid.

    `stays_open`: the connection is not closed here, even if the client is told that it will be.
    """
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    lines = [STATUS_LINE[status]]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    if not cycle.keep_alive:
        lines.append(b"connection: close\r\n")
    lines += (b"\r\n", body)
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(b"".join(lines))
    cycle.message_event.set()
    if not cycle.keep_alive and not stays_open:
        cycle.transport.close()
    cycle.on_response()


class RequestTimer:
    """Calls `expire` with the part and its seconds if they pass. `part` is the part that it runs for, "" if none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[str, float], None]) -> None:
        self._loop, self._expire = loop, expire
        self._handle: asyncio.TimerHandle | None = None
        self.part: Literal["", "head", "body"] = ""

    def start(self, part: Literal["head", "body"], seconds: float) -> None:
        self.stop()
        self._handle, self.part = self._loop.call_later(seconds, self._end, part, seconds), part

    def close_later(self, seconds: float, transport: asyncio.Transport) -> None:
        """Close the connection after this number of seconds, instead of waiting for a request's end."""
        self.stop()
        self._handle = self._loop.call_later(seconds, transport.close)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle, self.part = None, ""

    def _end(self, part: str, seconds: float) -> None:
        self._handle, self.part = None, ""
        self._expire(part, seconds)
