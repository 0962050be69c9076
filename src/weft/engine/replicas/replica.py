"""Replica: one of several engines of a model, with what is known of it while it ends and starts again."""

from __future__ import annotations

from weft.engine.core.request import Stats, counters_only, sum_stats
from weft.engine.replicas.remote import AsyncEngine
from weft.engine.replicas.running import RunningReplica
from weft.planner.execution.replicas import ReplicaPlan

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # before a start that follows a failed one
LIVED_S = 60.0  # seconds after which an engine that ends starts again without a pause
HEALTHY_S = 600.0  # seconds after which the end of an engine is no part of a row of failures


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
        self.vain_restarts = 0  # in a row, between which no request was answered
        self.started_s = 0.0
        self.moved_s = 0.0  # when a step has last been seen to finish, or the first request came
        self._steps = 0
        self._pause_s = 0.0
        self._ended = Stats()  # counters of engines that have ended

    @property
    def name(self) -> str:
        return f"replica {self.number}"

    def note_answer(self) -> None:
        """Note that a request has been answered: the next failure is the first of a row."""
        self.vain_restarts, self._pause_s = 0, 0.0

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
        """Seconds to wait before the next start: none after an engine that has lived long, or has answered."""
        if self.lived_s(now) > LIVED_S:
            self._pause_s = 0.0
            return 0.0
        pause, self._pause_s = self._pause_s, min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        return pause

    def lived_s(self, now: float) -> float:
        """Seconds since the last engine started; 0 if a start has been tried since."""
        return now - self.started_s if self.started_s else 0.0

    def stalled_s(self, now: float) -> float:
        """Seconds without a finished step, 0 for a replica that has nothing to do, or whose ranks compute.

        A command has no limit of time if no process observes whether ranks execute it.
        """
        engine = self.engine
        if (
            engine is None
            or not self.open
            or engine.stats.sleep_level
            or engine.computes
            or (engine.calling and not engine.watched)
        ):
            self.moved_s = now
            return 0.0
        if engine.stats.steps != self._steps:
            self._steps, self.moved_s = engine.stats.steps, now
        return now - self.moved_s
