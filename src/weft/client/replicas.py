"""ReplicaSet: several engines as one, for an asyncio program. If one dies, the others go on with its requests."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence
from itertools import accumulate, chain, count
from typing import Any

from msgspec.structs import replace

from weft.client.remote import AsyncEngine, OutputSink, OutputStream
from weft.client.routing import Router, work_of
from weft.client.running import RunningReplica
from weft.cluster.assembly import AnyAssembly
from weft.config import EngineConfig
from weft.core.commands import Command, Replies, ResetPrefixCache, Sleep, SwapWeights, Wake
from weft.core.request import Output, Request, Stats, counters_only, duplicate_id_error, sum_stats
from weft.core.token_ids import TokenIds
from weft.errors import CORE, Cause, EngineError, QueueFullError, WeftError
from weft.executors.causes import cause_of
from weft.executors.rank import WORKER
from weft.executors.ranks import CLOSED
from weft.planner.replicas import ReplicaPlan

log = logging.getLogger("weft")

# The last commands that changed the weights and put the engines to sleep, as objects of their own: the same files
# may be swapped in twice, with other content.
State = tuple[SwapWeights | None, Sleep | None]

MOVES = 3  # engines that a request may lose before it fails: it may be what kills them
WAIT_S = 30.0  # for a replica, while none runs
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # before a start that follows a failed one
LIVED_S = 60.0  # an engine that has run that long starts again without a pause
GIVE_UP = 5  # failed starts of every replica in a row, after which all is over
STALL_POLL_S = 1.0


class Replica:
    """One of the engines.

    `engine` is None while it starts. `open` are the requests that it has, `load` the tokens that these count for.
    """

    def __init__(self, planned: ReplicaPlan, number: int, first_rank: int) -> None:
        self.number, self.plan, self.weight = number, planned.plan, planned.weight
        self.engine: AsyncEngine | None = None
        self._first_rank = first_rank
        self.open = 0
        self.load = 0
        self.failed_starts = 0
        self.started_s = 0.0
        self.moved_s = 0.0  # when a step has last been seen to finish, or the first request came
        self._steps = 0
        self._pause_s = 0.0
        self._ended = Stats()  # counters of engines that have ended

    @property
    def name(self) -> str:
        return f"replica {self.number}"

    @property
    def alive(self) -> bool:
        return self.engine is not None and self.engine.alive

    @property
    def stats(self) -> Stats:
        """Gauges of the engine, and the counters of this one and of all before it."""
        return self._ended if self.engine is None else sum_stats([self._ended, self.engine.stats])

    @property
    def running(self) -> list[RunningReplica]:
        """The engine, if it runs."""
        if self.engine is None:
            return []
        return [RunningReplica(self.engine.plan, self.engine.ready, self.number, self._first_rank)]

    def lose_engine(self) -> AsyncEngine:
        """Forget an engine that has died, but for its counters."""
        assert self.engine is not None
        engine, self.engine = self.engine, None
        self._ended = sum_stats([self._ended, counters_only(engine.stats)])
        return engine

    def next_pause_s(self, now: float) -> float:
        """Seconds to wait before the next start: none after an engine that has lived long."""
        if now - self.started_s > LIVED_S and not self.failed_starts:
            self._pause_s = 0.0
            return 0.0
        pause, self._pause_s = self._pause_s, min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        return pause

    def stalled_s(self, now: float) -> float:
        """Seconds without a finished step, 0 for a replica that has nothing to do or executes a command."""
        engine = self.engine
        if engine is None or not self.open or engine.calling or engine.stats.sleep_level:
            self.moved_s = now
            return 0.0
        if engine.stats.steps != self._steps:
            self._steps, self.moved_s = engine.stats.steps, now
        return now - self.moved_s


class RoutedRequest:
    """A request, and the sink of what its replica sends. `tokens` are those of its answer so far.

    `engine_id` is its id in the engine. Each hand-over has a new one: an engine to which the request comes back may
    still send outputs of the time before.
    """

    def __init__(self, owner: ReplicaSet, request: Request, sink: OutputSink) -> None:
        self.request, self.sink = request, sink
        self.tokens: list[int] = []
        self.engine_id = ""
        self.replica: Replica | None = None  # None while it waits for one
        self.losses = 0  # engines that died with it
        self.work = work_of(request)
        self.deadline_s = 0.0  # while it waits
        self._owner = owner

    @property
    def rest(self) -> Request:
        """The request that goes on behind the tokens so far."""
        if not self.tokens:
            return self.request
        return replace(self.request, answered=TokenIds.pack([*self.request.answered, *self.tokens]))

    def put(self, item: Output | WeftError) -> None:
        if isinstance(item, EngineError):
            self._owner.move_request(self, item)
            return
        if isinstance(item, Output):
            self.tokens += item.tokens
            item.id = self.request.id
            item.replica = self.replica.number if self.replica else 0
        self.sink.put(item)

    def close_request(self, id: str) -> None:
        self._owner.forget_request(self)
        self.sink.close_request(self.request.id)

    def drop_request(self, id: str) -> None:
        self._owner.forget_request(self)
        self.sink.drop_request(self.request.id)


class ReplicaSet:
    """Several engines of one model, created by `await ReplicaSet.start(...)`; used as an `AsyncEngine`.

    A request goes to the replica that will have done its work the soonest (`client.routing`). If an engine dies, it is
    started again, and its requests go to the others: from their beginning, or behind the tokens that they have, so that
    no caller notices. If no engine runs, requests wait for one up to WAIT_S seconds.

    `plan` is that of the replica that serves the shortest requests. `failure` is the error after which no
    engine is started again: every replica has failed GIVE_UP starts in a row.
    """

    def __init__(
        self, planned: Sequence[ReplicaPlan], config: EngineConfig, worker: str = WORKER, stall_s: float | None = None
    ) -> None:
        self.failure: EngineError | None = None
        first = [0, *accumulate(len(one.plan.places) for one in planned)]
        self._replicas = [Replica(one, number, first[number]) for number, one in enumerate(planned)]
        self._config, self._worker, self._stall_s = config, worker, stall_s
        self._router = Router([replica.weight for replica in self._replicas], caching=config.enable_prefix_caching)
        self.capacity = sum(one.plan.max_running for one in planned) + config.max_num_queued_reqs
        # Each engine may have to take the requests of all others.
        self._engine_config = _with_queue(config, self.capacity)
        self.plan = planned[0].plan
        self._open: dict[str, RoutedRequest] = {}
        self._waiting: list[RoutedRequest] = []  # for a replica
        self._last_death: EngineError | None = None
        self._state: State = (None, None)
        self._turn = asyncio.Lock()  # held while a command runs or an engine joins
        self._calls: set[asyncio.Task[list[tuple[RunningReplica, Replies]]]] = set()
        self._hand_overs = count()
        self._closed = False
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dying: set[AsyncEngine] = set()
        self._busy = asyncio.Event()

    @classmethod
    async def start(
        cls, planned: Sequence[ReplicaPlan], config: EngineConfig, worker: str = WORKER, stall_s: float | None = None
    ) -> ReplicaSet:
        """Start all engines at the same time, and wait until all are warm. Raises the EngineError of the first to fail.

        With `stall_s`, an engine that finishes no step for that many seconds while it has requests is taken for dead.
        """
        replicas = cls(planned, config, worker, stall_s)
        try:
            await replicas._start_all()
        except BaseException:
            await replicas.close()
            raise
        return replicas

    async def _start_all(self) -> None:
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
            self._run(self._keep_running(replica))
        if self._stall_s is not None:
            self._run(self._watch_stalls(self._stall_s))

    async def _start_engine(self, replica: Replica, shortest: int = 0) -> None:
        """Start the engine of a replica, which must serve requests of `shortest` tokens."""
        engine = await AsyncEngine.start(replica.plan, self._engine_config, self._worker)
        try:
            if engine.plan.max_model_len < shortest:
                raise _too_short(engine.plan.max_model_len, shortest)
            await self._join(replica, engine)
        except BaseException:
            await engine.close()
            raise

    async def _join(self, replica: Replica, engine: AsyncEngine) -> None:
        """Give a replica its new engine, once this has followed all commands and while none runs."""
        state: State = (None, None)
        while True:
            state = await self._follow_state(engine, state)
            async with self._turn:
                if state is self._state:
                    replica.engine, replica.failed_starts, replica.started_s = engine, 0, time.monotonic()
                    return

    async def _follow_state(self, engine: AsyncEngine, state: State) -> State:
        """Bring a new engine from `state` to that of the others, and return this."""
        current = self._state
        weights, sleep = current
        if weights is not None and weights is not state[0]:
            await engine.call(weights)
        if sleep is not state[1]:
            if state[1] is not None:
                await engine.call(Wake())
            if sleep is not None:
                await engine.call(sleep)
        return current

    # What users of an engine see

    @property
    def replicas(self) -> list[RunningReplica]:
        """The engines that run."""
        return list(chain.from_iterable(replica.running for replica in self._replicas))

    @property
    def replica_stats(self) -> list[Stats]:
        """The stats of each replica; the gauges of one without engine are 0."""
        return [replica.stats for replica in self._replicas]

    @property
    def stats(self) -> Stats:
        """The stats of all replicas together; requests that wait for a replica count as waiting."""
        total = sum_stats(self.replica_stats)
        total.waiting += len(self._waiting)
        return total

    @property
    def outage(self) -> str:
        """The reason why no request can run now; "" if a replica runs."""
        if self.failure is not None:
            return str(self.failure)
        if any(replica.alive for replica in self._replicas):
            return ""
        return f"no replica runs: {self._last_death or 'they start'}"

    @property
    def alive(self) -> bool:
        return self.failure is None and not self._closed

    async def died(self) -> None:
        """Wait until no engine is started again. Closing is no failure."""
        await asyncio.shield(self._died)

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Queue requests, as `AsyncEngine.submit`."""
        stream = OutputStream(self, [request.id for request in requests])
        self.send_requests(requests, stream)
        return stream

    def send_requests(self, requests: Sequence[Request], sink: OutputSink) -> None:
        """Queue requests, all or none; `sink` gets their outputs.

        Raises QueueFullError, EngineError, and RequestError for an id that an open request has.
        """
        self._raise_failure()
        for request in requests:
            if request.id in self._open:
                raise duplicate_id_error(request.id)
        if len(self._open) + len(requests) > self.capacity:
            raise QueueFullError(
                f"{len(self._open)} requests run or wait, {len(requests)} more are over the limit of "
                f"{self.capacity}; try again later, or raise --max-num-queued-reqs",
                code="queue-full",
            )
        routed = [RoutedRequest(self, request, sink) for request in requests]
        self._open.update((one.request.id, one) for one in routed)
        try:
            self._place(routed)
        except BaseException:  # such as a request that cannot be sent
            self.abort([one.request.id for one in routed])
            raise

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; they get no more outputs. Unknown ids are ignored."""
        for id in ids:
            routed = self._open.get(id)
            if routed is None:
                continue
            if routed.replica is not None and routed.replica.engine is not None:
                routed.replica.engine.abort([routed.engine_id])
            if id in self._open:  # no engine has it
                routed.drop_request(id)

    async def call(self, command: Command | ResetPrefixCache) -> Replies:
        """Have the ranks of all replicas execute a command; return their replies, replica by replica.

        An engine that starts meanwhile follows the commands that it has missed. A caller that is cancelled does not
        stop the command. Raises EngineError, and RequestError if a replica refuses the command; one that refuses a
        change that others have made starts again, and follows them.
        """
        return [reply for _, replies in await self.call_each(command) for reply in replies]

    async def call_each(self, command: Command | ResetPrefixCache) -> list[tuple[RunningReplica, Replies]]:
        """Like `call`, with the engines that reply; one that dies meanwhile is left out."""
        self._raise_failure()
        call = asyncio.create_task(self._call_in_turn(command))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)

    async def _call_in_turn(self, command: Command | ResetPrefixCache) -> list[tuple[RunningReplica, Replies]]:
        async with self._turn:
            self._raise_failure()
            running = self.replicas
            engines = [replica.engine for replica in self._replicas if replica.engine is not None]
            results = await asyncio.gather(*(engine.call(command) for engine in engines), return_exceptions=True)
            answers, refusals = [], []
            for engine, replica, result in zip(engines, running, results, strict=True):
                if not isinstance(result, BaseException):
                    answers.append((replica, result))
                elif not isinstance(result, EngineError):
                    refusals.append((engine, result))
            if answers and self._note_state(command):
                for engine, refusal in refusals:
                    engine.fail(_left_behind(refusal))
        if refusals:
            raise refusals[0][1]
        if not answers:
            raise self._last_death or EngineError(CLOSED)
        return answers

    def _note_state(self, command: Command | ResetPrefixCache) -> bool:
        """Note what new engines have to follow; return True if that has changed."""
        weights, sleep = self._state
        match command:
            case SwapWeights():
                self._state = (replace(command), sleep)
            case Sleep():
                self._state = (weights, replace(command))
            case Wake():
                self._state = (weights, None)
            case _:
                return False
        return True

    def abandon(self) -> None:
        """Fail all callers, and start no engine again. The processes go on until `close`."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for replica in self._replicas:
            if replica.engine is not None:
                replica.engine.abandon()
        for routed in list(self._open.values()):
            self._fail_request(routed, EngineError(CLOSED))

    async def close(self) -> None:
        """End all engines, and wait until they are gone. May be called twice."""
        self.abandon()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        engines = {replica.engine for replica in self._replicas if replica.engine is not None}
        await asyncio.gather(*(engine.close() for engine in engines | self._dying))
        await asyncio.gather(*self._calls, return_exceptions=True)

    # Requests on their way

    def move_request(self, routed: RoutedRequest, error: EngineError) -> None:
        """Give a request of an engine that has died to another one."""
        self._leave(routed)
        routed.losses += 1
        self._last_death = error
        if self.alive and routed.losses <= MOVES:
            self._place_again([routed])
        else:
            self._fail_request(routed, error)

    def forget_request(self, routed: RoutedRequest) -> None:
        """Forget a request that has ended."""
        self._leave(routed)
        self._open.pop(routed.request.id, None)
        if not self._open:
            self._busy.clear()

    def _place(self, requests: Iterable[RoutedRequest]) -> None:
        """Give requests to replicas, or let them wait for one."""
        for routed in requests:
            loads = [replica.load if replica.alive else None for replica in self._replicas]
            if all(load is None for load in loads):
                self._wait(routed)
                continue
            self._give(routed, self._replicas[self._router.choose_replica(routed.request, loads)])
        if self._open:
            self._busy.set()

    def _place_again(self, requests: Iterable[RoutedRequest]) -> None:
        """Like `_place`, for requests whose callers can no longer be told by an exception."""
        for routed in requests:
            try:
                self._place([routed])
            except Exception as error:  # such as a request that cannot be sent
                self._fail_request(routed, EngineError(cause_of(error, CORE, "step")))

    def _give(self, routed: RoutedRequest, replica: Replica) -> None:
        """Give a request to a replica that has an engine."""
        assert replica.engine is not None
        id = f"{routed.request.id}@{next(self._hand_overs)}"
        replica.engine.send_requests([replace(routed.rest, id=id)], routed)
        routed.engine_id = id
        if not replica.open:
            replica.moved_s = time.monotonic()
        routed.replica = replica
        replica.open += 1
        replica.load += routed.work

    def _relieve_others(self, replica: Replica) -> None:
        """Give a replica that has just started the last requests of the others that have no token yet."""
        if not replica.alive:
            return
        for routed in reversed(list(self._open.values())):
            other = routed.replica
            if other is None or other is replica or other.engine is None or not other.alive or routed.tokens:
                continue
            if (other.load - routed.work) / other.weight >= (replica.load + routed.work) / replica.weight:
                other.engine.withdraw([routed.engine_id])
                self._leave(routed)
                self._give(routed, replica)

    def _leave(self, routed: RoutedRequest) -> None:
        """Take a request from its replica, or from those that wait."""
        replica, routed.replica = routed.replica, None
        if replica is not None:
            replica.open -= 1
            replica.load -= routed.work
        elif routed in self._waiting:
            self._waiting.remove(routed)

    def _wait(self, routed: RoutedRequest) -> None:
        """Let a request wait for a replica, up to WAIT_S seconds."""
        loop = asyncio.get_running_loop()
        routed.deadline_s = loop.time() + WAIT_S
        self._waiting.append(routed)
        loop.call_at(routed.deadline_s, self._expire, routed)

    def _expire(self, routed: RoutedRequest) -> None:
        if routed in self._waiting and asyncio.get_running_loop().time() >= routed.deadline_s:
            self._fail_request(routed, self._last_death or EngineError(CLOSED))

    def _fail_request(self, routed: RoutedRequest, error: EngineError) -> None:
        self.forget_request(routed)
        routed.sink.put(EngineError(error.cause))

    # The life of the engines

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
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
            self._last_death = replica.engine.failure
            engine = replica.lose_engine()
            self._router.forget_replica(replica.number)
            log.error("%s died, and starts again: %s", replica.name, engine.failure)
            began = time.monotonic()
            await self._bury(engine, replica)
            await self._restart(replica)
            if replica.engine is None:
                return
            log.info("%s is back (%.1f s)", replica.name, time.monotonic() - began)
            waiting, self._waiting = self._waiting, []
            self._place_again(waiting)
            self._relieve_others(replica)

    async def _bury(self, engine: AsyncEngine, replica: Replica) -> None:
        """End the processes of an engine that has died. If that fails, its replica starts nevertheless."""
        self._dying.add(engine)
        try:
            await engine.close()
        except Exception as error:
            log.error("the engine of %s has not ended as it should: %s", replica.name, error)
        self._dying.discard(engine)

    async def _restart(self, replica: Replica) -> None:
        """Start an engine until that succeeds, or until every replica has failed too often."""
        while self.alive:
            await asyncio.sleep(replica.next_pause_s(time.monotonic()))
            try:
                await self._start_engine(replica, self.plan.max_model_len)
                return
            except Exception as error:  # such as an OSError, if there are no more descriptors or processes
                replica.failed_starts += 1
                self._last_death = EngineError(cause_of(error, CORE, "start"))
                log.error("%s does not start: %s", replica.name, self._last_death)
            if all(one.failed_starts >= GIVE_UP for one in self._replicas):
                self._give_up(self._last_death)

    def _give_up(self, error: EngineError) -> None:
        self.failure = error
        for routed in list(self._open.values()):
            self._fail_request(routed, error)
        if not self._died.done():
            self._died.set_result(None)

    async def _watch_stalls(self, stall_s: float) -> None:
        """Take an engine for dead that finishes no step while it has requests."""
        while True:
            await self._busy.wait()
            await asyncio.sleep(STALL_POLL_S)
            now = time.monotonic()
            for replica in self._replicas:
                if replica.engine is not None and replica.stalled_s(now) > stall_s:
                    text = f"no step has finished for {stall_s:g} s while requests run"
                    replica.engine.fail(Cause(rank=CORE, phase="step", code="replica-stalled", cause=text))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise EngineError(self.failure.cause)
        if self._closed:
            raise EngineError(CLOSED)


