"""ReplicaThread: several engines for any number of calling threads, driven by an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar

from weft.config import EngineConfig
from weft.engine.core.commands import Command, Replies, ResetPrefixCache
from weft.engine.core.request import Output, Request, Stats
from weft.engine.executors.ranks import CLOSED
from weft.engine.processes.causes import cause_of
from weft.engine.replicas.engine_nodes import EngineNodes
from weft.engine.replicas.replicas import ReplicaSet
from weft.engine.replicas.running import RunningReplica
from weft.errors import CORE, EngineError, WeftError
from weft.machine.hardware.host import Host
from weft.plan.memory import Capacity, capacity_lines
from weft.plan.plan import Plan
from weft.planner.execution.replicas import ReplicaPlan

log = logging.getLogger("weft")

T = TypeVar("T")

UNLIMITED = 2**31 - 1
AHEAD = 2  # requests that a replica gets, in units of those that it can run: the others wait for the first to be free


class ReplicaThread:
    """Engines that have started, used as a `LocalEngine`. Every engine has processes of its own.

    `plan`, `num_blocks` and `host` are the first replica's; `capacities` are its ranks'.
    """

    def __init__(self, planned: Sequence[ReplicaPlan], config: EngineConfig, nodes: EngineNodes | None = None) -> None:
        self.host: Host = planned[0].host
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="weft-replicas", daemon=True)
        self._thread.start()
        self._closing = threading.Lock()  # held to give the loop work, and while it ends: then it gets none
        self._ended = False
        self._most = sum(one.plan.max_running for one in planned) * AHEAD
        try:
            # Callers wait for room, so the engines need not refuse any.
            unlimited = replace(config, max_num_queued_reqs=UNLIMITED)
            self._engine = self._run_on_loop(ReplicaSet.start(planned, unlimited, nodes=nodes))
        except BaseException:
            self._run_on_loop(_end_tasks())
            self._stop_loop()
            raise
        self.plan: Plan = self._engine.plan
        first = self.replicas[0]
        self.num_blocks = first.ready.num_blocks
        self.capacities: list[Capacity] = first.ready.ranks
        for replica in self.replicas:
            for line in capacity_lines(planned[replica.number].plan, replica.ready.num_blocks):
                log.info("replica %d: %s", replica.number, line)

    @property
    def failure(self) -> EngineError | None:
        """The error after which no engine is started again; None while one may run."""
        return self._engine.failure

    @property
    def replicas(self) -> list[RunningReplica]:
        """The engines that run."""
        return self._engine.replicas

    def submit(self, requests: Sequence[Request]) -> ReplicaSubmission:
        """Queue requests. The submission iterates over their outputs until the last request has ended.

        A replica gets AHEAD times as many as it can run at once, and the others as these end. Raises EngineError.
        """
        with self._closing:
            if self._ended:
                raise EngineError(CLOSED)
            submission = ReplicaSubmission(self._engine, self._loop, requests, self._most)
            self._loop.call_soon_threadsafe(submission.feed)
        return submission

    def stats(self) -> Stats:
        """Return the stats of all replicas together, as of their last steps. Raises EngineError."""
        return self._run_on_loop(self._read_stats())

    async def _read_stats(self) -> Stats:
        return self._engine.stats

    def call(self, command: Command | ResetPrefixCache) -> Replies:
        """Have the ranks of all replicas execute a command between two steps. Raises RequestError and EngineError."""
        return self._run_on_loop(self._engine.call(command))

    def call_each(self, command: Command | ResetPrefixCache) -> list[tuple[RunningReplica, Replies]]:
        """Like `call`, with the engines that reply."""
        return self._run_on_loop(self._engine.call_each(command))

    def close(self) -> None:
        """End all engines; callers in flight get an EngineError. May be called twice, by any thread.

        In the loop's own thread, where the garbage collector may call it, nothing is waited for: the engines end, and
        the loop after them.
        """
        if threading.current_thread() is self._thread:
            self._close_later()
            return
        with self._closing:
            if self._ended:
                return
            self._ended = True
            asyncio.run_coroutine_threadsafe(self._end_engine(), self._loop).result()
            self._stop_loop()

    def _close_later(self) -> None:
        """End the engines in a task. The lock may be held by a thread that waits for this one, so it is not taken."""
        if self._ended:
            return
        self._ended = True
        # From here on only a thread that holds the lock already gives the loop work, and its work is awaited.
        self._ending = self._loop.create_task(self._end_engine())
        self._ending.add_done_callback(lambda task: self._loop.stop())

    async def _end_engine(self) -> None:
        await self._engine.close()
        await _end_tasks()  # whose callers wait for the result in other threads

    def _run_on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and wait for its result; Ctrl-C cancels it."""
        with self._closing:
            if self._ended:
                work.close()
                raise EngineError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, and close it. No reference keeps its `ReplicaThread` from being collected."""
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _end_tasks() -> None:
    """Wait until all other tasks have ended: tasks of engines that have been closed, or whose start was cancelled."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


class ReplicaSubmission:
    """The requests of one call, and the sink of their outputs. Iterated and aborted by one thread at a time."""

    def __init__(
        self, engine: ReplicaSet, loop: asyncio.AbstractEventLoop, requests: Iterable[Request], most: int
    ) -> None:
        """At most `most` requests are given to the replicas at once."""
        self._engine, self._loop, self._most = engine, loop, most
        self._waiting = deque(requests)  # the loop's thread takes requests from here
        self._open = {request.id for request in self._waiting}
        self._outputs: SimpleQueue[Output | WeftError] = SimpleQueue()
        self._running = 0

    def __iter__(self) -> Iterator[Output]:
        """Yield outputs as the steps bring them. Raises RequestError and EngineError."""
        while self._open:
            item = self._outputs.get()
            if not isinstance(item, Output):
                self.close()
                raise item
            if item.id not in self._open:  # aborted while this output was under way
                continue
            if item.finish_reason is not None:
                self._open.discard(item.id)
            yield item

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; they get no more outputs."""
        dropped = self._open.intersection(ids)
        if dropped:
            with suppress(RuntimeError):  # the loop has ended, and all requests with it
                self._loop.call_soon_threadsafe(self._drop, dropped)
        self._open -= dropped

    def close(self) -> None:
        """Abort all requests that have not ended."""
        self.abort(list(self._open))

    # In the loop's thread

    def feed(self) -> None:
        """Give waiting requests to the replicas as there is room."""
        while self._waiting and self._running < self._most:
            request = self._waiting.popleft()
            self._running += 1
            try:
                self._engine.send_requests([request], self)
            except Exception as error:
                self._waiting.clear()
                self.put(error if isinstance(error, WeftError) else _internal(error))

    def put(self, item: Output | WeftError) -> None:
        self._outputs.put(item)

    def close_request(self, id: str) -> None:
        self._running -= 1
        self.feed()

    drop_request = close_request

    def _drop(self, ids: set[str]) -> None:
        self._waiting = deque(request for request in self._waiting if request.id not in ids)
        self._engine.abort(ids)


def _internal(error: Exception) -> WeftError:
    return EngineError(cause_of(error, CORE, "step"))
