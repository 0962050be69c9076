"""A request that ends whatever answers it: through gateways, to one engine, to replicas, and as a line of a batch.

It costs two engines or servers, is refused then, and others are answered. The bug that it meets is in
scripts/programs/abuse/fault.py.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from scripts.programs.abuse.apis import send, upload_of
from scripts.programs.abuse.bodies import COMPLETIONS
from scripts.programs.abuse.case import Life, Outcome
from scripts.programs.abuse.fault import DEADLY, deaths, environment_of
from scripts.programs.abuse.server import KEY, Gateway, Server
from scripts.programs.abuse.target import Size, Target

LOST = 2  # engines or servers that one request may cost
LOST_BY_BATCH = LOST + 1  # the last one alone
BACK_S = 30.0  # until an engine that has died serves again
RESTARTS = ("503 engine_restarts", "503 engine_starts")
REFUSED = "422 request_ends_engines"
# Told before: its engine has died, or nobody was left.
FAILED = (*RESTARTS, "503 no_upstream", "502 closed_before_response")
KILLER = {"prompt": DEADLY, "max_tokens": 4}
HARMLESS = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
TRIES = 6
LINES, AT = 20, 9  # of a batch, and the place of the line that kills
SMALL = ("--max-model-len", "512", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "16")
PAUSE_S = 0.2


@asynccontextmanager
async def neighbours(target: Target, *allowed: str) -> AsyncIterator[None]:
    """Three clients that ask one request after the other while the block runs."""

    async def ask() -> None:
        while True:
            target.record("a neighbour", await target.post(COMPLETIONS, HARMLESS), ("200", *allowed))
            await asyncio.sleep(PAUSE_S)

    asking = [asyncio.create_task(ask()) for _ in range(3)]
    try:
        yield
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def kill(target: Target, folder: Path, allowed: tuple[str, ...]) -> None:
    """Ask the request until it is refused, then again and again; afterwards others are answered soon."""
    async with neighbours(target, *allowed):
        await asyncio.sleep(1)
        for number in range(TRIES):
            answer = target.record(f"try {number}", await target.post(COMPLETIONS, KILLER), (REFUSED, *FAILED))
            if answer.label == REFUSED:
                break
            await asyncio.sleep(1)
        for _ in range(3):
            target.record("afterwards", await target.post(COMPLETIONS, KILLER), (REFUSED,))
    target.check(deaths(folder) <= LOST, f"{deaths(folder)} deaths")
    await serves(target)


async def serves(target: Target) -> None:
    """A harmless request is answered within BACK_S."""
    deadline = time.monotonic() + BACK_S
    label = ""
    while time.monotonic() < deadline and label != "200":
        label = (await target.post(COMPLETIONS, HARMLESS)).label
        await asyncio.sleep(PAUSE_S)
    target.check(label == "200", f"not served again within {BACK_S:g} s: {label}")


@contextmanager
def faulty(words: tuple[str, ...], number: int, *, of_server: bool) -> Iterator[tuple[Path, list[Server], ExitStack]]:
    """Servers with the fault."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = environment_of(folder, of_server=of_server)
        one = partial(Server, *words, *SMALL, environment=environment, wait=False)
        servers = [stack.enter_context(one()) for _ in range(number)]
        for server in servers:
            server.wait_until_served()
        yield folder, servers, stack


def through_gateway(number: int, of_server: bool, words: tuple[str, ...]) -> Outcome:
    """A gateway before several servers of one rank each; those that end as a whole are not started again."""
    with faulty((words[0], "-tp", "1"), number, of_server=of_server) as (folder, servers, stack):
        upstreams = [word for server in servers for word in ("--upstream", url(server))]
        gateway = stack.enter_context(Gateway(*upstreams))
        target = Target(gateway, KEY, Size())
        # A neighbour's request that both have when they die is not asked a third time.
        lost = ("502 closed_before_response",) if of_server else ()
        asyncio.run(kill(target, folder, lost if number > LOST else ("503 no_upstream", *RESTARTS)))
        alive = sum(server.process.poll() is None for server in servers)
        target.check(alive >= (number - LOST if of_server else number), f"{alive} of {number} servers live")
        target.check(gateway.process.poll() is None, "the gateway has ended")
        return outcome(target, gateway, servers)


