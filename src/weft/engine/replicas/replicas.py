"""ReplicaSet: several engines as one, for an asyncio program. If one dies, the others go on with its requests."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

from msgspec.structs import replace

from weft.config import EngineConfig
from weft.engine.core.commands import Command, Replies, ResetPrefixCache, Sleep, SwapWeights, Wake
from weft.engine.core.request import Request, Stats, sum_stats
from weft.engine.executors.processes import start_server
from weft.engine.executors.rank import WORKER
from weft.engine.executors.ranks import CLOSED
from weft.engine.processes.fork_client import ForkClient
from weft.engine.processes.liveness import SHORTEST_S
from weft.engine.replicas.engine_nodes import EngineNodes
from weft.engine.replicas.handover import HandOver
from weft.engine.replicas.output_stream import OutputSink, OutputStream
from weft.engine.replicas.queue_limit import QueueLimit
from weft.engine.replicas.remote import AsyncEngine
from weft.engine.replicas.replica import Replica
from weft.engine.replicas.restarts import EngineKeeper
from weft.engine.replicas.routing import Router
from weft.engine.replicas.running import RunningReplica
from weft.engine.replicas.suspects import LOST
from weft.errors import CORE, Cause, EngineError
from weft.plan.plan import Plan
from weft.planner.execution.replicas import ReplicaPlan

# The last commands that changed the weights and put the engines to sleep, as objects of their own: the same files
# may be swapped in twice, with other content.
State = tuple[SwapWeights | None, Sleep | None]


class ReplicaSet:
    """Several engines of one model, created by `await ReplicaSet.start(...)`; used as an `AsyncEngine`.

    A request goes to the replica that will have done its work the soonest (`engine.replicas.routing`). If an engine
    dies, it is
    started again (`engine.replicas.restarts`), and its requests go to the others: from their beginning, or behind
    the tokens
    that they have, so that no caller notices (`engine.replicas.handover`). If no engine runs, requests wait until
    one does. With a single engine on this machine, its requests fail.

    `plan` is the plan of the replica that serves the shortest requests. `failure` is the error after which no engine is
    started again: every replica has started too often in a row without an answered request.
    """

    def __init__(
        self,
        planned: Sequence[ReplicaPlan],
        config: EngineConfig,
        worker: str = WORKER,
        nodes: EngineNodes | None = None,
    ) -> None:
        first = [0, *accumulate(len(one.plan.places) for one in planned)]
        self._replicas = [Replica(one, number, first[number]) for number, one in enumerate(planned)]
        router = Router([replica.weight for replica in self._replicas], caching=config.enable_prefix_caching)
        self.capacity = sum(one.plan.max_running for one in planned) + config.max_num_queued_reqs
        # Each engine may have to take the requests of all others.
        self._config, self._worker, self._nodes = _with_queue(config, self.capacity), worker, nodes
        # A request of the only engine fails with it: it may have killed the engine, and there is no other engine.
        lost = LOST if len(planned) > 1 or nodes is not None else 1
        self._requests = HandOver(self._replicas, router, QueueLimit.of(config, self.capacity), lost)
        self._keeper = EngineKeeper(self._replicas, self._requests, router, self._launch, self._join)
        self._stall_s: float | None = None
        self._forks: ForkClient | None = None
        self._warm_forks: ForkClient | None = None  # the same, once an engine has started with it
        self._state: State = (None, None)
        self._turn = asyncio.Lock()  # held while a command runs or an engine joins
        self._calls: set[asyncio.Task[list[tuple[RunningReplica, Replies]]]] = set()

    @classmethod
    async def start(
        cls,
        planned: Sequence[ReplicaPlan],
        config: EngineConfig,
        worker: str = WORKER,
        stall_s: float | None = None,
        nodes: EngineNodes | None = None,
    ) -> ReplicaSet:
        """Start all engines at the same time, and wait until all are warm. Raises the EngineError of the first to fail.

        With `stall_s`, an engine that finishes no step for that many seconds while it has requests is taken for dead.
        So is an engine of which a process shows no sign of life for as long. `nodes` hold the ranks, if these are not
        all on this machine.
        """
        replicas = cls(planned, config, worker, nodes)
        replicas._stall_s = None if stall_s is None else max(stall_s, SHORTEST_S)
        try:
            await replicas._keeper.start(stall_s)
        except BaseException:
            await replicas.close()
            raise
        return replicas

    async def _launch(self, replica: Replica) -> AsyncEngine:
        """Start an engine with the plan of a replica, or with a new one for the nodes that are there now."""
        if self._nodes is None:
            forks = self._prepare_forks(replica.plan)
            # The first core is started while the server imports torch.
            warm = forks is not None and forks is self._warm_forks
            engine = await AsyncEngine.start(
                replica.plan, self._config, self._worker, stall_s=self._stall_s, forks=forks, forks_core=warm
            )
            self._warm_forks = forks
            return engine
        replica.plan, others = await self._nodes.take(replica.number)
        return await AsyncEngine.start(replica.plan, self._config, self._worker, others, stall_s=self._stall_s)

    def _prepare_forks(self, plan: Plan) -> ForkClient | None:
        """Return a server that forks the processes of the only engine, and outlives it: torch is imported once."""
        kind = self._config.executor or "processes"
        if len(self._replicas) > 1 or self._stall_s is None or not plan.on_cpu or kind != "processes":
            return None
        if self._forks is None or not self._forks.alive:
            if self._forks is not None:
                self._forks.end()
            self._forks = start_server(plan)
        return self._forks

    async def _join(self, replica: Replica, engine: AsyncEngine) -> None:
        """Give a replica its new engine, once this has followed all commands and while none runs."""
        state: State = (None, None)
        while True:
            state = await self._follow_state(engine, state)
            async with self._turn:
                if state is self._state:
                    replica.engine, replica.started_s = engine, time.monotonic()
                    return

    async def _follow_state(self, engine: AsyncEngine, state: State) -> State:
        """Bring a new engine from `state` to the state of the others, and return this."""
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

    # Interface for users of an engine

    @property
    def plan(self) -> Plan:
        return self._keeper.plan

    @property
    def failure(self) -> EngineError | None:
        return self._keeper.failure

    @property
    def replicas(self) -> list[RunningReplica]:
        """The engines that run."""
        return list(chain.from_iterable(replica.running for replica in self._replicas))

    @property
    def replica_stats(self) -> list[Stats]:
        """The stats of each replica; without an engine, its gauges are 0."""
        return [replica.stats for replica in self._replicas]

    @property
    def stats(self) -> Stats:
        """The stats of all replicas together; requests that wait for a replica count as waiting."""
        total = sum_stats(self.replica_stats)
        total.waiting += self._requests.waiting
        return total

    @property
    def outage(self) -> str:
        """The reason why no request can run now; "" if a replica runs."""
        if self.failure is not None:
            return str(self.failure)
        if any(replica.alive for replica in self._replicas):
            return ""
        none = "no replica runs" if len(self._replicas) > 1 else "the engine starts again"
        dying = (replica.engine.outage for replica in self._replicas if replica.engine is not None)
        return f"{none}: {next(dying, None) or self._requests.last_death or 'they start'}"

    @property
    def stopped_s(self) -> float:
        """Seconds for which a process of an engine has been stopped (SIGSTOP)."""
        return max((replica.engine.stopped_s for replica in self._replicas if replica.engine), default=0.0)

    @property
    def computes(self) -> bool:
        """True while the core of an engine sees its ranks compute a step."""
        return any(replica.engine is not None and replica.engine.computes for replica in self._replicas)

    @property
    def alive(self) -> bool:
        return self._requests.ended is None

    async def died(self) -> None:
        """Wait until no engine is started again. Closing is no failure."""
        await self._keeper.died()

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Queue requests, as `AsyncEngine.submit`."""
        stream = OutputStream(self, [request.id for request in requests])
        self.send_requests(requests, stream)
        return stream

    def send_requests(self, requests: Sequence[Request], sink: OutputSink) -> None:
        """Queue requests, all or none; `sink` gets their outputs.

        Raises QueueFullError, EngineError, and RequestError for an id that an open request has.
        """
        self._requests.send_requests(requests, sink)

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; they get no more outputs. Unknown ids are ignored."""
        self._requests.abort(ids)

    async def call(self, command: Command | ResetPrefixCache) -> Replies:
        """Have the ranks of all replicas execute a command; return their replies, replica by replica.

        An engine that starts during the call follows the commands that it has missed. A caller that is cancelled does
        not stop the command. Raises EngineError, and RequestError if a replica refuses the command; one that refuses a
        change that others have made starts again, and follows them.
        """
        return [reply for _, replies in await self.call_each(command) for reply in replies]

    async def call_each(self, command: Command | ResetPrefixCache) -> list[tuple[RunningReplica, Replies]]:
        """Like `call`, with the engines that reply; an engine that dies during the call is left out."""
        self._requests.raise_end()
        call = asyncio.create_task(self._call_in_turn(command))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)

    async def _call_in_turn(self, command: Command | ResetPrefixCache) -> list[tuple[RunningReplica, Replies]]:
        async with self._turn:
            self._requests.raise_end()
            running = self.replicas
            engines = [replica.engine for replica in self._replicas if replica.engine is not None]
            results = await asyncio.gather(*(engine.call(command) for engine in engines), return_exceptions=True)
            answers, refusals, deaths = [], [], []
            for engine, replica, result in zip(engines, running, results, strict=True):
                if not isinstance(result, BaseException):
                    answers.append((replica, result))
                elif isinstance(result, EngineError):
                    deaths.append(result)
                else:
                    refusals.append((engine, result))
            if answers and self._note_state(command):
                for engine, refusal in refusals:
                    engine.fail(_left_behind(refusal))
        if refusals:
            raise refusals[0][1]
        if not answers:
            raise next(iter(deaths), None) or self._requests.last_death or EngineError(CLOSED)
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
        closed = EngineError(CLOSED)
        self._requests.refuse(closed)
        self._keeper.stop()
        for replica in self._replicas:
            if replica.engine is not None:
                replica.engine.abandon()
        self._requests.end(closed)

    async def close(self) -> None:
        """End all engines, and wait until they are gone. May be called twice."""
        self.abandon()
        if self._nodes is not None:
            await asyncio.to_thread(self._nodes.close)
        await self._keeper.close()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if self._forks is not None:
            await asyncio.to_thread(self._forks.end)


def _left_behind(refusal: BaseException) -> Cause:
    """The cause with which an engine ends that has refused a change that others have made."""
    text = f"refuses what other replicas have done: {refusal}"
    return Cause(rank=CORE, phase="step", code="replica-left-behind", cause=text)


def _with_queue(config: EngineConfig, capacity: int) -> EngineConfig:
    """The config of one engine, whose queue takes the requests of all."""
    return dataclasses.replace(config, max_num_queued_reqs=capacity)


async def start_engine(
    planned: Sequence[ReplicaPlan],
    config: EngineConfig,
    worker: str = WORKER,
    stall_s: float | None = None,
    nodes: EngineNodes | None = None,
) -> AsyncEngine | ReplicaSet:
    """Start one engine, or several as one. Raises EngineError with the root cause.

    The arguments are as in `ReplicaSet.start`. One engine is a ReplicaSet too if it shall start again after a failure:
    with `stall_s` on this machine, on several nodes if these last.
    """
    lasting = nodes.lasting if nodes is not None else stall_s is not None
    if len(planned) > 1 or lasting:
        return await ReplicaSet.start(planned, config, worker, stall_s, nodes)
    if nodes is None:
        return await AsyncEngine.start(planned[0].plan, config, worker)
    plan, others = await nodes.take(0)
    return await AsyncEngine.start(plan, config, worker, others)
