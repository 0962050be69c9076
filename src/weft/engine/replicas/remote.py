"""AsyncEngine: the core in a process of its own, for an asyncio program."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import cast

from weft.config import EngineConfig
from weft.engine.core.commands import Command, Replies, ResetPrefixCache
from weft.engine.core.request import Output, Request, Stats
from weft.engine.executors.base import StartResult
from weft.engine.executors.node_messages import OtherNodes
from weft.engine.executors.rank import WORKER
from weft.engine.executors.ranks import CLOSED
from weft.engine.executors.ray_nodes import RayNodes
from weft.engine.frontend.checks import check_frame
from weft.engine.processes.causes import cause_of
from weft.engine.processes.fork_client import ForkClient
from weft.engine.processes.framing import FrameDecoder, encode_frame
from weft.engine.processes.launch import FAMILY_EXIT_S, Child, end_children
from weft.engine.processes.liveness import BEAT_S, Alive, Heartbeat, Silence, idle_beat_s
from weft.engine.replicas.messages import (
    AbortRequests,
    AddRequests,
    CallDone,
    CallRanks,
    CallRefused,
    CoreFailed,
    CoreStarted,
    FromCore,
    InheritedServer,
    RequestRefused,
    StartCore,
    StepOutputs,
    ToCore,
)
from weft.engine.replicas.output_stream import OutputSink, OutputStream
from weft.engine.replicas.queue_limit import QueueLimit
from weft.engine.replicas.running import RunningReplica
from weft.errors import CORE, Cause, EngineError, QueueFullError, RequestError, WeftError
from weft.plan.plan import Plan

LOST = Cause(
    rank=CORE, phase="step", code="connection-closed", cause="its connection has closed, and the cause is not known yet"
)
SILENT_S = 1.5  # seconds without a sign of life, after which a core that is to end gets no time for it
CORE_MODULE = "weft.engine.replicas.process"


class AsyncEngine:
    """The engine, created by `await AsyncEngine.start(...)` and used from that event loop.

    `plan` is the executed plan, with the served length. `ready` is what the ranks reported. `stats` are the core's as
    of its last message. `failure` is the error that ended the engine; it stays None if the engine is closed.
    `alive_sign` is what the core has last said of its ranks.
    """

    plan: Plan
    ready: StartResult

    def __init__(self, limit: QueueLimit, child: Child[FromCore]) -> None:
        loop = asyncio.get_running_loop()
        self.stats = Stats()
        self.failure: EngineError | None = None
        self._limit = limit
        self._streams: dict[str, OutputSink] = {}
        self._owners: dict[str, int] = {}  # of these and of some that have ended, if the limit is each owner's
        self._calls: dict[int, asyncio.Future[Replies]] = {}
        self._call_ids = count()
        self._closed = False
        self._lost = False  # the connection has ended, and its cause is not known yet
        self._started: asyncio.Future[CoreStarted] = loop.create_future()
        self._died: asyncio.Future[None] = loop.create_future()
        self._child = child
        self._connection = CoreConnection(self)
        self._silence = Silence(self._child.process.pid)
        self.alive_sign = Alive()
        self.watched = False  # the core watches the ranks, which are processes of this machine
        self._work_came = asyncio.Event()
        self._watch_task: asyncio.Task[None] | None = None
        self._exit_task: asyncio.Task[None] | None = None  # held here, or it could be garbage-collected

    @classmethod
    async def start(
        cls,
        plan: Plan,
        config: EngineConfig,
        worker: str = WORKER,
        others: OtherNodes | RayNodes | None = None,
        stall_s: float | None = None,
        forks: ForkClient | None = None,
        *,
        forks_core: bool = False,
    ) -> AsyncEngine:
        """Start the core and its ranks, and wait until all are warm. Raises EngineError with the root cause.

        `worker` is the class that each rank runs, as "module:Class". `others` are nodes that have joined this one; the
        core inherits their connections, which are closed here. With `stall_s`, a process that shows no sign of life for
        `stall_s` seconds has failed, and so has the engine if a step does not finish. `forks` forks the ranks, and with
        `forks_core` the core too; it outlives them. It may be cancelled.
        """
        descriptors = others.descriptors if isinstance(others, OtherNodes) else []
        inherited = InheritedServer(forks.descriptor, forks.pid) if forks else None
        files = [*descriptors, inherited.descriptor] if inherited else descriptors
        limit = QueueLimit.of(config, plan.max_running + config.max_num_queued_reqs)
        try:
            engine = cls(limit, await start_core(files, forks if forks_core else None))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            await engine._connection.connect(engine._child)
            engine._connection.send(StartCore(plan, config, worker, others, stall_s, inherited))
            if stall_s is not None:
                engine._watch_task = asyncio.create_task(engine._watch_core(stall_s))
                engine.watched = others is None and config.executor in (None, "processes")
            started = await engine._started
        except BaseException:  # after a cancellation by Ctrl-C, too, no process may be left behind
            await engine.close()
            raise
        engine.plan, engine.ready = started.plan, started.ready
        engine.stats = Stats(blocks_total=started.ready.num_blocks)
        return engine

    @property
    def alive(self) -> bool:
        """True while requests and commands reach the core."""
        return not self._lost and not self._has_ended

    @property
    def _has_ended(self) -> bool:
        return self.failure is not None or self._closed

    @property
    def calling(self) -> bool:
        """True while a command is on its way, in whose time no step need finish."""
        return bool(self._calls)

    @property
    def outage(self) -> str:
        """The reason why no request can run now; "" if requests can."""
        return str(self.failure or (EngineError(LOST) if self._lost else ""))

    @property
    def replicas(self) -> list[RunningReplica]:
        """The engines that run: this one."""
        return [RunningReplica(self.plan, self.ready)]

    @property
    def replica_stats(self) -> list[Stats]:
        """The stats of each engine: of this one."""
        return [self.stats]

    @property
    def stopped_s(self) -> float:
        """Seconds for which the core, or one of its ranks, has been stopped (SIGSTOP)."""
        return max(self._silence.stopped_s, self.alive_sign.stopped_s)

    @property
    def computes(self) -> bool:
        """True while the core sees its ranks compute a step."""
        return self.alive_sign.computes

    async def died(self) -> None:
        """Wait until the engine fails. Closing it is no failure."""
        await asyncio.shield(self._died)

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Queue requests, all or none, and return the stream of their outputs until the last has finished.

        Raises QueueFullError, EngineError and RequestError at once. The iteration raises EngineError if the engine
        dies, and RequestError for a request that the core refuses. Ending it early, with `aclose`, aborts the requests
        that have not finished.
        """
        stream = OutputStream(self, [request.id for request in requests])
        self.send_requests(requests, stream)
        return stream

    def send_requests(self, requests: Sequence[Request], sink: OutputSink) -> None:
        """Queue requests, all or none; `sink` gets their outputs.

        Raises QueueFullError, EngineError, and RequestError for a request whose result cannot be sent.
        """
        self._raise_failure()
        for request in requests:
            check_frame(request)
        # Every open stream's requests are in the core, or on their way to it: within this limit it refuses none.
        self._limit.check(requests, len(self._streams), self._count_owned)
        # Sent first: requests that cannot be sent must not count as open.
        self._connection.send(AddRequests(list(requests)))
        self._streams.update((request.id, sink) for request in requests)
        self._work_came.set()
        if self._limit.per_owner:
            self._forget_owners()
            self._owners.update((request.id, request.owner) for request in requests)

    def _forget_owners(self) -> None:
        """Forget the owners of requests that have ended, as soon as they are the most."""
        if len(self._owners) > 2 * len(self._streams):
            self._owners = {id: owner for id, owner in self._owners.items() if id in self._streams}

    def _count_owned(self, owner: int) -> int:
        return sum(self._owners.get(id) == owner for id in self._streams)

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; they get no more outputs. Unknown ids are ignored."""
        for id, sink in self.withdraw(ids).items():
            sink.drop_request(id)

    def withdraw(self, ids: Iterable[str]) -> dict[str, OutputSink]:
        """Detach requests that move to another engine; return their sinks."""
        known = {id: self._streams.pop(id) for id in ids if id in self._streams}
        if known:
            self._connection.send(AbortRequests(list(known)))
        return known

    async def call(self, command: Command | ResetPrefixCache) -> Replies:
        """Have the ranks execute a command between two steps; return their replies. Raises RequestError, EngineError.

        A caller that is cancelled does not stop the command.
        """
        self._raise_failure()
        id = next(self._call_ids)
        self._connection.send(CallRanks(id, command))
        self._calls[id] = asyncio.get_running_loop().create_future()
        try:
            return await self._calls[id]
        finally:
            self._calls.pop(id, None)

    async def call_each(self, command: Command | ResetPrefixCache) -> list[tuple[RunningReplica, Replies]]:
        """Like `call`, with the engine that replies."""
        return [(self.replicas[0], await self.call(command))]

    async def close(self) -> None:
        """End the core and its ranks, and wait until they are gone. May be called twice."""
        self.abandon()
        if self._watch_task:
            self._watch_task.cancel()
        if not self._started.cancel() and not self._started.cancelled():
            self._started.exception()  # retrieved, or asyncio warns if no caller has waited for it
        self._connection.close()
        # A core that shows no sign of life will not end by itself. Its ranks end with it.
        exit_s = 0.0 if self._silence.seconds > SILENT_S else FAMILY_EXIT_S
        try:
            try:
                await asyncio.to_thread(end_children, [self._child], exit_s)
            except RuntimeError:  # the interpreter exits, and starts no more threads
                end_children([self._child], exit_s)
            await self._connection.closed()
        finally:  # a caller that is cancelled leaves no descriptors
            self._connection.abort()
            self._child.close()

    def abandon(self) -> None:
        """Fail all callers; the engine takes no more requests. Its processes go on until `close`."""
        if not self._has_ended:
            self._closed = True
            self._fail_callers(CLOSED)

    def handle_message(self, message: FromCore) -> None:
        """Handle a message from the core."""
        self._silence.hear()
        match message:
            case Alive():
                self.alive_sign = message
            case StepOutputs(outputs, stats):
                self.stats = stats
                self._pass_on(outputs)
            case RequestRefused(id, text, code, full, param):
                if stream := self._streams.get(id):
                    stream.put(QueueFullError(text, code=code) if full else RequestError(text, param=param, code=code))
            case CallDone() | CallRefused():
                self._answer_call(message)
            case CoreStarted() if not self._started.done():
                self._started.set_result(message)
            case CoreFailed(cause):
                self.fail(cause)

    def _pass_on(self, outputs: Iterable[Output]) -> None:
        """Give each output to the sink of its request."""
        for output in outputs:
            id = output.id  # the sink may give the output its caller's id
            if stream := self._streams.get(id):
                stream.put(output)
                if output.finish_reason is not None:
                    self._streams.pop(id).close_request(id)

    def _answer_call(self, message: CallDone | CallRefused) -> None:
        """Pass the result of a command to its caller, who may be gone."""
        if isinstance(message, CallDone):
            self.stats = message.stats
        reply = self._calls.get(message.id)
        if reply is None or reply.done():
            return
        if isinstance(message, CallDone):
            reply.set_result(message.replies)
        else:
            reply.set_exception(RequestError(message.message, param=message.param, code=message.code))

    def connection_ended(self, error: Exception | None) -> None:
        """Handle the end of the connection. If the core has not sent a cause, its exit status shows the cause.

        That takes up to two seconds, in which the engine takes nothing. Its requests fail with the cause.
        """
        self._lost = True
        if not self._has_ended:
            self._exit_task = asyncio.create_task(self._fail_by_exit(error))

    def fail(self, cause: Cause) -> None:
        """Fail all requests, and those to come, with this cause. Only the first call counts."""
        if self._has_ended:
            return
        self.failure = EngineError(cause)
        if not self._started.done():
            self._started.set_exception(EngineError(cause))
        self._fail_callers(cause)
        self._died.set_result(None)

    async def _watch_core(self, limit_s: float) -> None:
        """Send heartbeats, and fail once the core has shown no sign of life for `limit_s` seconds."""
        idle_s = idle_beat_s(limit_s)
        while self.alive:
            self._connection.send(Heartbeat())
            self._work_came.clear()
            if self._streams or not self._started.done():
                await asyncio.sleep(BEAT_S)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._work_came.wait(), idle_s)
            self._silence.tick(time.monotonic(), idle_s)
            if self._silence.seconds >= limit_s:
                self.fail(self._silence.reason.of(CORE, "step" if self._started.done() else "start"))

    async def _fail_by_exit(self, error: Exception | None) -> None:
        reason = await asyncio.to_thread(self._child.describe_exit)
        phase = "step" if self._started.done() else "start"
        self.fail(cause_of(error, CORE, phase) if isinstance(error, WeftError) else reason.of(CORE, phase))

    def _fail_callers(self, cause: Cause) -> None:
        for stream in set(self._streams.values()):
            stream.put(EngineError(cause))
        self._streams.clear()
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(EngineError(cause))

    def _raise_failure(self) -> None:
        if self.failure:
            raise EngineError(self.failure.cause)
        if self._closed or self._lost:
            raise EngineError(CLOSED if self._closed else LOST)


class CoreConnection(asyncio.Protocol):
    """The socket to the core, in the event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._decoder: FrameDecoder[FromCore] = FrameDecoder(FromCore)
        self._transport: asyncio.WriteTransport | None = None
        self._closed = asyncio.get_running_loop().create_future()

    async def connect(self, child: Child[FromCore]) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=child.channel.socket)

    def send(self, message: ToCore) -> None:
        """Send a message; without effect if the connection has ended: uvloop raises for a transport that is closed."""
        assert self._transport is not None
        frame = encode_frame(message)
        if not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport:
            self._transport.close()

    def abort(self) -> None:
        """Close at once, whatever is not sent yet. Without effect if the connection has ended."""
        if self._transport:
            self._transport.abort()

    async def closed(self) -> None:
        """Wait until the descriptor is closed."""
        if self._transport:
            await asyncio.shield(self._closed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from WriteTransport, but have all of its methods.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._engine.handle_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set_result(None)
        self._engine.connection_ended(error)


async def start_core(files: Iterable[int], forks: ForkClient | None) -> Child[FromCore]:
    """Start the core's process, which inherits `files`. May be cancelled.

    `forks`, which no other process uses at this time, forks it if it can: no module is imported again.
    """
    if forks is None:
        return Child(CORE_MODULE, FromCore, files=files)
    forks.reclaim()
    starting: asyncio.Task[Child[FromCore]] = asyncio.create_task(
        # In a thread, since a server that is stopped has to be waited for.
        asyncio.to_thread(Child, CORE_MODULE, FromCore, env=forks.environment, files=files, server=forks)
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        child = await starting
        await asyncio.to_thread(end_children, [child], 0.0)
        child.close()
        raise