def url(server: Server) -> str:
    assert not isinstance(server.address, str)
    return f"http://{server.address[0]}:{server.address[1]}"


def in_server(more: tuple[str, ...], allowed: tuple[str, ...], words: tuple[str, ...]) -> Outcome:
    """One server, whose engines are started again by it."""
    with faulty((words[0], *more), 1, of_server=False) as (folder, (server,), _):
        target = Target(server, KEY, Size())
        asyncio.run(kill(target, folder, allowed))
        return outcome(target, server, [server])


def outcome(target: Target, ended: Server, others: list[Server]) -> Outcome:
    for server in {ended, *others}:
        target.check("Traceback" not in server.log(), f"a traceback: {server.log()[-500:]}")
    return Outcome(dict(target.statuses), target.unexpected, round(ended.terminate(), 2))


def line(number: int) -> str:
    body = KILLER if number == AT else HARMLESS
    return json.dumps({"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}) + "\n"


def in_batch(of_server: bool, words: tuple[str, ...]) -> Outcome:
    """A line among others. A server that ends as a whole is started again by this, as a supervisor would."""
    with faulty((words[0], "-tp", "1"), 0, of_server=of_server) as (folder, _, stack):
        environment = environment_of(folder, of_server=of_server)
        storage = ("--storage-directory", str(folder / "storage"))
        start = partial(Server, words[0], "-tp", "1", *SMALL, *storage, environment=environment)
        server = stack.enter_context(start())
        target = Target(server, KEY, Size())
        batch = asyncio.run(begin_batch(target))
        found: dict[str, Any] = {}
        for _ in range(LOST_BY_BATCH + 1):
            found = asyncio.run(end_of(target, batch))
            if found:
                break
            target.check(of_server, f"the server has ended: {server.log()[-500:]}")
            server.kill()
            server = stack.enter_context(start())
            target = after(target, server)
        counts = found.get("request_counts", {})
        target.check(found.get("status") == "completed", f"the batch: {found}")
        target.check(
            (counts.get("completed"), counts.get("failed")) == (LINES - 1, 1), f"lines answered and failed: {counts}"
        )
        target.check(deaths(folder) <= LOST_BY_BATCH, f"{deaths(folder)} deaths")
        asyncio.run(serves(target))
        return outcome(target, server, [])


def after(target: Target, server: Server) -> Target:
    """The target of a server that takes another one's place."""
    new = Target(server, KEY, target.size)
    new.statuses, new.unexpected = target.statuses, target.unexpected
    return new


async def begin_batch(target: Target) -> str:
    fields, content = upload_of("".join(map(line, range(LINES))).encode())
    answer = target.record("the file", await send(target, "/v1/files", fields, content), ("200",))
    asked = {"input_file_id": json.loads(answer.body)["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    return str(json.loads(target.record("the batch", await target.post("/v1/batches", asked), ("200",)).body)["id"])


async def end_of(target: Target, batch: str) -> dict[str, Any]:
    """The batch once it has ended; empty if the server ends first."""
    deadline = time.monotonic() + 4 * BACK_S
    found: dict[str, Any] = {}
    while time.monotonic() < deadline:
        try:
            answer = await target.get(f"/v1/batches/{batch}")
        except OSError:
            return {}
        if answer.label != "200":
            return {}
        found = json.loads(answer.body)
        if found["status"] not in ("validating", "in_progress", "finalizing"):
            break
        await asyncio.sleep(PAUSE_S)
    return found


def life(name: str, live: Callable[[tuple[str, ...]], Outcome]) -> Life:
    return Life(f"killer-{name}", "killers", live)


LIVES = (
    life("one-engine", partial(in_server, ("-tp", "1"), RESTARTS)),
    life("replicas", partial(in_server, ("-tp", "1", "-dp", "2"), RESTARTS)),
    life("gateway-of-2-engines", partial(through_gateway, 2, False)),
    life("gateway-of-3-engines", partial(through_gateway, 3, False)),
    life("gateway-of-3-servers", partial(through_gateway, 3, True)),
    life("batch-engine", partial(in_batch, False)),
    life("batch-server", partial(in_batch, True)),
)
