"""System: replicas behind a policy, and the events of a run in the order of their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

import msgspec

from weft.core.request import Stats
from weft.errors import QueueFullError, RequestError
from weft.gateway.policy import Policy
from weft.simulate.load import RequestSource
from weft.simulate.replica import Replica, ReplicaSpec
from weft.simulate.tally import RequestTimes, Tally
from weft.simulate.unsimulated import UnsimulatedReplicas

LOOK_EVERY = 4096  # events


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. Counters are those of the window, of all replicas together; `events` are the steps, stretches
    and arrivals of the whole run, `steps` the scheduler's steps that they stand for."""

    tally: Tally
    replicas: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    events: int
    steps: int


def simulate(
    specs: Sequence[ReplicaSpec],
    source: RequestSource,
    policy: Policy,
    *,
    warmup_s: float,
    end_s: float,
    prefix_caching: bool,
    unsimulated: int = 0,
    stretches: bool = True,
    enough: Callable[[Tally], bool] = lambda tally: False,
    on_time: Callable[[float], object] = lambda now: None,
) -> SimulationResult:
    """One replica for each spec, from time 0 with nothing to do, and a `unsimulated` of others that are only counted with.

    Requests that come from `warmup_s` to `end_s` are measured, and others keep coming until the last of those has
    ended. An infinite `end_s` is when all requests of a source that has an end have ended. `enough` is asked now and
    then whether that need not be awaited, and the window ends where it says so; `on_time` is told the time as often.
    """
    tally = Tally(warmup_s, end_s)
    replicas = [Replica(spec, tally, prefix_caching=prefix_caching, stretches=stretches) for spec in specs]
    system = Simulation(replicas, unsimulated, source, policy, tally)
    before: Stats | None = None
    after: Stats | None = None
    while (now := system.next_s) < inf:
        if before is None and now >= warmup_s:
            before = system.total()
        if after is None and now >= end_s:
            after = system.total()
        if after and not system.awaited:
            break
        system.turn(now)
        if system.events % LOOK_EVERY == 0:
            on_time(now)
            if before and not after and enough(tally):
                tally.end_s = now
                break
    whole = system.total()
    before, after = before or whole, after or whole
    tally.end_s = max(tally.begin_s, min(tally.end_s, system.last_s))
    return SimulationResult(
        tally=tally,
        replicas=len(replicas),
        preemptions=after.preemptions - before.preemptions,
        prefix_queries=after.prefix_queries - before.prefix_queries,
        prefix_hits=after.prefix_hits - before.prefix_hits,
        events=system.events,
        steps=whole.steps,
    )


class Simulation:
    """What happens next, and what that leads to. `awaited` counts the measured requests that have not ended."""

    def __init__(
        self, replicas: Sequence[Replica], unsimulated: int, source: RequestSource, policy: Policy, tally: Tally
    ) -> None:
        self.events = self.awaited = 0
        self.last_s = 0.0  # when something happened last
        self._replicas, self._source, self._policy, self._tally = replicas, source, policy, tally
        self._connections = [0] * (len(replicas) + unsimulated)
        self._others = (
            UnsimulatedReplicas(self._connections, len(replicas), most=replicas[0].most) if unsimulated else None
        )
        # When replicas are due, and the last such time that stands there for each: other times are over.
        self._agenda: list[tuple[float, int]] = []
        self._noted = [inf] * len(replicas)
        self._asked = 0

    @property
    def next_s(self) -> float:
        """When something happens, infinity where nothing will."""
        found = min(self._agenda[0][0] if self._agenda else inf, self._source.next_s)
        return min(found, self._others.next_s) if self._others else found

    def turn(self, now: float) -> None:
        """What happens at `next_s`: an end comes before an arrival."""
        if self._others and self._others.next_s <= now:
            for _ in range(self._others.end()):
                self._source.request_ended(now)
        elif self._agenda and self._agenda[0][0] <= now:
            due, index = heappop(self._agenda)
            if due == self._noted[index]:
                self._noted[index] = inf
                self._begin_event(now)
                self._end(index, now, self._replicas[index].wake())
                self._note(index)
        else:
            self._begin_event(now)
            self._arrive(now)

    def total(self) -> Stats:
        """The counters of all replicas."""
        found = [replica.scheduler.stats() for replica in self._replicas]
        names = ("preemptions", "prefix_queries", "prefix_hits", "steps")
        return Stats(**{name: sum(getattr(stats, name) for stats in found) for name in names})

    def _begin_event(self, now: float) -> None:
        self.events += 1
        self.last_s = now

    def _arrive(self, now: float) -> None:
        ask = self._source.take_request()
        index = self._policy.choose_replica(self._connections)
        if index >= len(self._replicas):
            assert self._others is not None
            if not self._others.give(index):
                self._source.request_ended(now, refused=True)
            return
        replica, measured = self._replicas[index], self._tally.inside(now)
        self._end(index, now, replica.settle(now))
        output_len = min(ask.output_len, replica.longest - ask.input_len)
        answer = RequestTimes(str(self._asked), now, ask.input_len, output_len, measured)
        self._asked += 1
        try:
            replica.add(now, ask, answer)
        except (QueueFullError, RequestError) as error:
            self._source.request_ended(now, refused=True)
            if measured:
                self._tally.refuse(now, impossible=isinstance(error, RequestError))
        else:
            self._connections[index] += 1
            self.awaited += measured
        self._note(index)

    def _end(self, index: int, now: float, answers: Sequence[RequestTimes]) -> None:
        """Requests of a replica have ended."""
        if answers and self._others:
            self._others.copy(now, self._connections[index], len(answers), now - answers[-1].asked_s)
        for answer in answers:
            self._connections[index] -= 1
            self.awaited -= answer.measured
            self._tally.answered(answer)
            self._source.request_ended(now)

    def _note(self, index: int) -> None:
        """When the replica is due now."""
        due = self._replicas[index].due
        if due != self._noted[index]:
            self._noted[index] = due
            if due < inf:
                heappush(self._agenda, (due, index))
