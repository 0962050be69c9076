"""Fork servers that the engines of a process's tests use one after the other: torch is imported once for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from weft.config import EngineConfig
from weft.engine.executors import processes, rank_processes
from weft.engine.executors.rank import WORKER
from weft.engine.processes import forks
from weft.engine.processes.fork_client import ForkClient
from weft.engine.processes.forks import ServerPool
from weft.engine.replicas.remote import AsyncEngine
from weft.plan.plan import Plan

MOST = 3  # kept servers: each takes memory


class KeptServer(ForkClient):
    """A fork server that its user leaves to the next one. One that is lent belongs to one engine, which may have a
    process for its core; any number of others may share it."""

    lent = False

    def end(self) -> None:
        self.lent = False

    @property
    def idle(self) -> bool:
        return not self.lent and not self.users


_kept: list[KeptServer] = []


def find_server(environment: Mapping[str, str], *, alone: bool) -> ForkClient:
    """Return a server for processes with these variables, a kept one if it can be: one without users if `alone`."""
    for server in [server for server in _kept if server.idle and not server.alive]:
        end_server(server)
    for server in _kept:
        if not server.lent and (server.idle or not alone) and server.alive and server.suits(environment):
            if server.idle:
                server.reclaim()
            return server
    if len(_kept) == MOST:
        idle = [server for server in _kept if server.idle]
        if not idle:
            return ForkClient(environment)
        end_server(idle[0])
    _kept.append(KeptServer(environment))
    return _kept[-1]


def lend_server(environment: Mapping[str, str]) -> ForkClient:
    """Return a server for one engine, until it ends the server."""
    server = find_server(environment, alone=True)
    if isinstance(server, KeptServer):
        server.lent = True
    return server


class KeptPool(ServerPool):
    """The pool of this process, with as many servers as are kept, for single ranks too."""

    def acquire(self, environment: Mapping[str, str], count: int) -> ForkClient | None:
        if not forks.can_fork(environment):
            return None
        with self._lock:
            server = find_server(environment, alone=False)
            server.users += 1
            return server

    def release(self, server: ForkClient) -> None:
        with self._lock:
            server.users -= 1
        if not isinstance(server, KeptServer):
            server.end()


def start_with_server(start: Any) -> Any:
    """`AsyncEngine.start` that lends a server, as at a restart, to an engine that would start new interpreters."""

    async def started(
        cls: type[AsyncEngine], plan: Plan, config: EngineConfig, worker: str = WORKER, *given: Any, **named: Any
    ) -> AsyncEngine:
        direct = given or named.get("others") or named.get("forks") or config.executor not in (None, "processes")
        if direct or not plan.on_cpu or not forks.can_fork({}):
            return await start(cls, plan, config, worker, *given, **named)  # type: ignore[no-any-return]
        server = processes.start_server(plan)
        try:
            named.update(forks=server, forks_core=server is not None)
            engine = await start(cls, plan, config, worker, **named)
        except BaseException:
            if server:
                server.end()
            raise
        close = engine.close

        async def closed() -> None:
            await close()
            if server:
                server.end()

        engine.close = closed
        return engine  # type: ignore[no-any-return]

    return classmethod(started)


@contextmanager
def servers_kept() -> Iterator[None]:
    """Have all engines use kept servers meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "pool", KeptPool())
        patch.setattr(processes, "ForkClient", lend_server)
        patch.setattr(AsyncEngine, "start", start_with_server(AsyncEngine.start.__func__))  # type: ignore[attr-defined]
        yield
    while _kept:
        end_server(_kept[0])


def take_back() -> None:
    """Leave the kept servers to the next users."""
    for server in _kept:
        server.end()


def end_server(server: KeptServer) -> None:
    _kept.remove(server)
    ForkClient.end(server)
