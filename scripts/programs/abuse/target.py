"""Target: connections to the server under abuse, what it answers, and what was not expected."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any, cast

from scripts.programs.abuse.server import Server, Stranger

PATIENCE_S = 200.0  # for an answer; on a busy host 500 prompts take 90
KEPT_BYTES = 2**16  # of a body, its end
BLOCK = 2**18

# An outcome that is no answer.
CLOSED, RESET, TIMEOUT = "closed", "reset", "timeout"


@dataclass(frozen=True)
class Answer:
    """`label` is the status, with the error's code if it has one ("503 overloaded"), or CLOSED, RESET or TIMEOUT. The
    body is its last KEPT_BYTES."""

    label: str
    headers: dict[str, str]
    body: bytes

    def expected(self, labels: Collection[str]) -> bool:
        """In `labels`, where a plain status stands for all its codes, unless it is a 5xx."""
        status = self.label.split()[0]
        return self.label in labels or (status in labels and not status.startswith("5"))


@dataclass(frozen=True)
class Size:
    """Bounds of the load: seconds that a flood lasts, bytes that an endless part has, clients that come at once."""

    flood_s: float = 6.0
    endless_bytes: int = 64 * 2**20
    clients: int = 200
    bodies: int = 30


class Target:
    """A server for the time of one case. A client that sends a key sends `key`."""

    def __init__(self, server: Server | Stranger, key: str | None, size: Size) -> None:
        self.server, self.key, self.size = server, key, size
        self.statuses: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self._log_start = server.log_bytes()

    def log(self) -> str:
        """Output of the server during the case."""
        return self.server.log(self._log_start)

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.unexpected.append(otherwise)

    def record(self, what: str, answer: Answer, expected: Collection[str], says: str = "") -> Answer:
        """Count an answer, and note it if it is not one of the expected, or its body does not say what it should."""
        self.statuses[answer.label] += 1
        if not answer.expected(expected):
            shown = answer.body[:200].decode(errors="replace")
            self.unexpected.append(f"{what}: {answer.label}, not {' or '.join(expected)}: {shown}")
        elif says and answer.label not in (CLOSED, RESET):
            self.check(says.encode() in answer.body, f"{what}: no {says!r} in {answer.body[:200]!r}")
        return answer

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Client]:
        address = self.server.address
        if isinstance(address, str):
            reader, writer = await asyncio.open_unix_connection(address, limit=2**20)
        else:
            reader, writer = await asyncio.open_connection(*address, limit=2**20)
        client = Client(reader, writer)
        try:
            yield client
        finally:
            client.hang_up()

    def head(self, path: str, length: int, *, with_key: bool = True) -> bytes:
        key = f"Authorization: Bearer {self.key}\r\n" if self.key and with_key else ""
        return f"POST {path} HTTP/1.1\r\nHost: x\r\n{key}Content-Length: {length}\r\nConnection: close\r\n\r\n".encode()

    async def post(self, path: str, body: bytes | dict[str, Any]) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.connection() as client:
            await client.pour(self.head(path, len(content)) + content, PATIENCE_S)
            return await client.answer()

    async def get(self, path: str) -> Answer:
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        async with self.connection() as client:
            await client.pour(f"GET {path} HTTP/1.1\r\nHost: x\r\n{key}Connection: close\r\n\r\n".encode(), PATIENCE_S)
            return await client.answer()


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        writer.transport.set_write_buffer_limits(high=0)

    def stop_reading(self) -> None:
        """Take no more of what the server sends."""
        cast(asyncio.Transport, self.writer.transport).pause_reading()  # a stream's writer has a transport both ways

    async def pour(self, data: bytes, seconds: float) -> int:
        """Bytes of `data` that the server's side took within `seconds`, and before it closed."""
        view, taken = memoryview(data), 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(seconds):
                for start in range(0, len(view), BLOCK):
                    self.writer.write(bytes(view[start : start + BLOCK]))
                    await self.writer.drain()
                    taken = min(len(view), start + BLOCK)
        return taken

    async def pour_repeatedly(self, block: bytes, seconds: float, most: int) -> int:
        """Bytes that the server took of `block` again and again, `most` at most, until it answers or closes."""
        taken, loop = 0, asyncio.get_running_loop()
        end = loop.time() + seconds
        answered = asyncio.ensure_future(self.reader.readuntil(b"\r\n"))
        while taken < most and (left := end - loop.time()) > 0 and not answered.done():
            part = await self.pour(block, left)
            taken += part
            if part < len(block):
                break
        if not answered.done():
            answered.cancel()
        with contextlib.suppress(asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            self.first_line = await answered
        return taken

    first_line = b""

    async def answer(self, patience_s: float = PATIENCE_S) -> Answer:
        """The next answer, read to its end: to its length if it has one, else until the server closes."""
        try:
            async with asyncio.timeout(patience_s):
                head = self.first_line + await self.reader.readuntil(b"\r\n\r\n")
                self.first_line = b""
                first, *lines = head.decode("latin-1").strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                length = headers.get("content-length")
                body = await (self.reader.readexactly(int(length)) if length else self._rest())
        except TimeoutError:
            return Answer(TIMEOUT, {}, b"")
        except asyncio.IncompleteReadError:
            return Answer(CLOSED, {}, b"")
        except ConnectionError:
            return Answer(RESET, {}, b"")
        status = first.split()[1]
        return Answer(f"{status} {_code(body)}".strip() if status >= "400" else status, headers, body[-KEPT_BYTES:])

    async def _rest(self) -> bytes:
        kept = b""
        while data := await self.reader.read(2**16):
            kept = (kept + data)[-KEPT_BYTES:]
        return kept

    def hang_up(self) -> None:
        self.writer.transport.abort()


def _code(body: bytes) -> str:
    """The code of an error in the API's shape; "not JSON" if it is none."""
    try:
        return json.loads(body)["error"]["code"] or ""
    except (ValueError, KeyError, TypeError):
        return "not JSON"
