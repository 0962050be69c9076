"""simulate(): run a request source against replicas behind a routing policy, event by event on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from random import Random

import msgspec

from weft.engine.core.request import Stats
from weft.errors import QueueFullError, RequestError
from weft.fleet.upstreams.policy import Fingerprint, Policy, ReplicaViews
from weft.study.simulate.load import RequestSource
from weft.study.simulate.replica import ReplicaSpec, SimulatedReplica
from weft.study.simulate.tally import SimulatedTimes, Tally

CHECK_EVERY = 4096  # events between two calls of `on_time` and `enough`
COUNTERS = ("preemptions", "prefix_queries", "prefix_hits", "steps")
SPREAD = 0.25  # copied ends are delayed by up to this share of the request's duration


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a run.

    `preemptions`, `prefix_queries` and `prefix_hits` cover the window and all simulated replicas together. `events`:
    steps, stretches (runs of steps with the same batch, simulated as one event) and arrivals of the whole run. `steps`:
    scheduler steps of the whole run, including steps within stretches.
    """

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
    """Simulate one replica per spec, idle at time 0, and, for the policy, `unsimulated` replicas of which only the
    number of requests is tracked.

    Requests that arrive from `warmup_s` to `end_s` are measured. Arrivals continue until the last measured request has
    ended. With an infinite `end_s` the run ends when a finite source is exhausted and its requests have ended.

    Every CHECK_EVERY events `on_time(now)` is called to report progress, in virtual seconds; `enough(tally)` returning
    True ends the window and the run early.
    """
    tally = Tally(warmup_s, end_s)
    replicas = [SimulatedReplica(spec, tally, prefix_caching=prefix_caching, stretches=stretches) for spec in specs]
    simulation = Simulation(replicas, unsimulated, source, policy, tally)
    before, after = simulation.run_events(enough, on_time)
    tally.end_s = max(tally.begin_s, min(tally.end_s, simulation.last_s))
    return SimulationResult(
        tally=tally,
        replicas=len(replicas),
        preemptions=after.preemptions - before.preemptions,
        prefix_queries=after.prefix_queries - before.prefix_queries,
        prefix_hits=after.prefix_hits - before.prefix_hits,
        events=simulation.events,
        steps=simulation.total_stats().steps,
    )


class Simulation:
    """The event loop. `unfinished`: number of measured requests that have not ended."""

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        unsimulated: int,
        source: RequestSource,
        policy: Policy,
        tally: Tally,
    ) -> None:
        self.events = self.unfinished = 0
        self.last_s = 0.0  # time of the last event
        self._replicas, self._source, self._policy, self._tally = replicas, source, policy, tally
        self._connections = [0] * (len(replicas) + unsimulated)
        self._views = ReplicaViews(self._connections)
        self._others = (
            UnsimulatedReplicas(self._connections, len(replicas), most=replicas[0].most) if unsimulated else None
        )
        # A heap of (time, replica). `_wake_s[i]` is the time at which replica i is to be woken;
        # entries with another time are outdated and skipped.
        self._agenda: list[tuple[float, int]] = []
        self._wake_s = [inf] * len(replicas)
        self._arrived = 0

    @property
    def next_s(self) -> float:
        """Time of the next event, infinity if there is none."""
        next_s = min(self._agenda[0][0] if self._agenda else inf, self._source.next_s)
        return min(next_s, self._others.next_s) if self._others else next_s

    def run_events(self, enough: Callable[[Tally], bool], on_time: Callable[[float], object]) -> tuple[Stats, Stats]:
        """Run until every measured request has ended. Return the counters at the window's begin and end."""
        tally = self._tally
        self._run_until(tally.begin_s, on_time, lambda now: False)
        before = self.total_stats()

        def ends_window(now: float) -> bool:
            if not enough(tally):
                return False
            tally.end_s = now
            return True

        ended_early = self._run_until(tally.end_s, on_time, ends_window)
        after = self.total_stats()
        while not ended_early and self.unfinished and (now := self.next_s) < inf:
            self.process_event(now)
            if self.events % CHECK_EVERY == 0:
                on_time(now)
        return before, after

    def _run_until(self, end_s: float, on_time: Callable[[float], object], stop: Callable[[float], bool]) -> bool:
        """Process the events before `end_s`. Return True if `stop` ended it earlier.

        Both functions get the time of the event that is over, after every CHECK_EVERY of them.
        """
        while (now := self.next_s) < end_s:
            self.process_event(now)
            if self.events % CHECK_EVERY == 0:
                on_time(now)
                if stop(now):
                    return True
        return False

    def process_event(self, now: float) -> None:
        """Process the event at `next_s`. The end of a request comes before an arrival at the same time."""
        if self._others and self._others.next_s <= now:
            for _ in range(self._others.end_requests()):
                self._source.request_ended(now)
        elif self._agenda and self._agenda[0][0] <= now:
            due, index = heappop(self._agenda)
            if due == self._wake_s[index]:
                self._wake_s[index] = inf
                self._begin_event(now)
                self._end_requests(index, now, self._replicas[index].wake())
                self._schedule_wake(index)
        else:
            self._begin_event(now)
            self._arrive(now)

    def total_stats(self) -> Stats:
        """Counters of all simulated replicas together."""
        stats = [replica.scheduler.stats() for replica in self._replicas]
        return Stats(**{name: sum(getattr(each, name) for each in stats) for name in COUNTERS})

    def _begin_event(self, now: float) -> None:
        self.events += 1
        self.last_s = now

    def _arrive(self, now: float) -> None:
        """Route the source's next request to a replica."""
        request = self._source.take_request()
        fingerprint = request.fingerprint() if self._policy.reads_prefix else Fingerprint(session=request.session)
        index = self._policy.choose_replica(fingerprint, self._views)
        if index >= len(self._replicas):
            assert self._others is not None
            if not self._others.add_request(index):
                self._source.request_ended(now, refused=True)
            return
        replica, measured = self._replicas[index], self._tally.inside(now)
        self._end_requests(index, now, replica.settle(now))
        output_len = min(request.output_len, replica.longest - request.input_len)
        times = SimulatedTimes(str(self._arrived), now, request.input_len, output_len, measured)
        self._arrived += 1
        try:
            replica.add_request(now, request, times)
        except (QueueFullError, RequestError) as error:
            self._source.request_ended(now, refused=True)
            if measured:
                self._tally.count_refused(now, too_long=isinstance(error, RequestError))
        else:
            self._connections[index] += 1
            self.unfinished += measured
        self._schedule_wake(index)

    def _end_requests(self, index: int, now: float, ended: Sequence[SimulatedTimes]) -> None:
        """Count the requests of a replica that have ended."""
        if ended and self._others:
            self._others.copy_ends(now, self._connections[index], len(ended), now - ended[-1].arrival_s)
        for times in ended:
            self._connections[index] -= 1
            self.unfinished -= times.measured
            self._tally.count_completed(times)
            self._source.request_ended(now)

    def _schedule_wake(self, index: int) -> None:
        """Enter the time at which the replica wants to be woken into the agenda."""
        due = self._replicas[index].due
        if due != self._wake_s[index]:
            self._wake_s[index] = due
            if due < inf:
                heappush(self._agenda, (due, index))


