"""System: replicas behind a policy, and the events of a run in the order of their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

import msgspec

from weft.core.request import Stats
from weft.errors import QueueFullError, RequestError
from weft.gateway.policy import Policy
from weft.simulate.load import Source
from weft.simulate.replica import Replica, Spec
from weft.simulate.rest import Rest
from weft.simulate.tally import Answer, Tally

LOOK_EVERY = 4096  # events


class Run(msgspec.Struct, frozen=True, kw_only=True):
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
    specs: Sequence[Spec],
    source: Source,
    policy: Policy,
    *,
    warmup_s: float,
    end_s: float,
    prefix_caching: bool,
    rest: int = 0,
    stretches: bool = True,
    enough: Callable[[Tally], bool] = lambda tally: False,
    on_time: Callable[[float], object] = lambda now: None,
) -> Run:
    """One replica for each spec, from time 0 with nothing to do, and a `rest` of others that are only counted with.

    Requests that come from `warmup_s` to `end_s` are measured, and others keep coming until the last of those has
    ended. An infinite `end_s` is when all requests of a source that has an end have ended. `enough` is asked now and
    then whether that need not be awaited, and the window ends where it says so; `on_time` is told the time as often.
    """
    tally = Tally(warmup_s, end_s)
    replicas = [Replica(spec, tally, prefix_caching=prefix_caching, stretches=stretches) for spec in specs]
    connections = [0] * (len(replicas) + rest)
    others = Rest(connections, len(replicas), most=specs[0].max_num_queued + specs[0].max_num_seqs) if rest else None
    agenda: list[tuple[float, int]] = []
    noted = [inf] * len(replicas)  # the last time that stands in the agenda for each
    snapshots: list[Stats] = []
    number = events = open_measured = 0
    last_s = warmup_s  # of the times at which something happened

    def note(index: int) -> None:
        due = replicas[index].due
        if due != noted[index]:
            noted[index] = due
            if due < inf:
                heappush(agenda, (due, index))

    def end(index: int, answers: Sequence[Answer]) -> None:
        nonlocal open_measured
        if answers and others:
            last = answers[-1]
            assert last.last_s is not None
            others.copy(last.last_s, connections[index], len(answers), last.last_s - last.asked_s)
        for answer in answers:
            assert answer.last_s is not None
            connections[index] -= 1
            open_measured -= answer.measured
            tally.answered(answer.last_s, answer)
            source.ended(answer.last_s)

    while True:
        now = min(agenda[0][0] if agenda else inf, source.next_s)
        if others and others.next_s <= now:
            now = others.next_s
            for _ in range(others.end()):
                source.ended(now)
            continue
        for edge in (warmup_s, end_s)[len(snapshots) :]:
            if now >= edge:
                snapshots.append(total(replicas))
        if now == inf or (now >= end_s and not open_measured):
            break
        events += 1
        last_s = max(last_s, now)
        if events % LOOK_EVERY == 0:
            on_time(now)
            if len(snapshots) == 1 and enough(tally):
                tally.end_s = now
                snapshots.append(total(replicas))
                break
        if agenda and agenda[0][0] <= source.next_s:
            due, index = heappop(agenda)
            # Other than it was when it was noted: it has been noted anew.
            if due == noted[index]:
                noted[index] = inf
                end(index, replicas[index].wake())
                note(index)
            continue
        ask = source.take()
        index = policy.choose(connections)
        if index >= len(replicas):
            assert others is not None
            if not others.give(index):
                source.ended(now, refused=True)
            continue
        replica = replicas[index]
        end(index, replica.settle(now))
        measured = tally.inside(now)
        longest = min(ask.output_len, replica.longest - ask.input_len)
        answer = Answer(str(number), now, ask.input_len, longest, measured)
        number += 1
        try:
            replica.add(now, ask, answer)
        except QueueFullError:
            source.ended(now, refused=True)
            if measured:
                tally.refused.append(now)
        except RequestError:
            source.ended(now, refused=True)
            tally.impossible += measured
        else:
            connections[index] += 1
            open_measured += measured
        note(index)
    tally.end_s = min(tally.end_s, last_s)
    before, after = snapshots[0], snapshots[-1]
    return Run(
        tally=tally,
        replicas=len(replicas),
        preemptions=after.preemptions - before.preemptions,
        prefix_queries=after.prefix_queries - before.prefix_queries,
        prefix_hits=after.prefix_hits - before.prefix_hits,
        events=events,
        steps=total(replicas).steps,
    )


def total(replicas: Sequence[Replica]) -> Stats:
    """The counters of all of them."""
    found = [replica.scheduler.stats() for replica in replicas]
    names = ("preemptions", "prefix_queries", "prefix_hits", "steps")
    return Stats(**{name: sum(getattr(stats, name) for stats in found) for name in names})
