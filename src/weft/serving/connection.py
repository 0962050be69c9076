"""Connection: uvicorn's HTTP/1.1 over httptools, bounded in what one client can make it hold."""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from functools import partial
from typing import Any, Literal

import httptools
import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from weft.serving.admission import Admission
from weft.serving.errors import ErrorFrame, HttpError, describe_error, error_response
from weft.serving.service import shutting_down_error

HEAD_END = b"\r\n\r\n"
PIECE = 2**14  # bytes that the parser gets at once, if their number is not known to be a body's

# Paths that are answered on any connection.
PROBES = ("/health", "/health/live", "/health/ready")


class Connection(HttpToolsProtocol):
    """One client's connection. The parser is fed one head at a time, so that no more requests are taken in than
    `ConnectionLimits` allows; the rest waits, and then in the client. An error of the protocol is answered in its turn,
    as the API's JSON, and the connection ends once the client could read that."""

    def __init__(
        self,
        admission: Admission,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self._admission = admission
        self._limits = admission.limits
        self._served = True  # within the limit of connections
        self._pending = b""  # came, and is not parsed yet
        self._part: Literal["", "head", "body"] = ""  # of a request, that is being received
        self._body_left = 0  # bytes, if the length is known
        self._framing = 0  # bytes since the last head was complete, that are no body
        self._chunks = 0  # pieces of the body that is being received, if its length is not known
        self._chunked_bytes = 0  # in them
        self._unfinished = 0  # bytes of the request that is being received
        self._queued = 0  # bytes of requests that wait for the one that is being answered
        self._held = 0  # bytes that admission knows of
        self._running: RequestResponseCycle | None = None
        self._fault: HttpError | None = None  # what a callback of the parser objects to
        self._farewell: HttpError | None = None  # to be said when all before it is answered
        self._early = False  # the answer has begun before the request was whole, and ends the connection
        self._deaf = False  # what comes is thrown away
        self._timer: asyncio.TimerHandle | None = None
        self._timed: Literal["", "head", "body"] = ""
        self.url = b""

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow = BoundedFlowControl(self)
        self._served = self._admission.enter(self)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        self._deaf = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        self._pending = b""
        self._admission.leave(self)
        if self._running is not None:  # uvicorn tells only the newest, which may be one that waits
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._deaf:
            return
        self._pending += data
        self._feed()

    def shutdown(self) -> None:
        """Close, or do so after the request that is being answered. A request whose body is not whole is refused."""
        if self._part == "body":
            self.refuse(shutting_down_error())
        if not self._deaf:
            super().shutdown()
        elif not self._busy:
            self.transport.close()

    def drop(self) -> None:
        self.transport.abort()
        self._admission.leave(self)

    # Feeding the parser

    @property
    def _busy(self) -> bool:
        """A request is being answered."""
        running = self._running
        return running is not None and not running.response_complete and not running.disconnected

    def queue_full(self) -> bool:
        """Nothing more is to be read for now."""
        if self._deaf:
            return False
        waiting = len(self.pipeline) >= self._limits.queued_requests or self._queued > self._limits.head_bytes
        return waiting or bool(self._pending)

    def _feed(self) -> None:
        """Parse what has come, as far as requests may be queued."""
        data, self._pending = self._pending, b""
        view, at = memoryview(data), 0
        while at < len(data) and not self._deaf and not self.queue_full():
            size = self._next_piece(data, at)
            if not size:
                break
            self._unfinished += size
            self._queued += size if self.pipeline else 0
            at += self._parse(view[at : at + size])
        if self._deaf:
            return
        if at < len(data):
            self._pending = data[at:]
            self.flow.pause_reading()
        held = self._unfinished + self._queued + len(self._pending)
        if held or self._held:
            self._held = held
            self._admission.hold(self, held)
        self._watch()

    def _next_piece(self, data: bytes, at: int) -> int:
        """Number of bytes to parse at once: to the end of a body, or of a head; 0 if the request is refused.

        What is not known to be of a body counts as head until there is one; what frames a chunked body, from one byte
        of the body to the next.
        """
        if self._body_left:
            return min(self._body_left, len(data) - at)
        limit = self._limits.head_bytes
        most = min(PIECE, limit - self._framing)
        if not most:
            status, what = (414, "the URL is") if 2 * len(self.url) > limit else (431, "URL and header fields are")
            self.refuse(HttpError(status, f"{what} longer than {limit} bytes; send less", code="header_too_large"))
            return 0
        end = data.find(HEAD_END, at, at + most)
        size = min(most, len(data) - at) if end < 0 else end + len(HEAD_END) - at
        self._framing += size
        return size

    def _parse(self, piece: memoryview) -> int:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            return int(upgrade.args[0])  # which we do not; the request is answered as if it had not asked
        except httptools.HttpParserError as error:
            unusable = HttpError(400, f"this is not valid HTTP: {error}", code="invalid_http")
            self.refuse(self._fault or unusable)
        return len(piece)

    # The parser's side

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = "head"

    def on_header(self, name: bytes, value: bytes) -> None:
        most = self._limits.header_fields
        if len(self.headers) >= most:
            self._fault = HttpError(
                431, f"there are more than {most} header fields; send fewer", code="header_too_large"
            )
            raise self._fault
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        lengths = (int(value) for name, value in self.headers if name == b"content-length")
        self._body_left = next(lengths, 0)
        self._framing = self._chunks = self._chunked_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        self._part = "body"

    def on_body(self, body: bytes) -> None:
        self._framing = 0
        if not self._body_left:
            self._count_chunk(len(body))
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def _count_chunk(self, size: int) -> None:
        """Raise HttpError for a body of too many small chunks: each costs the event loop as much as a large one."""
        self._chunks += 1
        self._chunked_bytes += size
        limits = self._limits
        if self._chunks > limits.chunks + self._chunked_bytes // limits.chunk_bytes:
            self._fault = HttpError(
                400,
                f"the body comes in more than {limits.chunks} chunks of less than {limits.chunk_bytes} bytes; "
                "send larger ones",
                code="too_many_chunks",
            )
            raise self._fault

    def on_message_complete(self) -> None:
        self._part = ""
        self._body_left = self._framing = self._unfinished = 0
        super().on_message_complete()

    # Answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, partial(self._answer, cycle, app))

    async def _answer(
        self, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Run the application, with what the transport adds to its answer."""
        within = self._served or scope["path"].removeprefix(scope["root_path"]) in PROBES
        unframed = False

        async def send_framed(message: Message) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                self._early = cycle.more_body
                cycle.keep_alive &= self._served and not self._early
                if scope["http_version"] == "1.0" and "content-length" not in Headers(raw=message["headers"]):
                    # The end of the connection is the end of the body: that version knows no chunks.
                    unframed, cycle.chunked_encoding = True, False
            elif unframed:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)
            # Else uvicorn would close at once, and the answer be lost to a client that still writes.
            cycle.keep_alive |= self._early

        try:
            await (app if within else error_response(self._admission.too_many_connections()))(
                scope, receive, send_framed
            )
        except asyncio.CancelledError:  # the server ends before the request does
            if not cycle.response_started and not self.transport.is_closing():
                self.transport.write(encode_error_response(shutting_down_error()))
            cycle.disconnected = True
            self.transport.close()

    def on_response_complete(self) -> None:
        if self._early:
            self._linger()
        elif self._farewell and not self.pipeline:
            self._say(self._farewell)
        else:
            super().on_response_complete()  # which starts the next
            self._refill()

    def _refill(self) -> None:
        """Parse what had to wait, once nothing that was parsed waits."""
        if self.pipeline or self.transport.is_closing():
            return
        self._queued = 0
        if self._pending:
            self._feed()
            self.flow.resume_reading()

    # Endings

    def refuse(self, error: HttpError) -> None:
        """Answer with an error once all requests before are answered, and end the connection."""
        if self._deaf:
            return
        unheard = self._part == "body"
        self._deaf, self._pending, self._part = True, b"", ""
        self._stop_timer()
        self._admission.hold(self, 0)
        if unheard and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()  # the one that is not whole
        elif unheard and self.cycle.response_started:
            self.transport.close()  # within an answer nothing else can be said
            return
        elif unheard:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._busy:
            self._farewell = error
        else:
            self._say(error)

    def _say(self, error: HttpError) -> None:
        if not self.transport.is_closing():
            self.transport.write(encode_error_response(error))
            self._linger()

    def _linger(self) -> None:
        """Close when the client has, or soon: its unread bytes would reset the connection, and the answer be lost."""
        self._deaf, self._pending = True, b""
        self._admission.hold(self, 0)
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(self._limits.linger_s, self.transport.close)

    # Time

    def _watch(self) -> None:
        """Have a timer run for what the client owes."""
        if self._deaf:
            return
        if self._part == "body":
            self._start_timer("body", self._limits.body_s)
        elif self._part == "head" or not self._busy:
            if self._timed != "head":
                self._start_timer("head", self._limits.head_s)
        else:
            self._stop_timer()

    def _start_timer(self, part: Literal["head", "body"], seconds: float) -> None:
        self._stop_timer()
        self._timer, self._timed = self.loop.call_later(seconds, self._expire, part, seconds), part

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timed = None, ""

    def _expire(self, part: str, seconds: float) -> None:
        self._timer, self._timed = None, ""
        if self.flow.read_paused:
            self._watch()  # it is us who do not read
        elif part == "head" and self._part != "head":
            self.transport.close()  # nothing was asked
        else:
            what = "its head is not complete" if part == "head" else "no byte of its body came"
            self.refuse(HttpError(408, f"the request was given up: {what} after {seconds:g} s", code="request_timeout"))


class BoundedFlowControl(FlowControl):
    """Reading goes on only while there is room for what is read, whoever asks for it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.queue_full():
            super().resume_reading()


def encode_error_response(error: HttpError) -> bytes:
    """An error as a whole response, the last of its connection."""
    status, body, headers = describe_error(error)
    content = msgspec.json.encode(ErrorFrame(body))
    headers |= {
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Date": formatdate(usegmt=True),
        "Connection": "close",
    }
    lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
    return STATUS_LINE[status] + lines + b"\r\n" + content
