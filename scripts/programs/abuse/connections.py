"""Attacks on connections: pipelining, heads, bodies and clients without an end."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from scripts.programs.abuse.case import Attack, Served
from scripts.programs.abuse.target import CLOSED, TIMEOUT, Target

MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
MAX_UNREAD_BYTES = 32 * 2**20  # bytes that a server and the kernels between may take from a client that reads nothing
MAX_HELD_BYTES = 160 * 2**20  # bytes of unfinished requests: 128 MiB, and what malloc adds
FILES = 128
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"NONSENSE\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
)


async def pipeline_unread(target: Target) -> None:
    """Requests without a key in blocks of 1,000, and not one answer read."""
    async with target.connection() as client:
        client.stop_reading()
        block, taken = (MODELS + b"\r\n") * 1000, 0
        end = time.monotonic() + target.size.flood_s
        while (left := end - time.monotonic()) > 0 and taken <= MAX_UNREAD_BYTES:
            taken += await client.pour(block, left)
        target.check(taken <= MAX_UNREAD_BYTES, f"{taken:,} bytes were taken from a client that reads nothing")


async def pipeline_read(target: Target) -> None:
    """Requests ahead of their answers, all of which are read."""
    key = f"Authorization: Bearer {target.key}\r\n".encode() if target.key else b""
    async with target.connection() as client:
        sending = asyncio.create_task(client.pour((MODELS + key + b"\r\n") * 1000, target.size.flood_s * 5))
        for number in range(1000):
            answer = target.record(f"request {number}", await client.answer(), ("200",))
            if answer.label != "200":
                break
        await sending


async def endless(start: bytes, block: bytes, status: str, target: Target) -> None:
    """A head that never ends."""
    async with target.connection() as client:
        await client.pour(start, 1)
        taken = await client.pour_repeatedly(block, target.size.flood_s, target.size.endless_bytes)
        target.record(f"{taken:,} bytes of a head", await client.answer(), (status,))


async def connections_dropped(target: Target) -> None:
    """Clients that connect and leave, with and without half a request."""
    for number in range(target.size.clients):
        async with target.connection() as client:
            if number % 2:
                await client.pour(target.head("/v1/completions", 1000) + b'{"prompt":', 5)
    target.record("afterwards", await target.get("/v1/models"), ("200",))


async def silent_clients(target: Target) -> None:
    """Clients that send nothing, half a head, or half a body, and stay."""

    async def stay(sent: bytes, expected: str, within_s: float) -> None:
        async with target.connection() as client:
            await client.pour(sent, 5)
            began = time.monotonic()
            target.record(f"after {sent[:40]!r}", await client.answer(within_s + 20), (expected,))
            took_s = time.monotonic() - began
            target.check(took_s < within_s + 5, f"given up after {took_s:.1f} s, not {within_s:g}: {sent[:40]!r}")

    half_a_body = target.head("/v1/completions", 1000) + b'{"prompt"'
    each = target.size.clients // 4
    await asyncio.gather(
        *(stay(b"", CLOSED, 10) for _ in range(each)),
        *(stay(MODELS, "408", 10) for _ in range(each)),
        *(stay(half_a_body, "408", 30) for _ in range(each)),
    )


async def unfinished_bodies(target: Target) -> None:
    """Bodies of nearly the longest kind that never come to their end, and one that is over the limit."""
    before = target.server.memory_bytes()
    length = 8 * 2**20 - 1000
    block = b'{"prompt": "' + b"a" * (length - 13)

    async def begin(number: int) -> None:
        async with target.connection() as client:
            await client.pour(target.head("/v1/completions", length), 5)
            await client.pour(block, 20)
            answer = await client.answer(max(0.1, end - time.monotonic()))
            if answer.label != TIMEOUT:  # it is still held, as some may be
                target.record(f"unfinished body {number}", answer, ("503 too_many_unfinished", "503 overloaded"))

    end = time.monotonic() + target.size.flood_s
    running = [asyncio.create_task(begin(number)) for number in range(target.size.bodies)]
    await asyncio.sleep(target.size.flood_s - 1)
    now = target.server.memory_bytes()
    await asyncio.gather(*running)
    if before is not None and now is not None:
        target.check(now - before <= MAX_HELD_BYTES, f"unfinished bodies take {now - before:,} bytes")
    async with target.connection() as client:
        await client.pour(target.head("/v1/completions", 9 * 2**20) + b"a" * 2**20, 5)
        target.record("a body over the limit", await client.answer(), ("413 body_too_large",))


async def http_1_0(target: Target) -> None:
    """A stream for a client that knows no chunks."""
    body = b'{"prompt": "a", "max_tokens": 3, "stream": true}'
    async with target.connection() as client:
        await client.pour(target.head("/v1/completions", len(body)).replace(b"HTTP/1.1", b"HTTP/1.0") + body, 5)
        answer = target.record("HTTP/1.0", await client.answer(), ("200",), says="data: [DONE]")
        target.check(answer.body.startswith(b"data: "), f"chunk sizes in HTTP/1.0: {answer.body[:40]!r}")


async def garbage(target: Target) -> None:
    """Bytes that are not HTTP."""
    for sent in GARBAGE:
        async with target.connection() as client:
            await client.pour(sent, 5)
            target.record(repr(sent[:40]), await client.answer(), ("400 invalid_http",))


async def upgrade_bodies(target: Target) -> None:
    """Bodies of requests for another protocol that look like a request of their own; none is answered as one."""
    key = f"Authorization: Bearer {target.key}\r\n".encode() if target.key else b""
    inner = MODELS + key + b"\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
    for protocol in (b"websocket", b"h2c"):
        for framing, body in ((b"Content-Length: %d" % len(inner), inner), (b"Transfer-Encoding: chunked", chunks)):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + key + b"Connection: Upgrade\r\nUpgrade: "
            async with target.connection() as client:
                await client.pour(head + protocol + b"\r\n" + framing + b"\r\n\r\n" + body, 5)
                target.record(f"Upgrade: {protocol!r}, {framing!r}", await client.answer(), ("400 invalid_value",))
                second = await client.answer(1)
                target.check(second.label in (TIMEOUT, CLOSED), f"the body was answered: {second.label}")
    async with target.connection() as client:
        await client.pour(b"CONNECT example.com:80 HTTP/1.1\r\nHost: x\r\n\r\n" + inner, 5)
        target.record("CONNECT", await client.answer(), ("400 invalid_http",))


async def descriptors(target: Target) -> None:
    """More idle connections than a server with few open files may have."""
    idle = [target.connection() for _ in range(200)]
    clients = [await one.__aenter__() for one in idle]
    await asyncio.sleep(1)
    for path in ("/health/live", "/health/ready"):
        target.record(path, await target.get(path), ("200",))
    target.record("/v1/models", await target.get("/v1/models"), ("503 too_many_connections",))
    lines = target.log().count("connections are open, the most that are served")
    target.check(lines == 1, f"{lines} lines of the log tell that connections are refused, not 1")
    for client in clients:
        client.hang_up()
    await asyncio.sleep(1)
    target.record("afterwards", await target.get("/v1/models"), ("200",))


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
ATTACKS = (
    Attack("pipeline-unread", "4", pipeline_unread),
    Attack("pipeline-read", "4", pipeline_read),
    Attack("endless-headers", "5", partial(endless, GET, b"X-i: aaa\r\n" * 10000, "431")),
    Attack("endless-url", "5", partial(endless, b"GET /", b"a" * 100000, "414")),
    Attack("endless-value", "5", partial(endless, GET + b"X-i: ", b"a" * 100000, "431")),
    Attack("connections-dropped", "6", connections_dropped),
    Attack("silent-clients", "6", silent_clients),
    Attack("unfinished-bodies", "10, 20", unfinished_bodies),
    Attack("http-1.0", "19", http_1_0),
    Attack("garbage", "25", garbage),
    Attack("upgrade-bodies", "Upgrade", upgrade_bodies),
    Attack("descriptors", "6", descriptors, Served(files=FILES)),
)
