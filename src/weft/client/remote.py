"""AsyncEngine: the core in a process of its own, for an asyncio program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import NoReturn, cast

from weft.client.messages import Abort, Add, Begin, Broken, FromCore, Outputs, Refused, Started, ToCore
from weft.config import EngineConfig
from weft.core.request import Output, Request, Stats
from weft.errors import CORE, Cause, EngineError, QueueFullError, RequestError, WeftError
from weft.executors.base import Ready
from weft.executors.framing import FrameDecoder, encode_frame
from weft.executors.launch import FAMILY_EXIT_S, Child, end_children
from weft.executors.rank import WORKER
from weft.executors.ranks import CLOSED
from weft.plan.plan import Plan

TURN_S = 0.005  # of a reader that has a backlog


class AsyncEngine:
    """Made by `await AsyncEngine.start(...)`, and used from that event loop. `plan` is the one that runs, with
    the length that is served; `ready` is what the ranks reported, `stats` the core as of the last news of it.
    `failure` says why the engine has died; it stays None where it is closed.
    """

    plan: Plan
    ready: Ready

    def __init__(self, capacity: int) -> None:
        loop = asyncio.get_running_loop()
        self.stats = Stats()
        self.failure: EngineError | None = None
        self._capacity = capacity
        self._streams: dict[str, Stream] = {}
        self._closed = False
        self._started: asyncio.Future[Started] = loop.create_future()
        self._died: asyncio.Future[None] = loop.create_future()
        self._child: Child[FromCore] = Child("weft.client.process", FromCore)
        self._wire = Wire(self)
        self._burial: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, plan: Plan, config: EngineConfig, worker: str = WORKER) -> AsyncEngine:
        """Start the core and its ranks; returns when all are warm. Raises EngineError with the root cause.
        `worker` is the class that each rank runs, as "module:Class"."""
        engine = cls(plan.max_num_seqs + config.max_num_queued_reqs)
        try:
            await engine._wire.connect(engine._child)
            engine._wire.send(Begin(plan, config, worker))
            started = await engine._started
        except BaseException:  # cancelled by Ctrl-C too: nothing is left behind
            await engine.close()
            raise
        engine.plan, engine.ready = started.plan, started.ready
        engine.stats = Stats(blocks_total=started.ready.num_blocks)
        return engine

    @property
    def alive(self) -> bool:
        return self.failure is None and not self._closed

    async def died(self) -> None:
        """Wait until the engine fails. It does not where it is closed."""
        await asyncio.shield(self._died)

    def submit(self, requests: Sequence[Request]) -> Stream:
        """Queue requests, all or none, and iterate over what the steps bring until the last has finished.

        Raises QueueFullError and EngineError at once. The iteration raises EngineError when the engine dies,
        and RequestError for what the core finds wrong; ending it early, with `aclose`, aborts the rest.
        """
        self._check()
        # All that is open here is the core's work or will be: it never has to refuse what is within this.
        if len(self._streams) + len(requests) > self._capacity:
            raise QueueFullError(
                f"{len(self._streams)} requests run or wait, {len(requests)} more are over the limit of "
                f"{self._capacity}; try again later, or raise --max-num-queued-reqs"
            )
        # Sent first: what cannot be sent must not take up room for ever.
        self._wire.send(Add(list(requests)))
        stream = Stream(self, [request.id for request in requests])
        self._streams.update(dict.fromkeys(stream.open, stream))
        return stream

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; nothing more comes for them. Those that are not there any more are no error."""
        known = [id for id in ids if id in self._streams]
        for id in known:
            self._streams.pop(id).drop(id)
        if known and self.alive:
            self._wire.send(Abort(known))

    async def close(self) -> None:
        """End the core and its ranks, and wait until they are gone. May be called twice."""
        if self.alive:
            self._closed = True
            self._fail_streams(CLOSED)
        if not self._started.cancel() and not self._started.cancelled():
            self._started.exception()  # nobody may have waited for it
        self._wire.close()
        await asyncio.to_thread(end_children, [self._child], FAMILY_EXIT_S)
        await self._wire.closed()
        self._child.close()

    def hear(self, message: FromCore) -> None:
        """Take in what the core says."""
        match message:
            case Outputs(outputs, stats):
                self.stats = stats
                for output in outputs:
                    if stream := self._streams.get(output.id):
                        stream.put(output)
                        if output.finish_reason is not None:
                            self._streams.pop(output.id).close(output.id)
            case Refused(id, text, full, param):
                if stream := self._streams.get(id):
                    stream.put(QueueFullError(text) if full else RequestError(text, param=param))
            case Started() if not self._started.done():
                self._started.set_result(message)
            case Broken(cause):
                self.die(cause)

    def lost(self, error: Exception | None) -> None:
        """The connection has ended. Where the core has not said why, its end tells."""
        if self.alive:
            self._burial = asyncio.create_task(self._bury(error))

    def die(self, cause: Cause) -> None:
        """Fail everything with this cause, the first one."""
        if not self.alive:
            return
        self.failure = EngineError(cause)
        if not self._started.done():
            self._started.set_exception(EngineError(cause))
        self._fail_streams(cause)
        self._died.set_result(None)

    async def _bury(self, error: Exception | None) -> None:
        text, hint = await asyncio.to_thread(self._child.describe_exit)
        if isinstance(error, WeftError):
            text, hint = str(error), ""
        self.die(Cause(CORE, "step" if self._started.done() else "start", text, hint))

    def _fail_streams(self, cause: Cause) -> None:
        for stream in set(self._streams.values()):
            stream.put(EngineError(cause))
        self._streams.clear()

    def _check(self) -> None:
        if self.failure:
            raise EngineError(self.failure.cause)
        if self._closed:
            raise EngineError(CLOSED)


