"""HandOver: the requests of several engines. If an engine dies, the others go on with its requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from itertools import count

from msgspec.structs import replace

from weft.client.output_stream import OutputSink
from weft.client.replica import Replica
from weft.client.room import Room
from weft.client.routing import Router, work_of
from weft.core.request import Output, Request, duplicate_id_error
from weft.core.token_ids import TokenIds
from weft.errors import CORE, EngineError, WeftError
from weft.executors.causes import cause_of
from weft.executors.ranks import CLOSED

MOVES = 3  # engines that a request may lose before it fails: it may be what kills them
WAIT_S = 30.0  # seconds for a replica, while none runs


class RoutedRequest:
    """A request, and the sink of what its replica sends. `tokens` are those of its answer so far.

    `engine_id` is its id in the engine. Each hand-over has a new one: an engine to which the request comes back may
    still send outputs of the time before.
    """

    def __init__(self, owner: HandOver, request: Request, sink: OutputSink) -> None:
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
            if self.replica is not None and item.finish_reason is not None:
                self.replica.note_answer()
        self.sink.put(item)

    def close_request(self, id: str) -> None:
        self._owner.forget_request(self)
        self.sink.close_request(self.request.id)

    def drop_request(self, id: str) -> None:
        self._owner.forget_request(self)
        self.sink.drop_request(self.request.id)


class HandOver:
    """The open requests of a set of replicas: each is with a replica, or waits for one up to WAIT_S seconds.

    `room` limits their number, `moves` that of the engines that a request may lose and still go on. `ended` is the
    error after which none is taken, `last_death` the last failure of an engine or of a start. `busy` is set while there
    are requests.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router, room: Room, moves: int = MOVES) -> None:
        self._room, self._moves = room, moves
        self.ended: EngineError | None = None
        self.last_death: EngineError | None = None
        self.busy = asyncio.Event()
        self._replicas, self._router = replicas, router
        self._open: dict[str, RoutedRequest] = {}
        self._waiting: list[RoutedRequest] = []  # for a replica
        self._numbers = count()

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a replica."""
        return len(self._waiting)

    def raise_end(self) -> None:
        """Raise the error after which no request is taken, if there is one."""
        if self.ended is not None:
            raise EngineError(self.ended.cause, lost=0)

    def _count_owned(self, owner: int) -> int:
        return sum(one.request.owner == owner for one in self._open.values())

    def send_requests(self, requests: Sequence[Request], sink: OutputSink) -> None:
        """Queue requests, all or none; `sink` gets their outputs.

        Raises QueueFullError, EngineError, and RequestError for an id that an open request has.
        """
        self.raise_end()
        for request in requests:
            if request.id in self._open:
                raise duplicate_id_error(request.id)
        self._room.check(requests, len(self._open), self._count_owned)
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

    def move_request(self, routed: RoutedRequest, error: EngineError) -> None:
        """Give a request of an engine that has died to another one."""
        self._leave(routed)
        routed.losses += 1
        self.last_death = error
        if self.ended is None and routed.losses <= self._moves:
            self._place_again([routed])
        else:
            self._fail_request(routed, error)

    def forget_request(self, routed: RoutedRequest) -> None:
        """Forget a request that has ended."""
        self._leave(routed)
        self._open.pop(routed.request.id, None)
        if not self._open:
            self.busy.clear()

    def _place(self, requests: Iterable[RoutedRequest]) -> None:
        """Give requests to replicas, or let them wait for one."""
        for routed in requests:
            loads = [replica.load if replica.alive else None for replica in self._replicas]
            if all(load is None for load in loads):
                self._wait(routed)
                continue
            self._give(routed, self._replicas[self._router.choose_replica(routed.request, loads)])
        if self._open:
            self.busy.set()

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
        id = f"{routed.request.id}@{next(self._numbers)}"
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
            self._fail_request(routed, self.last_death or EngineError(CLOSED))

    def _fail_request(self, routed: RoutedRequest, error: EngineError) -> None:
        self.forget_request(routed)
        routed.sink.put(EngineError(error.cause, lost=routed.losses))

    def welcome(self, replica: Replica) -> None:
        """Give a replica that has an engine again the requests that wait, and some of the others'."""
        waiting, self._waiting = self._waiting, []
        self._place_again(waiting)
        self._relieve_others(replica)

    def refuse(self, error: EngineError) -> None:
        """Take no more requests. Requests whose engines end are not given to others."""
        self.ended = self.ended or error

    def end(self, error: EngineError) -> None:
        """Fail all requests, and take no more."""
        self.refuse(error)
        for routed in list(self._open.values()):
            self._fail_request(routed, error)
