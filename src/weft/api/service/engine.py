"""ServingEngine: the engine as a service uses it, and its sleep between the requests of clients of Ollama's API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from weft.engine.core.commands import Command, Replies, ResetPrefixCache, Sleep, Wake
from weft.engine.core.request import Output, Request, Stats
from weft.engine.replicas.running import RunningReplica
from weft.errors import EngineError, WeftError
from weft.logs import event_fields

log = logging.getLogger("weft.serving")

LEVEL = 1  # of sleep: the weights stay in the host's memory, so that the next request waits for a copy only


class ServingEngine(Protocol):
    """The part of AsyncEngine and ReplicaSet that a service and its streams use."""

    @property
    def stats(self) -> Stats:
        """Stats as of the last step reported, of all replicas together."""
        ...

    @property
    def replicas(self) -> Sequence[RunningReplica]:
        """The engines that run."""
        ...

    @property
    def replica_stats(self) -> Sequence[Stats]:
        """The stats of each replica."""
        ...

    @property
    def failure(self) -> EngineError | None:
        """The error after which no request will run again; None while requests may run."""
        ...

    @property
    def outage(self) -> str:
        """The reason why no request can run now; "" if requests can."""
        ...

    @property
    def stopped_s(self) -> float:
        """Seconds for which a process of an engine has been stopped (SIGSTOP)."""
        ...

    @property
    def computes(self) -> bool:
        """True while ranks are observed to compute a step; False if they do not, or are not observed."""
        ...

    def submit(self, requests: Sequence[Request]) -> AsyncGenerator[Output, None]:
        """Submit requests and return their outputs as they arrive. Closing the generator aborts unfinished requests.

        Raises QueueFullError and EngineError at once, not on the first iteration.
        """
        ...

    def abort(self, ids: Sequence[str]) -> None:
        """Stop these requests. A generator without remaining requests ends."""
        ...

    async def call(self, command: Command | ResetPrefixCache) -> Replies:
        """Have the ranks execute a command between two steps. Raises RequestError and EngineError."""
        ...

    async def call_each(self, command: Command | ResetPrefixCache) -> list[tuple[RunningReplica, Replies]]:
        """Like `call`, with the engines that reply."""
        ...


class Unloading:
    """State of an engine that clients may put to sleep. An administrator's /sleep is not ended by clients."""

    def __init__(self, engine: ServingEngine, busy: Callable[[], bool], note_awake: Callable[[], None]) -> None:
        """`busy` says whether requests run or the server ends; `note_awake` is called after the engine has woken."""
        self._engine, self._busy, self._note_awake = engine, busy, note_awake
        self._tasks: set[asyncio.Task[None]] = set()
        self.unloaded = False

    @property
    def sleeps(self) -> bool:
        """True if the model is not awake, for whatever reason."""
        return self.unloaded or bool(self._engine.stats.sleep_level)

    def unload(self) -> None:
        """Send the engine to sleep, unless it sleeps, requests run or the server ends."""
        if self.sleeps or self._busy() or self._engine.outage:
            return
        self.unloaded = True
        log.info("the model is unloaded (keep_alive is 0), until the next request", extra=event_fields("unloaded"))
        self._call(Sleep(LEVEL))

    def load(self) -> bool:
        """Wake the engine if a client has put it to sleep; requests wait in its queue until then.

        Return True while it wakes.
        """
        if self.unloaded:
            self.unloaded = False
            self._call(Wake())
        return bool(self._tasks)

    def _call(self, command: Command) -> None:
        """Have the engine run a command after its queued commands: Sleep and Wake keep their order."""
        task = asyncio.create_task(self._run_command(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_command(self, command: Command) -> None:
        try:
            await self._engine.call(command)
        except WeftError as error:  # an administrator was faster, or the engine has died, which others report
            log.warning("%s: %s", command.phase, error)
        if isinstance(command, Wake):
            self._note_awake()
