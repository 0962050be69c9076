"""UpstreamConnection: an HTTP/1.1 client connection whose responses are read piece by piece, in bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import httptools

from weft.errors import WeftError

HEAD_BYTES = 2**16  # largest head of a response, or framing between two pieces of its body, in bytes
HEADER_FIELDS = 256
FRAMING = (b"content-length", b"transfer-encoding")
ENGINE_RESTARTS = "engine_restarts"  # code of a Weft server's error for a request whose engine died
MAX_STATUS = 599  # RFC 9110, section 15
HIGH_WATER = 2**16  # bytes of a body that wait for the client before reading pauses


class UpstreamError(WeftError):
    """A request without a complete response.

    `sent`: the upstream may have begun to work on it, and may bill it. `stalled`: it took too long. `died`: the
    upstream, or its engine, ended while it had the request. `public`: the message for clients, without the addresses of
    upstreams. `upstream`: name of the upstream; "" for the upstream that was tried last.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        sent: bool = True,
        stalled: bool = False,
        died: bool = False,
        public: str | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.sent, self.stalled, self.died = sent, stalled, died
        self.public = message if public is None else public
        self.upstream = ""


def error_code(content: Mapping[str, Any]) -> str:
    """The code of an error in OpenAI's form; "" without a code."""
    error = content.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else ""


