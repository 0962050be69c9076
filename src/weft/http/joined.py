"""Responses in fewer writes than uvicorn's: a whole response at once, or the head with the first bytes of the body."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

JOINED = "weft.joined"  # key of an http.response.start whose body follows at once, and is not empty


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