class Stream(AsyncGenerator[Output, None]):
    """What comes for the requests `open`, in the order in which the steps brought it. What has come for a request
    that is aborted meanwhile is left out. A reader with a backlog lets the event loop go on every `TURN_S`: other
    streams, and the news that its own client has gone, come in between."""

    def __init__(self, engine: AsyncEngine, ids: Sequence[str]) -> None:
        self.open = dict.fromkeys(ids)
        self._engine = engine
        self._dropped: set[str] = set()
        self._turn_ends_s = 0.0
        self._news: asyncio.Queue[Output | WeftError | None] = asyncio.Queue()

    def put(self, news: Output | WeftError) -> None:
        self._news.put_nowait(news)

    def close(self, id: str) -> None:
        """Nothing more comes for this one."""
        self.open.pop(id, None)
        if not self.open:
            self._news.put_nowait(None)

    def drop(self, id: str) -> None:
        """This one was aborted."""
        self._dropped.add(id)
        self.close(id)

    async def asend(self, value: None) -> Output:
        try:
            news = await self._next()
        except BaseException:
            self._engine.abort(list(self.open))
            raise
        if isinstance(news, Output):
            return news
        self._news.put_nowait(None)  # and that is all, however often it is asked
        self._engine.abort(list(self.open))
        if news is None:
            raise StopAsyncIteration
        raise news

    async def _next(self) -> Output | WeftError | None:
        clock = asyncio.get_running_loop().time
        while True:
            rested = self._news.empty()
            if not rested and clock() > self._turn_ends_s:
                await asyncio.sleep(0)
                rested = True
            news = await self._news.get()
            if rested:
                self._turn_ends_s = clock() + TURN_S
            if not isinstance(news, Output) or news.id not in self._dropped:
                return news

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> NoReturn:
        """`aclose` comes here: whoever listened has gone."""
        self._engine.abort(list(self.open))
        self._news = asyncio.Queue()
        self._news.put_nowait(None)
        raise kind


class Wire(asyncio.Protocol):
    """The socket to the core, in the event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._decoder: FrameDecoder[FromCore] = FrameDecoder(FromCore)
        self._transport: asyncio.WriteTransport | None = None
        self._closed = asyncio.get_running_loop().create_future()

    async def connect(self, child: Child[FromCore]) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=child.channel.socket)

    def send(self, message: ToCore) -> None:
        assert self._transport is not None
        self._transport.write(encode_frame(message))

    def close(self) -> None:
        if self._transport:
            self._transport.close()

    async def closed(self) -> None:
        """Wait until the descriptor is given back."""
        if self._transport:
            await asyncio.shield(self._closed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none by type, but in all they do.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._engine.hear(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set_result(None)
        self._engine.lost(error)