def _left_behind(refusal: BaseException) -> Cause:
    """The cause with which an engine ends that has refused a change that others have made."""
    text = f"refuses what other replicas have done: {refusal}"
    return Cause(rank=CORE, phase="step", code="replica-left-behind", cause=text)


def _too_short(length: int, shortest: int) -> EngineError:
    """The error of an engine that serves shorter requests than the replicas have served so far."""
    text = f"its memory is enough for requests of {length} tokens, but the replicas serve {shortest}"
    hint = "end what else uses its memory, or start the server with a lower --max-model-len"
    return EngineError(Cause(rank=CORE, phase="start", code="replica-too-short", cause=text, hint=hint))


def _with_queue(config: EngineConfig, capacity: int) -> EngineConfig:
    """The config of one engine, whose queue takes the requests of all."""
    return dataclasses.replace(config, max_num_queued_reqs=capacity)


async def start_engine(
    planned: Sequence[ReplicaPlan],
    config: EngineConfig,
    worker: str = WORKER,
    stall_s: float | None = None,
    assembly: AnyAssembly | None = None,
) -> AsyncEngine | ReplicaSet:
    """Start one engine, or several as one. Raises EngineError with the root cause.

    `assembly` are the nodes that hold ranks of the one engine; the other arguments are those of `ReplicaSet.start`.
    """
    if len(planned) == 1:
        others = assembly.hand_over() if assembly else None
        return await AsyncEngine.start(planned[0].plan, config, worker, others)
    return await ReplicaSet.start(planned, config, worker, stall_s)