class UnsimulatedReplicas:
    """Replicas of which only the number of requests is known.

    They are equal to the simulated replicas. For each end of requests in a simulated replica, requests end here as
    well, at times that are spread a little. They end in as many replicas as there are for one simulated replica, each
    with the same number of requests. The policy thus sees the same numbers everywhere, and a simulated replica gets its
    next request as soon after an end as it would among all replicas. In a large deployment that is at once.
    """

    def __init__(self, connections: list[int], simulated: int, *, most: int) -> None:
        """`connections`: number of requests of every replica, with the `simulated` ones first; updated in place.

        A replica takes at most `most` requests.
        """
        self._connections, self._first, self._most = connections, simulated, most
        self._per_simulated = len(connections) / simulated - 1
        self._random = Random("weft rest")
        self._ends: list[tuple[float, int, int]] = []  # (time, requests before the end, requests that end)
        self.next_s = inf

    def add_request(self, index: int) -> bool:
        """Give a request to replica `index`. Return False if it is refused."""
        if self._connections[index] >= self._most:
            return False
        self._connections[index] += 1
        return True

    def copy_ends(self, now: float, requests: int, ended: int, lasted_s: float) -> None:
        """Copy an event of a simulated replica: `ended` of its `requests` requests ended, one after `lasted_s`."""
        whole = int(self._per_simulated)
        for _ in range(whole + (self._random.random() < self._per_simulated - whole)):
            heappush(self._ends, (now + self._random.uniform(0, SPREAD * lasted_s), requests, ended))
        self._update_next()

    def end_requests(self) -> int:
        """Process the ends that are due at `next_s`. Return the number of requests that end."""
        _, requests, ended = heappop(self._ends)
        self._update_next()
        index = self._similar_replica(requests)
        ended = min(ended, self._connections[index])
        self._connections[index] -= ended
        return ended

    def _similar_replica(self, requests: int) -> int:
        """Index of a random replica with this number of requests, or else with the nearest number."""
        start = self._random.randrange(self._first, len(self._connections))
        for low, high in ((start, len(self._connections)), (self._first, start)):
            try:
                return self._connections.index(requests, low, high)
            except ValueError:
                continue
        return min(range(self._first, len(self._connections)), key=lambda at: abs(self._connections[at] - requests))

    def _update_next(self) -> None:
        self.next_s = self._ends[0][0] if self._ends else inf
