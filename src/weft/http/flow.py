"""Flow of bytes to and from one client, on top of uvicorn's."""

from __future__ import annotations

import asyncio
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


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