class ResponseHead(NamedTuple):
    """Status and headers of a response; names are in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]

    def header(self, name: bytes) -> bytes:
        """Value of a header; empty if the header is missing."""
        for header, value in self.headers:
            if header == name:
                return value
        return b""

    @property
    def is_event_stream(self) -> bool:
        """True for a readable stream of events: of unknown length and not compressed."""
        return self._is_stream(b"text/event-stream")

    @property
    def is_line_stream(self) -> bool:
        """True for readable lines of JSON."""
        return self._is_stream(b"application/x-ndjson")

    def _is_stream(self, kind: bytes) -> bool:
        plain = not self.header(b"content-encoding") and not self.header(b"content-length")
        return plain and self.header(b"content-type").partition(b";")[0].strip().lower() == kind


class UpstreamConnection(asyncio.Protocol):
    """One connection with at most one request in flight.

    `received`: a byte of the response has arrived. `reusable`: the response is complete, and the connection can carry
    another request.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lost = self._complete = False
        self._method = b""
        self._begin(b"")

    def _begin(self, method: bytes) -> None:
        """Forget the last response. Its parser is reused, unless it still waits for the body that HEAD does not get."""
        if not self._complete or self._method == b"HEAD":
            self._parser: Any = httptools.HttpResponseParser(self)
        self._method = method
        self._head: ResponseHead | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._size = self._framing = 0
        self._complete = self._framed = self._keep = self._paused = False
        self._error: UpstreamError | None = None
        self._limit_s = self._deadline = 0.0
        self.received = False

    @property
    def open(self) -> bool:
        """True if a request can be sent."""
        return not self._lost and self._transport is not None and not self._transport.is_closing()

    @property
    def at_end(self) -> bool:
        """True if the response is complete, and all of it has been read."""
        return self._complete and not self._pieces

    @property
    def reusable(self) -> bool:
        return self._complete and self._keep and self.open

    async def request(self, method: bytes, head: bytes, body: bytes, limit_s: float) -> ResponseHead:
        """Send a request and wait for the head of its response; `limit_s` is for the first byte of the body.

        Raises UpstreamError.
        """
        self._begin(method)
        if not self.open:
            raise UpstreamError("it closed the connection", code="connection-closed", sent=False)
        self._limit(limit_s)
        transport = cast(asyncio.Transport, self._transport)
        transport.write(head + body if len(body) < HEAD_BYTES else head)
        if len(body) >= HEAD_BYTES:
            transport.write(body)
        while self._head is None and self._error is None:
            await self._change()
        if self._head is None:
            raise cast(UpstreamError, self._error)
        return self._head

    async def read_piece(self) -> bytes:
        """The received bytes of the body, at least one; empty at its end. Raises UpstreamError after a failure."""
        while not self._pieces and not self._complete and self._error is None:
            await self._change()
        if self._pieces:
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._size = 0
            if self._paused and self._transport is not None:
                self._paused = False
                self._extend()
                self._transport.resume_reading()
            return data
        if self._error is not None and not self._complete:
            raise self._error
        return b""

    def limit_gaps(self, limit_s: float) -> None:
        """Let at most `limit_s` seconds pass from here on without a byte."""
        self._limit(limit_s)

    def fail(self, error: UpstreamError) -> None:
        """End the request with an error, and the connection."""
        if self._error is None and not self._complete:
            self._error = error
        self.close()
        self._wake()

    def close(self) -> None:
        """Close the connection at once."""
        self._stop_timer()
        self._keep = False
        if self._transport is not None:
            self._transport.abort()

    # Callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._complete or not self._method:
            self._keep = False  # bytes without a request
            self.close()
            return
        self.received = True
        self._framing += len(data)
        if self._head is not None:
            self._extend()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._complete:
                self._keep = False  # the body is longer than its content-length
                self.close()
            else:
                self.fail(self._error or UpstreamError(f"its response is not HTTP: {error}", code="response-not-http"))
        if self._framing > HEAD_BYTES and not self._complete:
            self.fail(UpstreamError(f"its response's head exceeds {HEAD_BYTES} bytes", code="response-head-too-large"))
        if self._size > HIGH_WATER and not self._paused and self.open:
            self._paused = True
            cast(asyncio.Transport, self._transport).pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._stop_timer()
        if self._head is not None and not self._framed and not self._complete and error is None and self._error is None:
            self._complete = True  # a body without a length ends with its connection
        elif self._error is None and not self._complete:
            # A connection that closes before the first byte may have been closed before the request arrived.
            place = "in the middle of its response" if self.received else "before it answered"
            code = "closed-in-response" if self.received else "closed-before-response"
            self._error = UpstreamError(f"it closed the connection {place}", code=code, died=True)
        self._wake()

    # Callbacks of the parser, which stop it by an exception

    def on_message_begin(self) -> None:
        if self._complete:
            raise UpstreamError("it sent more than one response", code="response-not-http")

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self._headers) >= HEADER_FIELDS:
            self._error = UpstreamError("its response has too many header fields", code="response-head-too-large")
            raise self._error
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._framing = 0
        if status < 200:
            self._headers = []  # an interim response
            return
        if status > MAX_STATUS:
            self._error = UpstreamError(f"its response has the status {status}", code="response-not-http")
            raise self._error
        self._head = ResponseHead(status, self._headers)
        for name, _ in self._headers:
            if name in FRAMING:
                self._framed = True
                break
        if self._method == b"HEAD":  # there is no body, whatever the headers announce
            self._complete = True

    def on_body(self, data: bytes) -> None:
        self._framing = 0
        if not self._complete:
            self._pieces.append(data)
            self._size += len(data)

    def on_message_complete(self) -> None:
        if self._head is None or self._complete:
            return
        self._complete = True
        self._keep = self._framed and bool(self._parser.should_keep_alive())

    # Waiting

    def _change(self) -> asyncio.Future[None]:
        """A future that is done when bytes have arrived, or the request has failed."""
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _limit(self, limit_s: float) -> None:
        self._limit_s = limit_s
        if not limit_s or self._complete:
            self._deadline = 0.0
            return
        self._deadline = self._loop.time() + limit_s
        if self._timer is None or self._timer.when() > self._deadline:
            self._stop_timer()
            self._timer = self._loop.call_at(self._deadline, self._expire)

    def _extend(self) -> None:
        """Restart the limit. The timer compares with the deadline when it fires, so pieces and requests share it."""
        if self._head is not None and self._deadline:
            self._deadline = self._loop.time() + self._limit_s

    def _expire(self) -> None:
        self._timer = None
        if self._complete or not self._deadline:
            return
        if self._paused:  # the client is slow, not the upstream
            self._deadline = self._loop.time() + self._limit_s
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._expire)
            return
        what = "no byte of its response came" if self._head is None else "nothing more of its response came"
        self.fail(UpstreamError(f"{what} for {self._limit_s:g} s", code="upstream-stalled", stalled=True))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
