"""HandOver: the requests of several engines. If an engine dies, the others go on with its requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import count

from msgspec import msgpack
from msgspec.structs import replace

from weft.engine.core.request import Output, Request, duplicate_id_error
from weft.engine.core.token_ids import TokenIds
from weft.engine.executors.ranks import CLOSED
from weft.engine.processes.causes import cause_of
from weft.engine.replicas.output_stream import OutputSink
from weft.engine.replicas.queue_limit import QueueLimit
from weft.engine.replicas.replica import Replica
from weft.engine.replicas.routing import Router, work_of
from weft.engine.replicas.suspects import ALONE_S, LOST, REFUSED_S, Suspects, Trial
from weft.errors import CORE, EngineError, FatalRequestError, NoEngineError, WeftError
from weft.logs import event_fields

log = logging.getLogger("weft")

WAIT_S = 30.0  # seconds for a replica, while none runs


class RoutedRequest:
    """A request, and the sink of what its replica sends. `tokens` are the answer's so far.

    `engine_id` is its id in the engine. Each hand-over has a new one: an engine to which the request comes back may
    still send outputs of the time before. `given_s` is the time at which it came there, `given` the number of tokens
    that it had then, `trial` its turn if it is a suspect.
    """

    def __init__(self, owner: HandOver, request: Request, sink: OutputSink) -> None:
        self.request, self.sink = request, sink
        self.tokens: list[int] = []
        self.engine_id = ""
        self.replica: Replica | None = None  # None while it waits for one
        self.losses = 0  # engines in a row that died with it, and before it had a token of theirs
        self.trial: Trial | None = None
        self.given, self.given_s = 0, 0.0
        self.work = work_of(request)
        self.deadline_s = 0.0  # for an engine; 0 while it has one
        self._owner = owner

    @property
    def rest(self) -> Request:
        """The request that goes on behind the tokens so far."""
        if not self.tokens:
            return self.request
        return replace(self.request, answered=TokenIds.pack([*self.request.answered, *self.tokens]))

    @cached_property
    def digest(self) -> bytes:
        """Digest of what the engine is asked for, the random stream excepted."""
        request = self.request
        digest = blake2b(request.prompt.packed, digest_size=16)
        rest = (request.params, request.grammar, request.identity, request.pooling, request.answered)
        digest.update(msgpack.encode(rest))
        return digest.digest()

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
            self._owner.note_output(self, ends=item.finish_reason is not None)
        self.sink.put(item)

    def close_request(self, id: str) -> None:
        self._owner.forget_request(self)
        self.sink.close_request(self.request.id)

    def drop_request(self, id: str) -> None:
        self._owner.forget_request(self)
        self.sink.drop_request(self.request.id)


class HandOver:
    """The open requests of a set of replicas: each is with a replica, or waits for one up to WAIT_S seconds.

    `limit` is for their number. A request that loses LOST engines in a row fails, since it may be what kills them. If
    it lost them while no other suspect was there, it is refused for a while. `ended` is the error after which none is
    taken, `last_death` the last failure of an engine or of a start. `busy` is set while there are requests.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router, limit: QueueLimit, lost: int = LOST) -> None:
        self._limit, self._lost = limit, lost
        self._suspects = Suspects()
        self._turn: asyncio.TimerHandle | None = None  # for the next suspect
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
            raise NoEngineError(self.ended.cause)

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
        self._limit.check(requests, len(self._open), self._count_owned)
        routed = [RoutedRequest(self, request, sink) for request in requests]
        self._check_suspects(routed)
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
        replica, trial = routed.replica, routed.trial
        self._leave(routed)
        self.last_death = error
        if self.ended is not None:
            self._fail_request(routed, error)
            return
        progressed = len(routed.tokens) > routed.given
        routed.losses = 1 if progressed else routed.losses + 1
        if replica is not None and not progressed:
            self._note_death(trial or Trial(routed.digest, replica.number, routed.given_s, suspected=False), error)
        if routed.losses < self._lost:
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
        """Give requests to replicas, or let them wait for a replica."""
        for routed in requests:
            loads = [replica.load if self._may_give(routed, replica) else None for replica in self._replicas]
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
                self._check_suspects([routed])  # another one like it may have come first
                self._place([routed])
            except FatalRequestError as error:
                self.forget_request(routed)
                routed.sink.put(error)
            except Exception as error:  # such as a request that cannot be sent
                self._fail_request(routed, EngineError(cause_of(error, CORE, "step")))

    def _give(self, routed: RoutedRequest, replica: Replica) -> None:
        """Give a request to a replica that has an engine."""
        assert replica.engine is not None
        id = f"{routed.request.id}@{next(self._numbers)}"
        replica.engine.send_requests([replace(routed.rest, id=id)], routed)
        routed.engine_id, routed.deadline_s = id, 0.0
        routed.given, routed.given_s = len(routed.tokens), time.monotonic()
        if self._suspects:
            routed.trial = self._suspects.begin(routed.digest, replica.number, routed.given_s)
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
            if routed.trial is not None and routed.trial.suspected:
                continue
            if (other.load - routed.work) / other.weight >= (replica.load + routed.work) / replica.weight:
                other.engine.withdraw([routed.engine_id])
                self._leave(routed)
                self._give(routed, replica)

    def _leave(self, routed: RoutedRequest) -> None:
        """Take a request from its replica, or from the queue of waiting requests."""
        replica, routed.replica = routed.replica, None
        self._end_trial(routed)
        if replica is not None:
            replica.open -= 1
            replica.load -= routed.work
        elif routed in self._waiting:
            self._waiting.remove(routed)

    def _wait(self, routed: RoutedRequest) -> None:
        """Let a request wait for a replica, up to WAIT_S seconds after it lost the last one."""
        loop = asyncio.get_running_loop()
        if not routed.deadline_s:
            routed.deadline_s = loop.time() + WAIT_S
            loop.call_at(routed.deadline_s, self._expire, routed)
        if self._turn is None and any(replica.alive for replica in self._replicas):  # each has a suspect
            self._turn = loop.call_later(ALONE_S, self._place_waiting)
        self._waiting.append(routed)

    def _expire(self, routed: RoutedRequest) -> None:
        """End the wait of a request: without an engine it fails, otherwise it goes to an engine with other suspects."""
        if routed not in self._waiting or asyncio.get_running_loop().time() < routed.deadline_s:
            return
        if any(replica.alive for replica in self._replicas):
            self._leave(routed)
            self._place_again([routed])
        else:
            error = self.last_death or EngineError(CLOSED)
            self._fail_request(routed, error if routed.losses else NoEngineError(error.cause))

    def _fail_request(self, routed: RoutedRequest, error: EngineError) -> None:
        self.forget_request(routed)
        routed.sink.put(type(error)(error.cause))

    # Suspects

    def _check_suspects(self, requests: Iterable[RoutedRequest]) -> None:
        """Raise FatalRequestError for a request that is refused."""
        if not self._suspects:
            return
        now = time.monotonic()
        for routed in requests:
            if (left_s := self._suspects.refused_s(routed.digest, now)) > 0:
                raise FatalRequestError(
                    f"{LOST} engines in a row died while they had this request, and it was not answered between; it is "
                    f"refused for {left_s:.0f} s; change it, or report its digest {routed.digest.hex()}"
                )

    def _may_give(self, routed: RoutedRequest, replica: Replica) -> bool:
        """Return True if a replica lives and has no other suspect, should the request be one; in the end with it."""
        if not replica.alive or not self._suspects:
            return replica.alive
        if routed.deadline_s and asyncio.get_running_loop().time() >= routed.deadline_s:
            return True
        return self._suspects.may_begin(routed.digest, replica.number, time.monotonic())

    def note_output(self, routed: RoutedRequest, *, ends: bool) -> None:
        """Make room for the next suspect, and forgive one whose answer ends."""
        if not self._suspects:
            return
        if ends:
            self._suspects.note_answer(routed.digest)
        self._end_trial(routed)

    def _end_trial(self, routed: RoutedRequest) -> None:
        trial, routed.trial = routed.trial, None
        if trial is not None and trial.suspected:
            self._suspects.end(trial)
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._place_waiting)

    def _note_death(self, trial: Trial, error: EngineError) -> None:
        if self._suspects.note_death(trial, time.monotonic()):
            log.error(
                "%d engines in a row died with one request (%s); its digest is %s, and it is refused for %.0f s",
                LOST,
                error,
                trial.digest.hex(),
                REFUSED_S,
                extra=event_fields("request-ends-engines"),
            )

    def _place_waiting(self) -> None:
        """Give the requests that wait to replicas, as far as these may have them."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        waiting, self._waiting = self._waiting, []
        self._place_again(waiting)

    # Replicas

    def welcome(self, replica: Replica) -> None:
        """Give a replica that has an engine again the requests that wait, and some of the others'."""
        self._place_waiting()
        self._relieve_others(replica)

    def refuse(self, error: EngineError) -> None:
        """Take no more requests. Requests whose engines end are not given to others."""
        self.ended = self.ended or error

    def end(self, error: EngineError) -> None:
        """Fail all requests, and take no more."""
        self.refuse(error)
        for routed in list(self._open.values()):
            self._fail_request(routed, error)
