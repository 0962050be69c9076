"""Connection: uvicorn's HTTP/1.1 protocol over httptools, with limits on what one client can make it hold."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import partial
from typing import Any, Literal

import httptools
import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from weft.http.admission import STORED, ConnectionAdmission
from weft.http.body_parser import framing_fields, parser_in_body
from weft.http.errors import WHOLE, ErrorFrame, HttpError, describe_error, error_response, shutting_down_error
from weft.http.flow import JOINED, BoundedFlowControl, CycleWriter, JoinedTransport, RequestTimer, send_whole
from weft.http.leaving import LEAVING
from weft.http.sse import RESET, WRITER

HEAD_END = b"\r\n\r\n"
FORWARDED = (b"x-forwarded-for", b"x-forwarded-proto")
PIECE = 2**14  # bytes given to the parser at once, unless they are known to be a body's

# Paths that are answered even on connections over the limit.
PROBES = ("/health", "/health/live", "/health/ready")


class Connection(HttpToolsProtocol):
    """One client's connection.

    The parser gets one head at a time, so that at most as many requests are accepted as `ConnectionLimits` allows.
    Further bytes wait here, and then in the client. A protocol error is answered as the API's JSON, after the requests
    before it. The connection ends when the client has had time to read the error.
    """

    def __init__(
        self,
        admission: ConnectionAdmission,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self._admission = admission
        self._limits = admission.limits
        self._served = True  # False if over the limit of connections
        self._pending = b""  # received, not parsed yet
        self._part: Literal["", "head", "body"] = ""  # part of a request that is being received
        self._body_left = 0  # bytes still to come of a body of known length
        self._framing = 0  # bytes since the last complete head that are not body
        self._chunks = 0  # chunks received of a body of unknown length
        self._chunked_bytes = 0  # in these chunks
        self._unfinished = 0  # bytes of the request that is being received
        self._queued = 0  # bytes of complete requests behind the current request
        self._held = 0  # bytes reported to Admission
        self._running: RequestResponseCycle | None = None
        self._leave: Callable[[], None] | None = None  # called when its client has disconnected
        self._fault: HttpError | None = None  # raised by a parser callback
        self._last_error: HttpError | None = None  # to be sent after all requests before it
        self._early = False  # the response began before the request was complete, and ends the connection
        self._discarding = False  # received bytes are discarded
        self._timer = RequestTimer(loop, self._expire)
        self.url = b""
        # Without the reader of proxies' header fields, for requests that have none.
        self._plain_app = self.app.app if isinstance(self.app, ProxyHeadersMiddleware) else self.app

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow = BoundedFlowControl(self, self.transport)
        self._served = self._admission.enter(self)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        self._discarding = True
        self._timer.stop()
        self._unset_keepalive_if_required()
        self._pending = b""
        self._admission.leave(self)
        if self._running is not None:  # uvicorn informs only the newest request, which may be queued
            self._running.disconnected = True
            self._running.message_event.set()
        if self._leave is not None:
            self._leave()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._discarding:
            return
        self._pending += data
        self._feed()

    def shutdown(self) -> None:
        """Close now, or after the request that is being answered. A request with an incomplete body is refused."""
        if self._part == "body":
            self.refuse(shutting_down_error())
        if not self._discarding:
            super().shutdown()
        elif not self._busy:
            self.transport.close()

    def note_unread(self, unread: bool) -> None:
        """Note whether bytes wait for the client."""
        self._admission.note_unread(self, unread)

    def on_leave(self, call: Callable[[], None] | None) -> None:
        """The LeaveNotice of the request that is being answered, all of which has been received."""
        self._leave = call
        if call is None:
            return
        if self._running is not None and self._running.disconnected:
            call()
        # A large body paused reading; the end of the connection would not be seen.
        self.flow.resume_reading()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the client has still to take."""
        return self.transport.get_write_buffer_size()

    def drop(self) -> None:
        """Close at once, without a response."""
        self.transport.abort()
        self._admission.leave(self)

    def _reset(self) -> None:
        """Close at once, so that the client's system reports a reset instead of the end of the stream."""
        peer = self.transport.get_extra_info("socket")
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.drop()

    # Feeding the parser

    @property
    def _busy(self) -> bool:
        """True if a request is being answered."""
        running = self._running
        return running is not None and not running.response_complete and not running.disconnected

    def queue_full(self) -> bool:
        """Return True if reading has to pause, since too many bytes or requests wait on this connection."""
        if self._discarding:
            return False
        waiting = len(self.pipeline) >= self._limits.queued_requests or self._queued > self._limits.head_bytes
        return waiting or bool(self._pending)

    def _feed(self) -> None:
        """Parse the pending bytes, as far as requests may be queued."""
        data, self._pending = self._pending, b""
        view, at = memoryview(data), 0
        while at < len(data) and not self._discarding and not self.queue_full():
            size = self._next_piece(data, at)
            if not size:
                break
            self._unfinished += size
            self._queued += size if self.pipeline else 0
            at += self._parse(view[at : at + size])
        if self._discarding:
            return
        if at < len(data):
            self._pending = data[at:]
            self.flow.pause_reading()
        self._report_held()
        self._watch()

    def _report_held(self) -> None:
        held = self._unfinished + self._queued + len(self._pending)
        if held or self._held:
            self._held = held
            self._admission.hold(self, held)

    def _note_stored(self, cycle: RequestResponseCycle, size: int) -> None:
        """Stop counting bytes of a body that the application has written to disk."""
        if cycle.more_body and not self._discarding:
            self._unfinished = max(0, self._unfinished - size)
            self._report_held()

    def _next_piece(self, data: bytes, at: int) -> int:
        """Number of bytes to parse at once: to the end of the body, or of the head. 0 if the request is refused.

        Bytes that are not known to be body count as head until a head is complete. The framing of a chunked body is
        counted from one byte of the body to the next.
        """
        if self._body_left:
            return min(self._body_left, len(data) - at)
        limit = self._limits.head_bytes
        room = min(PIECE, limit - self._framing)
        if not room:
            status, subject = (414, "the URL is") if 2 * len(self.url) > limit else (431, "URL and header fields are")
            self.refuse(HttpError(status, f"{subject} longer than {limit} bytes; send less", code="header-too-large"))
            return 0
        end = data.find(HEAD_END, at, at + room)
        size = min(room, len(data) - at) if end < 0 else end + len(HEAD_END) - at
        self._framing += size
        return size

    def _parse(self, piece: memoryview) -> int:
        try:
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                # Not supported: the request is answered as if it had not asked for it.
                if self._body_ahead:
                    self.parser = parser_in_body(self, framing_fields(self.headers))
                return int(upgrade.args[0])
        except httptools.HttpParserError as error:
            unusable = HttpError(400, f"this is not valid HTTP: {error}", code="invalid-http")
            self.refuse(self._fault or unusable)
        return len(piece)

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = "head"

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a field. Raises HttpError. (uvicorn's own method, in its place: it is called for each field.)"""
        most = self._limits.header_fields
        if len(self.headers) >= most:
            self._fault = HttpError(
                431, f"there are more than {most} header fields; send fewer", code="header-too-large"
            )
            raise self._fault
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            self._fault = HttpError(400, "CONNECT is for proxies, and this is none", code="invalid-http")
            raise self._fault
        self._body_left = 0
        for name, value in self.headers:
            if name == b"content-length":
                self._body_left = int(value)
                break
        self._framing = self._chunks = self._chunked_bytes = 0
        self._timer.stop()
        super().on_headers_complete()
        self._part = "body"

    def on_body(self, body: bytes) -> None:
        self._framing = 0
        if not self._body_left:
            self._count_chunk(len(body))
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def _count_chunk(self, size: int) -> None:
        """Raise HttpError for too many small chunks: each costs the event loop as much as a large one."""
        self._chunks += 1
        self._chunked_bytes += size
        limits = self._limits
        if self._chunks > limits.chunks + self._chunked_bytes // limits.chunk_bytes:
            self._fault = HttpError(
                400,
                f"the body comes in more than {limits.chunks} chunks of less than {limits.chunk_bytes} bytes; "
                "send larger ones",
                code="too-many-chunks",
            )
            raise self._fault

    @property
    def _body_ahead(self) -> bool:
        """True if the parser assumes that a request with Upgrade ends with its head, though it has a body."""
        return self.parser.should_upgrade() and bool(framing_fields(self.headers))

    def on_message_complete(self) -> None:
        if self._body_ahead:
            return
        self._part = ""
        self._body_left = self._framing = self._unfinished = 0
        super().on_message_complete()

    # Responses

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if app is self.app and not is_forwarded(cycle.scope["headers"]):
            app = self._plain_app
        super()._start_asgi_task(cycle, partial(self._respond, cycle, app))

    async def _respond(
        self, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Run the application and adapt its response to the transport."""
        scope[WRITER], scope[LEAVING], scope[WHOLE] = CycleWriter(cycle), self, True
        scope[STORED] = partial(self._note_stored, cycle)
        allowed = self._served or scope["path"].removeprefix(scope["root_path"]) in PROBES
        unframed = False

        async def send_framed(message: Message) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                self._early = cycle.more_body
                cycle.keep_alive &= self._served and not self._early
                whole: bytes | None = message.get(WHOLE)
                if whole is not None:
                    await send_whole(cycle, message["status"], message["headers"], whole, stays_open=self._early)
                    return
                if scope["http_version"] == "1.0" and "content-length" not in Headers(raw=message["headers"]):
                    # HTTP/1.0 has no chunks: the end of the connection is the end of the body.
                    unframed, cycle.chunked_encoding = True, False
                if message.get(JOINED):
                    JoinedTransport(cycle)
            elif message.get(RESET):
                self._reset()
                return
            elif unframed:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)
            # Else uvicorn would close at once, and a client that still sends would lose the response.
            cycle.keep_alive |= self._early

        try:
            responder = app if allowed else error_response(self._admission.too_many_connections())
            await responder(scope, receive, send_framed)
        except asyncio.CancelledError:  # the server ends before the request does
            if not cycle.response_started and not self.transport.is_closing():
                self.transport.write(encode_error_response(shutting_down_error()))
            cycle.disconnected = True
            self.transport.close()

    def on_response_complete(self) -> None:
        if self._early:
            self._linger()
        elif self._last_error and not self.pipeline:
            self._send_error(self._last_error)
        else:
            super().on_response_complete()  # starts the next queued request
            self._refill()

    def _refill(self) -> None:
        """Parse pending bytes once no parsed request is queued."""
        if self.pipeline or self.transport.is_closing():
            return
        self._queued = 0
        if self._pending:
            self._feed()
            self.flow.resume_reading()

    # Closing

    def refuse(self, error: HttpError) -> None:
        """Send an error after all requests before it are answered, and end the connection."""
        if self._discarding:
            return
        incomplete = self._part == "body"
        self._discarding, self._pending, self._part = True, b"", ""
        self._timer.stop()
        self._admission.hold(self, 0)
        if incomplete and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()  # the incomplete request
        elif incomplete and self.cycle.response_started:
            self.transport.close()  # an error cannot be sent within a response
            return
        elif incomplete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._busy:
            self._last_error = error
        else:
            self._send_error(error)

    def _send_error(self, error: HttpError) -> None:
        if not self.transport.is_closing():
            self.transport.write(encode_error_response(error))
            self._linger()

    def _linger(self) -> None:
        """Close after the client has, or after `linger_s`.

        Closing at once would reset the connection if unread bytes are left, and the client would lose the response.
        """
        self._discarding, self._pending = True, b""
        self._admission.hold(self, 0)
        self._timer.stop()
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._timer.close_later(self._limits.linger_s, self.transport)

    # Timeouts

    def _watch(self) -> None:
        """Run a timer for the part of a request that the client has still to send."""
        if self._discarding:
            return
        if self._part == "body":
            self._timer.start("body", self._limits.body_s)
        elif self._part == "head" or not self._busy:
            if self._timer.part != "head":
                self._timer.start("head", self._limits.head_s)
        else:
            self._timer.stop()

    def _expire(self, part: str, seconds: float) -> None:
        if self.flow.read_paused:
            self._watch()  # the server itself has paused reading
        elif part == "head" and self._part != "head":
            self.transport.close()  # no request has begun
        else:
            fault = "its head is not complete" if part == "head" else "no byte of its body came"
            message = f"the request was given up: {fault} after {seconds:g} s"
            self.refuse(HttpError(408, message, code="request-timeout"))


def is_forwarded(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True if a proxy names the client of a request."""
    for name, _ in headers:  # noqa: SIM110 - any() takes twice as long, for every request
        if name in FORWARDED:
            return True
    return False


def encode_error_response(error: HttpError) -> bytes:
    """An error as a complete HTTP response, the last of its connection."""
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
