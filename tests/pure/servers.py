"""HTTP servers of the tests: one that answers as it is told, that of `weft serve` in a test's loop; raw clients."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import uvicorn.server

from tests.pure.worlds import World
from weft.api.server.server import ServingServer
from weft.http import listen
from weft.http.admission import ConnectionLimits
from weft.http.options import ServeOptions
from weft.study.bench.http import ServerAddress

PATIENCE_S = 60.0  # for what must happen some time
POLL_S = 0.002


def poll_often() -> None:
    """Have uvicorn look after 2 ms, not 100, whether the connections of a server that ends are gone."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, POLL_S))

    uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": sleep})  # type: ignore[assignment]


poll_often()


class Exchange:
    """One request that has come in, and the way to answer it."""

    def __init__(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        self.path, self.headers, self.writer = path, headers, writer
        self.json = json.loads(body) if body else None
        self.kept = True

    def head(self, status: str = "200 OK", *lines: str) -> None:
        self.writer.write("\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode())

    def chunk(self, data: bytes) -> None:
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def stream(self) -> None:
        self.head("200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked")

    def event(self, value: Any) -> None:
        self.chunk(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")

    def end(self) -> None:
        self.chunk(b"")

    def refuse(self, status: str, body: bytes) -> None:
        self.head(status, f"Content-Length: {len(body)}")
        self.writer.write(body)

    def hang_up(self) -> None:
        self.kept = False


Answering = Callable[[Exchange], Awaitable[None]]


@asynccontextmanager
async def serving(answering: Answering) -> AsyncIterator[ServerAddress]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                exchange = Exchange(first.split()[1], headers, body, writer)
                await answering(exchange)
                await writer.drain()
                if not exchange.kept:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield ServerAddress(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {"X-Team": "blue"})


async def good(exchange: Exchange) -> None:
    exchange.stream()
    for _ in range(exchange.json["max_tokens"]):
        exchange.event({"choices": [{"text": "a", "finish_reason": None}]})
    exchange.event({"choices": [{"text": "", "finish_reason": "length"}]})
    tokens = len(exchange.json["prompt"]), exchange.json["max_tokens"]
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "prompt_tokens_details": {"cached_tokens": 1}}
    exchange.event({"choices": [], "usage": usage})
    exchange.event(b"[DONE]")
    exchange.end()


class Client:
    """A raw connection: what a test writes is all that is said."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, header fields and body of the next response, whose length must be told."""
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(first.split()[1]), headers, await self.reader.readexactly(int(headers.get("content-length", 0)))

    async def rest(self) -> bytes:
        """All that comes until the server ends the connection."""
        return await asyncio.wait_for(self.reader.read(), PATIENCE_S)


class Live:
    """The HTTP server of `weft serve` in this event loop."""

    def __init__(self, server: ServingServer, listener: socket.socket) -> None:
        self.server = server
        self._address = listener.getsockname()
        self._clients: list[Client] = []

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self._address[:2])

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection(*self._address))
        self._clients.append(client)
        return client

    async def close(self) -> None:
        """Hang up, and end the server."""
        for client in self._clients:
            client.writer.transport.abort()
            with suppress(OSError):
                await client.writer.wait_closed()
        self.server.leave()


@asynccontextmanager
async def weft_server(world: World, **limits: Any) -> AsyncIterator[Live]:
    """A server over a world's service; `limits` are of ConnectionLimits."""
    with listen.bind(ServeOptions(port=0)) as listener:
        server = ServingServer(world.service, listener, asyncio.Event().wait, ConnectionLimits(**limits))
        live = Live(server, listener)
        listen.start_listening(listener, world.service.options)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield live
        finally:
            await live.close()
            await running
