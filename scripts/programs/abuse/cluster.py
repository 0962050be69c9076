"""Attacks on the network between the nodes of one engine, by somebody without the key. Both nodes are this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from scripts.programs.abuse.case import Life, Outcome
from scripts.programs.abuse.server import KEY, Server
from scripts.programs.abuse.target import Size, Target

ADDRESS = "127.0.0.1"
FLOOD = 1000  # connections to each port; 300 were enough to see that gloo kept them
SETTLE_S = 10.0  # seconds for the head to close connections that prove nothing, which it does within 5
ASK = {"prompt": "a", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def flood_of_ports(words: tuple[str, ...]) -> Outcome:
    """Connections to every port that a process of the engine has a socket at, before and while it answers: none of its
    processes ends, nothing is kept of them, and answers stay what they were."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        head, node = (stack.enter_context(server) for server in _start(words, folder))
        head.wait_until_served()
        target = Target(head, KEY, Size())
        first = target.record("before", asyncio.run(target.post("/v1/completions", ASK)), ("200",))
        ranks = [rank for server in (head, node) for rank in server.ranks()]
        target.check(len(ranks) == 2, f"{len(ranks)} ranks")
        target.check(not any(map(_listens, ranks)), "a rank listens while the engine runs")
        processes = [process for server in (head, node) for process in server.processes()]
        before = [process.num_fds() for process in processes]
        _flood(sorted({port for process in processes for port in _ports(process)}))
        during = target.record("during", asyncio.run(target.post("/v1/completions", ASK)), ("200",))
        target.check(_text(during.body) == _text(first.body), f"another answer: {during.body!r}")
        target.check(_settles(processes, before), f"descriptors: {before} before, {_descriptors(processes)} after")
        target.record("after", asyncio.run(target.post("/v1/completions", ASK)), ("200",))
        target.check(all(rank.is_running() for rank in ranks), "a rank has ended")
        for server in (head, node):
            target.check("Traceback" not in server.log(), f"a traceback: {server.log()[-300:]}")
        return Outcome(dict(target.statuses), target.unexpected, round(head.terminate(), 2))


def _start(words: tuple[str, ...], folder: Path) -> tuple[Server, Server]:
    """The head and the other node, of one rank each, that have begun to start."""
    key = folder / "cluster.key"
    key.write_text(os.urandom(32).hex())
    key.chmod(0o600)
    with socket.create_server((ADDRESS, 0)) as free:
        port = free.getsockname()[1]
    joined = ("--nnodes", "2", "--master-addr", ADDRESS, "--master-port", str(port), "--cluster-key-file", str(key))
    head = Server(*words, *joined, wait=False)
    return head, Server(*words, *joined, "--node-rank", "1", "--headless", wait=False)


def _flood(ports: list[int]) -> None:
    """Open FLOOD connections to each port that takes some, all at once, and leave."""
    with ExitStack() as stack:
        for port in ports:
            for _ in range(FLOOD):
                try:
                    stack.enter_context(socket.create_connection((ADDRESS, port), 1))
                except OSError:
                    break  # it is refused, or this process has no more descriptors


def _ports(process: psutil.Process) -> set[int]:
    """Ports of the sockets of a process: of those that listen, and of those at which others have connected."""
    return {one.laddr.port for one in process.net_connections("tcp")}


def _listens(process: psutil.Process) -> bool:
    return any(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))


def _settles(processes: list[psutil.Process], before: list[int]) -> bool:
    """Return True once no process has more descriptors than before, within SETTLE_S."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        if all(now <= then for now, then in zip(_descriptors(processes), before, strict=True)):
            return True
        time.sleep(0.1)
    return False


def _descriptors(processes: list[psutil.Process]) -> list[int]:
    return [process.num_fds() if process.is_running() else 0 for process in processes]


def _text(body: bytes) -> bytes:
    return body.partition(b'"text":')[2].partition(b",")[0]


LIVES = (Life("cluster-flood", "gloo", flood_of_ports),)
