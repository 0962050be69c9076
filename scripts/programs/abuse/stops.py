"""The end of a server under each kind of load: seconds from SIGTERM, and what clients are told."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial

from scripts.programs.abuse.case import Life, Outcome
from scripts.programs.abuse.connections import MODELS
from scripts.programs.abuse.server import KEY, Server
from scripts.programs.abuse.target import CLOSED, RESET, Answer, Size, Target

COMPLETIONS = "/v1/completions"
LOAD_S = 3.0  # from the first request of a load to SIGTERM
BUSY_S = 60.0  # that clients go on with after SIGTERM, at most
SHUT = "503 shutting_down"
LONG = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True}
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

Load = Callable[[Target], Awaitable[None]]


async def idle(target: Target) -> None:
    """No load."""


async def streams(target: Target) -> None:
    """Streams that would go on for minutes."""

    async def stream() -> None:
        answer = await target.post(COMPLETIONS, LONG | {"stream": True})
        whole = b"[DONE]" in answer.body or b'"error"' in answer.body
        target.record("stream", answer, ("200", SHUT))
        target.check(whole or answer.label != "200", f"a stream ends without a word: {answer.body[-100:]!r}")

    await asyncio.gather(*(stream() for _ in range(32)))


async def choices(target: Target) -> None:
    """Streams of many choices and stop strings."""
    body = LONG | {"n": 64, "temperature": 1, "stream": True, "stop": [f"zq{number}" for number in range(64)]}
    answers = await asyncio.gather(*(target.post(COMPLETIONS, body) for _ in range(4)))
    for answer in answers:
        target.record("choices", answer, ("200", SHUT))


async def half_bodies(target: Target) -> None:
    """Bodies that do not come to their end."""

    async def begin() -> None:
        async with target.connection() as client:
            await client.pour(target.head(COMPLETIONS, 1000) + b'{"prompt":', 5)
            target.record("half a body", await client.answer(), (SHUT,))

    await asyncio.gather(*(begin() for _ in range(100)))


async def large_bodies(target: Target) -> None:
    """Large bodies, one after the other, of several clients."""
    body = b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 9000) + b"]}"

    async def ask() -> None:
        while True:
            answer = await target.post("/v1/chat/completions", body)
            target.record("a large body", answer, ("400", SHUT, "503 overloaded", CLOSED, RESET))

    with contextlib.suppress(OSError):
        async with asyncio.timeout(BUSY_S):
            await asyncio.gather(*(ask() for _ in range(8)))


async def templates(target: Target) -> None:
    """Chats whose template would run for hours."""

    async def ask() -> Answer:
        return await target.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})

    for answer in await asyncio.gather(*(ask() for _ in range(8))):
        target.record("template", answer, ("400", SHUT, "503 overloaded", CLOSED, RESET))


async def pipelines(target: Target) -> None:
    """Requests ahead of their answers, which nobody reads."""
    async with target.connection() as client:
        client.stop_reading()
        await client.pour((MODELS + b"\r\n") * 10**5, BUSY_S)


def stop_rank(server: Server) -> None:
    server.ranks()[-1].send_signal(signal.SIGSTOP)


def stop_core(server: Server) -> None:
    server.core().send_signal(signal.SIGSTOP)


def no_harm(server: Server) -> None:
    """Do nothing to a server before SIGTERM."""


def end_under(load: Load, harm: Callable[[Server], None], more: tuple[str, ...], words: tuple[str, ...]) -> Outcome:
    """SIGTERM some seconds after the load has begun."""
    with Server(*words, *more) as server:
        target = Target(server, KEY, Size())
        took_s = asyncio.run(_end(server, target, load, harm))
        target.check("Traceback" not in target.log(), "a traceback in the log")
    return Outcome(dict(target.statuses), target.unexpected, took_s)


async def _end(server: Server, target: Target, load: Load, harm: Callable[[Server], None]) -> float:
    running = asyncio.ensure_future(load(target))
    await asyncio.sleep(LOAD_S)
    await asyncio.to_thread(harm, server)
    took_s = await asyncio.to_thread(server.terminate)
    try:
        async with asyncio.timeout(BUSY_S):
            await running
    except (TimeoutError, OSError) as error:
        target.unexpected.append(f"a client after the end: {error!r}")
    return round(took_s, 2)


def second_signal(words: tuple[str, ...]) -> Outcome:
    """A second SIGTERM while requests still run: they are told that the server ends."""
    with Server(*words) as server:
        target = Target(server, KEY, Size())
        took_s = asyncio.run(_end_twice(server, target))
        target.check("Traceback" not in target.log(), "a traceback in the log")
    return Outcome(dict(target.statuses), target.unexpected, took_s)


async def _end_twice(server: Server, target: Target) -> float:
    whole = [asyncio.create_task(target.post(COMPLETIONS, LONG)) for _ in range(8)]
    parts = [asyncio.create_task(target.post(COMPLETIONS, LONG | {"stream": True})) for _ in range(8)]
    await asyncio.sleep(LOAD_S)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(1)
    began = time.monotonic()
    await asyncio.to_thread(server.terminate)
    took_s = round(time.monotonic() - began, 2)
    for answer in await asyncio.gather(*whole):
        target.record("a request", answer, (SHUT,))
    for answer in await asyncio.gather(*parts):
        target.record("a stream", answer, ("200",), says='"shutting_down"')
    return took_s


def life(
    name: str, finding: str, load: Load, harm: Callable[[Server], None] = no_harm, more: tuple[str, ...] = ()
) -> Life:
    return Life(f"end-{name}", finding, partial(end_under, load, harm, more))


LIVES = (
    life("idle", "1", idle),
    life("streams", "1, 15", streams),
    life("choices", "1", choices),
    life("half-bodies", "14", half_bodies),
    life("large-bodies", "9", large_bodies),
    life("templates", "18", templates, more=("--chat-template", NESTED)),
    life("pipelines", "4", pipelines),
    life("stopped-rank", "15", streams, stop_rank),
    life("stopped-core", "15", streams, stop_core),
    life("stopped-rank-idle", "15", idle, stop_rank),
    Life("end-twice", "21", second_signal),
)
