"""Load on an HTTP server of OpenAI's API: clients that keep their connections, and their figures.

Nothing here is imported by Weft, nor imports it: both ends and their client use it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

SAID = "The quick brown fox jumps over the lazy dog, and nobody in the village asks why it did so on a Monday. "
ASKED = "Tell me, in a few words and without any haste, what the fox did on that day, and who has seen it. " * 2
CLIENTS = 32
CHAT = "/v1/chat/completions"


def request(stream: bool, tokens: int) -> bytes:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": ASKED}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.5,
        "stream": stream,
    }
    content = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@dataclass
class Figures:
    """Answers of one stretch: their number, seconds of each, and events of their streams."""

    seconds: list[float] = field(default_factory=list)
    events: int = 0
    tokens: int = 0

    def percentile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)

    def close(self) -> None:
        self._writer.close()

    async def ask(self, asked: bytes) -> bytes:
        """Body of the answer; chunks of a stream as they came."""
        self._writer.write(asked)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        lowered = head.lower()
        if b"transfer-encoding: chunked" in lowered:
            return await self._reader.readuntil(b"\r\n0\r\n\r\n")
        length = int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])
        return await self._reader.readexactly(length)


async def saturate(port: int, seconds: float, *, stream: bool, tokens: int) -> tuple[Figures, float]:
    """CLIENTS clients that each ask, at least once, as soon as they are answered; their figures and the seconds that it
    took, without those of connecting."""
    asked, figures = request(stream, tokens), Figures()
    clients = [Client(port) for _ in range(CLIENTS)]
    for client in clients:
        await client.open()
    began = time.perf_counter()

    async def go_on(client: Client) -> None:
        at = began
        while True:
            body = await client.ask(asked)
            answered = time.perf_counter()
            figures.seconds.append(answered - at)
            figures.tokens += tokens
            figures.events += body.count(b'"content":"')
            if answered >= began + seconds:
                return
            at = answered

    await asyncio.gather(*(go_on(client) for client in clients))
    ended = time.perf_counter()
    for client in clients:
        client.close()
    return figures, ended - began


async def paced(port: int, seconds: float, rate: float, *, tokens: int) -> Figures:
    """Requests at a fixed rate, each on a connection that is free; a latency counts from when it was due."""
    asked, figures = request(False, tokens), Figures()
    free: list[Client] = []
    began = time.perf_counter()

    async def one(due: float) -> None:
        if free:
            client = free.pop()
        else:
            client = Client(port)
            await client.open()
        await client.ask(asked)
        figures.seconds.append(time.perf_counter() - due)
        free.append(client)

    tasks = []
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if (left := due - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)
    for client in free:
        client.close()
    return figures


async def wait_until_served(port: int, patience_s: float, alive: Callable[[], bool]) -> None:
    """Return once a request is answered. Raises TimeoutError, and RuntimeError if the server has ended."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if not alive():
            raise RuntimeError(f"the server at port {port} has ended")
        try:
            client = Client(port)
            await client.open()
            await client.ask(request(True, 4))
            client.close()
            return
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.5)
    raise TimeoutError(f"nothing is served at port {port}")
