"""A small HTTP/1.1 client for streamed answers: what it costs per event is the parser, which is C, and one call."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from weft.errors import ConfigError, WeftError, error_reason

MOST_ERROR_BYTES = 65_536  # of a refusal's body that are kept


class HttpFailure(WeftError):
    """A request that got no whole answer."""


class Refused(HttpFailure):
    """An answer with another status than 200; `body` is what it said."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body = status, body


class Heard(Protocol):
    """Takes each piece of a body with the time of its arrival, by the monotonic clock."""

    def __call__(self, data: bytes, now_s: float, /) -> None: ...


class Server:
    """Where requests go: scheme, host and port of `url`, the path before every endpoint's, and the headers of all."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"{url!r} is no address of a server; write it as http://127.0.0.1:8000")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.host, self.port = parts.hostname, port or (443 if self.tls else 80)
        self.path = parts.path.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{parts.scheme}://{host}:{self.port}{self.path}"
        lines = {"Host": f"{host}:{self.port}", "User-Agent": "weft-bench", **(headers or {})}
        self.head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())


class Client:
    """Requests to one server. Connections are kept and used again; as many are open as requests are under way."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes, heard: Heard) -> None:
        """Send JSON and give each piece of the answer's body to `heard`. Raises Refused, HttpFailure."""
        head = f"POST {self.server.path}{path} HTTP/1.1\r\n{self.server.head}Accept: text/event-stream\r\n"
        request = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        await self._exchange(request, heard)

    async def get(self, path: str) -> bytes:
        """The body of an answer."""
        pieces: list[bytes] = []
        request = f"GET {self.server.path}{path} HTTP/1.1\r\n{self.server.head}\r\n".encode()
        await self._exchange(request, lambda data, _: pieces.append(data))
        return b"".join(pieces)

    def close(self) -> None:
        """Hang up."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, request: bytes, heard: Heard) -> None:
        while True:
            connection, fresh = await self._connection()
            try:
                await connection.exchange(request, heard)
            except HttpFailure:
                connection.close()
                # A server may hang up on an idle connection in the very moment in which it is used again.
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

    async def _connection(self) -> tuple[Connection, bool]:
        """A connection, and whether it is new."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection, False
            connection.close()
        server, loop = self.server, asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(Connection, server.host, server.port, ssl=server.tls)
        except OSError as error:
            # asyncio's own text names every address that was tried.
            raise HttpFailure(f"cannot connect to {server.url}: {error_reason(error)}") from error
        return made, True


class Connection(asyncio.Protocol):
    """One connection, with at most one request under way."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None
        self._heard: Callable[[bytes, float], None] | None = None
        self._refusal = bytearray()
        self._status, self._framed, self._keep, self._now_s = 0, False, False, 0.0
        self.answered = False  # a byte has come for the request under way

    @property
    def usable(self) -> bool:
        """Whether another request may go this way."""
        return self._keep and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, heard: Heard) -> None:
        """Send a request and hear its answer to the end."""
        if self._transport is None or self._transport.is_closing():
            raise HttpFailure("the server hung up")
        self._done, self._heard = self._loop.create_future(), heard
        self._parser = httptools.HttpResponseParser(self)
        self._status, self._framed, self._keep, self.answered = 0, False, False, False
        self._refusal.clear()
        self._transport.write(request)
        await self._done
        if self._status != 200:
            raise Refused(self._status, bytes(self._refusal))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none by type, but in all they do.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now_s, self.answered = time.monotonic(), True  # uvloop's own clock counts milliseconds
        if self._done is None or self._done.done():
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(HttpFailure(f"the answer is no HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._status and not self._framed:
            self._end(None)  # a body without a length ends with its connection
        elif not self.answered:
            self._end(HttpFailure("the server hung up before it answered"))
        else:
            self._end(HttpFailure("the server cut the answer off"))

    # The parser's side

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._status == 200:
            assert self._heard is not None
            try:
                self._heard(data, self._now_s)
            except Exception as error:  # the parser would hide it behind one of its own
                self._end(error)
        elif len(self._refusal) < MOST_ERROR_BYTES:
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
