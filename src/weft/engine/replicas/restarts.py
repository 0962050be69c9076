"""EngineKeeper: starts the engines of replicas, and starts each again that has died."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from weft.engine.executors.rank_watch import LONG_STEP, SHORTEST_WORK_S
from weft.engine.executors.ranks import CLOSED
from weft.engine.processes.causes import cause_of
from weft.engine.replicas.handover import HandOver
from weft.engine.replicas.remote import AsyncEngine
from weft.engine.replicas.replica import HEALTHY_S, Replica
from weft.engine.replicas.routing import Router
from weft.errors import CORE, Cause, EngineError

log = logging.getLogger("weft")

GIVE_UP = 5  # restarts of every replica in a row without an answered request between them, after which all is over
STALL_POLL_S, LATE_POLL_S = 1.0, 3.0  # seconds between two looks for stalls; the longest time that counts in full
CORE_STALL_S = 3.0  # the core itself finds a step that does not finish, and knows the rank: it comes first
# Codes of failed starts that only wait for machines: these may come back at any time.
WAITING = frozenset(
    (
        "nodes-missing",
        "node-not-answering",
        "ray-too-small",
        "ray-without-devices",
        "ray-resources",
        "no-ray-cluster",
        "ray-cluster-gone",
        "no-route",
    )
)


class EngineKeeper:
    """Starts engines for replicas, all at once, and each again that has died or finishes no step.

    `join` makes an engine that has started the replica's; it may take time. `nodes` are the nodes that hold the ranks,
    None for ranks of this machine. `plan` is the executed plan of the replica that serves the shortest requests.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        requests: HandOver,
        router: Router,
        start: Callable[[Replica], Awaitable[AsyncEngine]],
        join: Callable[[Replica, AsyncEngine], Awaitable[None]],
    ) -> None:
        self.plan = replicas[0].plan
        self.failure: EngineError | None = None
        self._replicas, self._requests, self._router = replicas, requests, router
        self._start, self._join = start, join
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dying: set[AsyncEngine] = set()

    async def start(self, stall_s: float | None) -> None:
        """Start all engines, and wait until all are warm. Raises the EngineError of the first to fail."""
        starts = [asyncio.create_task(self._start_engine(replica)) for replica in self._replicas]
        try:
            await asyncio.gather(*starts)  # the first failure ends the wait
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        engines = [replica.engine for replica in self._replicas]
        self.plan = min((engine.plan for engine in engines if engine), key=lambda plan: plan.max_model_len)
        for replica in self._replicas:
            self._start_task(self._keep_running(replica))
        if stall_s is not None:
            self._start_task(self._watch_stalls(stall_s))

    async def died(self) -> None:
        """Wait until no engine is started again."""
        await asyncio.shield(self._died)

    def stop(self) -> None:
        """Start no engine again."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Wait until nothing starts any more, and end all engines."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        engines = {replica.engine for replica in self._replicas if replica.engine is not None}
        await asyncio.gather(*(engine.close() for engine in engines | self._dying))

    async def _start_engine(self, replica: Replica, shortest: int = 0) -> None:
        """Start the engine of a replica, which must serve requests of `shortest` tokens."""
        engine = await self._start(replica)
        try:
            if engine.plan.max_model_len < shortest:
                raise _too_short(engine.plan.max_model_len, shortest)
            await self._join(replica, engine)
        except BaseException:
            await engine.close()
            raise

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task that keeps the replicas running has failed", exc_info=error)

    async def _keep_running(self, replica: Replica) -> None:
        """Start the engine of a replica again whenever it has died."""
        while replica.engine is not None:
            await replica.engine.died()
            self._requests.last_death = replica.engine.failure
            engine = replica.lose_engine()
            self._router.forget_replica(replica.number)
            began = time.monotonic()
            if replica.lived_s(began) > HEALTHY_S:
                replica.note_answer()
            if self._is_hopeless():
                await self._bury(engine, replica)
                self._give_up(engine.failure or EngineError(CLOSED))
                return
            log.error("%s died, and starts again: %s", self._name(replica), engine.failure)
            await self._bury(engine, replica)
            await self._restart(replica)
            if replica.engine is None:
                return
            log.info("%s is back (%.1f s)", self._name(replica), time.monotonic() - began)
            self._requests.welcome(replica)

    async def _bury(self, engine: AsyncEngine, replica: Replica) -> None:
        """End the processes of an engine that has died. If that fails, its replica starts nevertheless."""
        self._dying.add(engine)
        try:
            await engine.close()
        except Exception as error:
            log.error("the processes of %s have not ended as they should: %s", self._name(replica), error)
        self._dying.discard(engine)

    async def _restart(self, replica: Replica) -> None:
        """Start an engine until that succeeds, or until every replica has failed too often."""
        while self._requests.ended is None:
            await asyncio.sleep(replica.next_pause_s(time.monotonic()))
            replica.started_s = 0.0
            replica.vain_restarts += 1
            try:
                await self._start_engine(replica, self.plan.max_model_len)
                return
            except Exception as error:  # such as an OSError, if there are no more descriptors or processes
                failure = EngineError(cause_of(error, CORE, "start"))
            if failure.code in WAITING:
                replica.vain_restarts -= 1
            self._requests.last_death = failure
            log.error("%s does not start: %s", self._name(replica), failure)
            if self._is_hopeless():
                self._give_up(failure)

    def _name(self, replica: Replica) -> str:
        return replica.name if len(self._replicas) > 1 else "the engine"

    def _is_hopeless(self) -> bool:
        return all(one.vain_restarts >= GIVE_UP and not one.alive for one in self._replicas)

    def _give_up(self, error: EngineError) -> None:
        log.error("%d restarts in a row, and no request was answered between them: it stays down", GIVE_UP)
        self.failure = error
        self._requests.end(error)
        if not self._died.done():
            self._died.set_result(None)

    async def _watch_stalls(self, stall_s: float) -> None:
        """Take an engine for dead that finishes no step while it has requests."""
        while True:
            await self._requests.busy.wait()
            began = time.monotonic()
            await asyncio.sleep(STALL_POLL_S)
            now = time.monotonic()
            # This process was stopped itself, most likely with the engines, as in a container that is paused.
            paused_s = max(0.0, now - began - LATE_POLL_S)
            for replica in self._replicas:
                replica.moved_s = min(now, replica.moved_s + paused_s)
                if replica.engine is not None and replica.stalled_s(now) > step_limit_s(replica.engine, stall_s):
                    text = f"no step has finished for {stall_s:g} s while requests run"
                    replica.engine.fail(Cause(rank=CORE, phase="step", code="replica-stalled", cause=text))


def step_limit_s(engine: AsyncEngine, stall_s: float) -> float:
    """Seconds that a step may take. If no process observes whether CPU ranks compute, a step may take as long as a long
    prompt.

    While a command runs, the limit is the command's: no step finishes until it ends.
    """
    if engine.calling:
        stall_s = max(stall_s, SHORTEST_WORK_S)
    return stall_s + CORE_STALL_S if engine.watched or not engine.plan.on_cpu else LONG_STEP * stall_s


def _too_short(length: int, shortest: int) -> EngineError:
    """The error of an engine that serves shorter requests than the replicas have served so far."""
    text = f"its memory is enough for requests of {length} tokens, but the replicas serve {shortest}"
    hint = "end what else uses its memory, or start the server with a lower --max-model-len"
    return EngineError(Cause(rank=CORE, phase="start", code="replica-too-short", cause=text, hint=hint))
