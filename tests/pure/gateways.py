"""A gateway in the test's event loop, in front of small servers that answer as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.pure.servers import PATIENCE_S, Client, Exchange, serving
from weft.fleet.gateway.proxy import Proxy
from weft.fleet.gateway.server import GatewayServer, create_proxy
from weft.fleet.upstreams.config import make_config
from weft.fleet.upstreams.replica import UpstreamReplica
from weft.http import listen
from weft.http.admission import ConnectionLimits
from weft.http.options import ServeOptions
from weft.study.bench.http import ServerAddress

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


class Upstream:
    """A server whose `answer` a test may change. `seen`: the requests that came, checks excepted."""

    def __init__(self) -> None:
        self.seen: list[Exchange] = []
        self.answer: Callable[[Exchange], Awaitable[None]] = answer_json
        self.url = ""

    async def __call__(self, exchange: Exchange) -> None:
        self.seen.append(exchange)
        await self.answer(exchange)


async def answer_json(exchange: Exchange) -> None:
    body = b'{"ok": true}'
    exchange.head("200 OK", "Content-Type: application/json", f"Content-Length: {len(body)}")
    exchange.writer.write(body)


async def answer_events(exchange: Exchange) -> None:
    exchange.stream()
    for number in range(3):
        exchange.event({"number": number})
    exchange.event(b"[DONE]")
    exchange.end()


def answer_status(status: str, *lines: str, body: bytes = b"{}") -> Callable[[Exchange], Awaitable[None]]:
    async def answer(exchange: Exchange) -> None:
        exchange.head(status, *lines, f"Content-Length: {len(body)}")
        exchange.writer.write(body)

    return answer


async def hang_up(exchange: Exchange) -> None:
    exchange.hang_up()


async def never(exchange: Exchange) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    stub = Upstream()
    async with serving(stub) as address:
        stub.url = ServerAddress(address.url).url
        yield stub


class LiveGateway:
    """A gateway that serves; its checks run only as tests call them."""

    def __init__(self, proxy: Proxy, server: GatewayServer, address: tuple[str, int]) -> None:
        self.proxy, self.server = proxy, server
        self.address = address
        self.stubs: list[Upstream] = []
        self._connected: list[Client] = []
        # Without TLS, whose certificates take 50 ms to be read.
        url = f"http://{address[0]}:{address[1]}"
        self.client = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=False)

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={**CHAT, **fields})

    async def connect(self) -> Client:
        self._connected.append(Client(*await asyncio.open_connection(*self.address)))
        return self._connected[-1]

    async def hang_up(self) -> None:
        """Close the connections of all clients."""
        await self.client.aclose()
        for client in self._connected:
            client.writer.transport.abort()
            with suppress(OSError):
                await client.writer.wait_closed()

    def replica(self, stub: Upstream) -> UpstreamReplica:
        return self.proxy.fleet.find(stub.url)

    def assert_idle(self) -> None:
        """Nothing counts as running."""
        assert not self.proxy.running and not self.proxy.bodies.held
        for replica in self.proxy.fleet.replicas.values():
            assert not replica.connections and not replica.unanswered and not replica.movable


@asynccontextmanager
async def gateway(*urls: str, admin_key: str | None = None, **config: Any) -> AsyncIterator[LiveGateway]:
    """A gateway in front of these URLs, or of the `upstreams` in `config`."""
    timeouts = {**dict.fromkeys(("connect", "first_byte", "idle"), PATIENCE_S), "wait": 0.0}
    values = {"upstreams": [{"url": url} for url in urls], "timeouts": timeouts}
    made = make_config({**values, **config})
    if made.keys is not None:
        Path(made.keys).chmod(0o600)
    proxy = create_proxy(made, admin_key)
    options = ServeOptions(port=0, ssl_certfile=made.ssl_certfile, ssl_keyfile=made.ssl_keyfile)
    with listen.bind(options) as listener:
        server = GatewayServer(proxy, listener, ConnectionLimits(), options, 1.0)
        listen.start_listening(listener, options)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        live = LiveGateway(proxy, server, listener.getsockname()[:2])
        try:
            yield live
        finally:
            await live.hang_up()
            server.leave()
            await running
            proxy.close()
