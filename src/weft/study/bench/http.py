"""A small HTTP/1.1 client for streamed responses; an event costs one call and the parser, which is C."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from weft.errors import ConfigError, WeftError, error_reason

MAX_ERROR_BYTES = 65_536  # bytes of a refusal's body that are stored


class HttpFailure(WeftError):
    """A request without a complete response."""


class HttpRefusal(HttpFailure):
    """A response with a status other than 200, and its `body`."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}", code="http-status")
        self.status, self.body = status, body


class BodyListener(Protocol):
    """Callback for each piece of a response's body, with its arrival time on the monotonic clock."""

    def __call__(self, data: bytes, now_s: float, /) -> None: ...


class ServerAddress:
    """Scheme, host and port of a server, the path before each endpoint's, and the headers of all requests.

    Raises ConfigError for a URL that is not an HTTP server's.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        scheme, self.host, port, self.path = _split_url(url)
        self.tls = ssl.create_default_context() if scheme == "https" else None
        self.port = port or (443 if self.tls else 80)
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{scheme}://{host}:{self.port}{self.path}"
        lines = {"Host": f"{host}:{self.port}", "User-Agent": "weft-bench", **(headers or {})}
        self.head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())


def _split_url(url: str) -> tuple[str, str, int | None, str]:
    """Scheme, host, port and path of a server's URL."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ConfigError(
            f"{url!r} is not the address of a server; write it as http://127.0.0.1:8000", code="not-a-server-address"
        )
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/")


class HttpClient:
    """Client of one server. Connections are reused; as many are open as requests are in flight."""

    def __init__(self, server: ServerAddress) -> None:
        self.server = server
        self._idle: list[ClientConnection] = []

    async def post(self, path: str, body: bytes, listener: BodyListener) -> None:
        """Send JSON and pass each piece of the response's body to `listener`. Raises HttpRefusal, HttpFailure."""
        head = f"POST {self.server.path}{path} HTTP/1.1\r\n{self.server.head}Accept: text/event-stream\r\n"
        request = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        await self._exchange(request, listener)

    async def get(self, path: str) -> bytes:
        """Body of the response to a GET. Raises HttpRefusal, HttpFailure."""
        pieces: list[bytes] = []
        request = f"GET {self.server.path}{path} HTTP/1.1\r\n{self.server.head}\r\n".encode()
        await self._exchange(request, lambda data, _: pieces.append(data))
        return b"".join(pieces)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, request: bytes, listener: BodyListener) -> None:
        while True:
            connection, fresh = await self._connection()
            try:
                await connection.exchange(request, listener)
            except HttpFailure:
                connection.close()
                # A server may close an idle connection just as it is used again.
                if fresh or connection.answered:
                    raise
            except BaseException:
                connection.close()
                raise
            else:
                if connection.usable:
                    self._idle.append(connection)
                else:
                    connection.close()
                return

    async def _connection(self) -> tuple[ClientConnection, bool]:
        """A connection, and True if it is new."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection, False
            connection.close()
        server, loop = self.server, asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(ClientConnection, server.host, server.port, ssl=server.tls)
        except OSError as error:
            # asyncio's own text lists every address that was tried.
            raise HttpFailure(
                f"cannot connect to {server.url}: {error_reason(error)}", code="cannot-connect"
            ) from error
        return connection, True


class ClientConnection(asyncio.Protocol):
    """One connection, with at most one request in flight."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None
        self._listener: Callable[[bytes, float], None] | None = None
        self._refusal = bytearray()
        self._status, self._framed, self._keep, self._now_s = 0, False, False, 0.0
        self.answered = False  # a byte has arrived for the request in flight

    @property
    def usable(self) -> bool:
        """True if another request may be sent on this connection."""
        return self._keep and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, listener: BodyListener) -> None:
        """Send a request and wait for the end of its response."""
        if self._transport is None or self._transport.is_closing():
            raise HttpFailure("the server closed the connection", code="connection-closed")
        self._done, self._listener = self._loop.create_future(), listener
        self._parser = httptools.HttpResponseParser(self)
        self._status, self._framed, self._keep, self.answered = 0, False, False, False
        self._refusal.clear()
        self._transport.write(request)
        await self._done
        if self._status != 200:
            raise HttpRefusal(self._status, bytes(self._refusal))

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # Callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have another type, but the same methods.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now_s, self.answered = time.monotonic(), True  # uvloop's own clock counts milliseconds
        if self._done is None or self._done.done():
            self.close()  # data without a request
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(HttpFailure(f"the response is not HTTP: {error}", code="response-not-http"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._status and not self._framed:
            self._end(None)  # a body without a length ends with its connection
        elif not self.answered:
            self._end(HttpFailure("the server closed the connection before it answered", code="closed-before-response"))
        else:
            self._end(
                HttpFailure("the server closed the connection in the middle of its response", code="closed-in-response")
            )

    # Callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._status == 200:
            assert self._listener is not None
            try:
                self._listener(data, self._now_s)
            except Exception as error:  # the parser would replace it by an error of its own
                self._end(error)
        elif len(self._refusal) < MAX_ERROR_BYTES:
            self._refusal += data

    def on_message_complete(self) -> None:
        if self._status >= 200:
            self._keep = self._framed and self._parser.should_keep_alive()
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
