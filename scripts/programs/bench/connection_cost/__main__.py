"""`scripts/bench connection-cost`: what the bounds on connections cost the HTTP server.

Requests per second of processor time, clients included, with Weft's `Connection` and with uvicorn's own protocols, over
an engine that answers at once, each in turn in this one process. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from functools import partial
from statistics import median
from typing import Any

import uvloop
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.pure.worlds import FakeEngine, World, saying
from weft.api.server import server
from weft.http import listen
from weft.http import server as accepting
from weft.http.admission import ConnectionLimits
from weft.http.connection import Connection

ROUNDS, MEASURE_S, CLIENTS = 3, 0.5, 8
ANSWER = "a" * 60  # with the prompt, within the 64 tokens of the tests' engine
BODY = json.dumps({"prompt": "ab", "max_tokens": len(ANSWER), "stream": True, "ignore_eos": True}).encode()
REQUESTS = {
    "health": (b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n", b'{"status":"ok"}'),
    "stream": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
        b"0\r\n\r\n",
    ),
}


def plain(kind: type[asyncio.Protocol], _: Any, *rest: Any, loop: Any = None) -> asyncio.Protocol:
    return kind(*rest[:3], rest[3])  # type: ignore[call-arg]


async def rate(address: tuple[str, int], request: bytes, end: bytes) -> float:
    """Requests per second of processor time, of several clients that wait for each answer."""

    async def ask(until: float) -> int:
        reader, writer = await asyncio.open_connection(*address)
        count = 0
        while time.process_time() < until:
            writer.write(request)
            await reader.readuntil(end)
            count += 1
        writer.close()
        return count

    start = time.process_time()
    counts = await asyncio.gather(*(ask(start + MEASURE_S) for _ in range(CLIENTS)))
    return sum(counts) / (time.process_time() - start)


async def measure(protocol: Any) -> dict[str, float]:
    world = World(FakeEngine(saying(ANSWER)))
    accepting.Connection = protocol  # type: ignore[attr-defined]
    with listen.bind(world.service.options.__class__(port=0)) as listener:
        made = server.ServingServer(world.service, listener, asyncio.Event().wait, ConnectionLimits())
        listen.start_listening(listener, world.service.options)
        running = asyncio.create_task(made.serve(sockets=[listener]))
        rates = {name: await rate(listener.getsockname(), *what) for name, what in REQUESTS.items()}
        made.leave()
        await running
    return rates


def main() -> None:
    argparse.ArgumentParser(prog="scripts/bench connection-cost", description=__doc__.split("\n")[0]).parse_args()
    protocols = {
        "weft": Connection,
        "uvicorn httptools": partial(plain, HttpToolsProtocol),
        "uvicorn h11": partial(plain, H11Protocol),
    }
    taken: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in REQUESTS} for name in protocols}
    for _ in range(ROUNDS):
        for name, protocol in protocols.items():
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                for kind, value in runner.run(measure(protocol)).items():
                    taken[name][kind].append(value)
    rates = {name: {kind: median(values) for kind, values in row.items()} for name, row in taken.items()}
    base = rates["uvicorn httptools"]
    print(
        json.dumps(
            {
                name: {
                    kind: {"per_s": round(value), "ratio": round(value / base[kind], 3)} for kind, value in row.items()
                }
                for name, row in rates.items()
            }
        )
    )


if __name__ == "__main__":
    main()
