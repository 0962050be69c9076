"""Times of a rank's steps: on a CPU by the host's clock, on a GPU by events, since the host runs ahead of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from time import perf_counter
from typing import Any, NamedTuple

import torch

from weft.engine.core.commands import RankReport
from weft.machine.hardware.host import thread_delay_s
from weft.ranks.comm import Links
from weft.ranks.worker.device import memory_in_use

EVENTS = 512  # pairs of events that are kept before the oldest are read: more than steps are in flight


class Marks(NamedTuple):
    """Counters of a rank at one moment.

    - `now_s`, `delayed_s`: seconds since some moment before the rank's start, see RankReport for the latter;
    - `steps`, `busy_s`: its steps, and seconds in them;
    - `exchange_s`: seconds of `busy_s` in exchanges with other ranks, and `waited_s` the part of them in which other
      ranks had not come yet. A GPU's clock leaves both 0.
    """

    now_s: float
    steps: int
    busy_s: float
    exchange_s: float
    waited_s: float
    delayed_s: float

    def since(self, before: Marks) -> Marks:
        """The difference from an earlier moment."""
        seconds = (now - then for now, then in zip(self[2:], before[2:], strict=True))
        return Marks(self.now_s - before.now_s, self.steps - before.steps, *seconds)


class StepClock(ABC):
    """Counts the seconds between `begin` and `end`, when a rank has a step, and `steps`, which the worker counts."""

    def __init__(self) -> None:
        self.steps = 0
        self._before = Marks(perf_counter(), 0, 0.0, 0.0, 0.0, 0.0)  # at the last report with `reset`

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def end(self) -> None: ...

    @abstractmethod
    def pause(self) -> None:
        """Begin to wait for the stage before."""

    @abstractmethod
    def resume(self) -> None:
        """Go on after `pause`."""

    @abstractmethod
    def busy_s(self) -> float:
        """Seconds so far."""

    def exchanges_s(self) -> tuple[float, float]:
        """Seconds so far in exchanges with other ranks, and the seconds of waiting among them; 0 where they are not
        known."""
        return 0.0, 0.0

    @abstractmethod
    def times(self, passed: Marks, *, alone: bool) -> dict[str, float | None]:
        """The times of a RankReport; `alone` as for `report`."""

    def report(self, device: torch.device, *, alone: bool, reset: bool) -> RankReport:
        """Report times since the last report that had `reset`, and the memory of now.

        To be called by the thread that computes the steps.

        `alone`: the rank exchanges no tensors with other ranks of its stage.
        """
        exchange_s, waited_s = self.exchanges_s()
        marks = Marks(
            now_s=perf_counter(),
            steps=self.steps,
            busy_s=self.busy_s(),
            exchange_s=exchange_s,
            waited_s=waited_s,
            delayed_s=thread_delay_s(),
        )
        passed = marks.since(self._before)
        if reset:
            self._before = marks
        allocated, reserved, driver = memory_in_use(device)
        times: dict[str, Any] = self.times(passed, alone=alone)
        return RankReport(
            steps=passed.steps,
            **times,
            delayed_s=passed.delayed_s,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            driver_bytes=driver,
        )


class HostClock(StepClock):
    """A clock for work that has ended when the call returns. `links` count the time in exchanges with other ranks.

    They count exchanges outside of steps too, as of rehearsals; those are no part of a step's time.
    """

    def __init__(self, links: Links) -> None:
        super().__init__()
        self._links = links
        self._busy_s = self._began_s = 0.0
        self._exchange_s = self._waited_s = 0.0
        self._exchanges_before = links.times

    def begin(self) -> None:
        self._exchanges_before = self._links.times
        self._began_s = perf_counter()

    def end(self) -> None:
        self._busy_s += perf_counter() - self._began_s
        before, now = self._exchanges_before, self._links.times
        self._exchange_s += now.spent_s - before.spent_s
        self._waited_s += now.waited_s - before.waited_s

    def pause(self) -> None:
        """Nothing: the link counts the time."""

    def resume(self) -> None:
        """Nothing."""

    def busy_s(self) -> float:
        return self._busy_s

    def exchanges_s(self) -> tuple[float, float]:
        return self._exchange_s, self._waited_s

    def times(self, passed: Marks, *, alone: bool) -> dict[str, float | None]:
        idle_s = max(0.0, passed.now_s - passed.busy_s)
        return {
            "compute_s": max(0.0, passed.busy_s - passed.exchange_s),
            "communication_s": max(0.0, passed.exchange_s - passed.waited_s),
            "waiting_s": idle_s + passed.waited_s,
            "idle_s": idle_s,
        }


class DeviceClock(StepClock):
    """A clock for work of a GPU. Only `busy_s` waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._busy_s = 0.0
        self._stretches: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._stretches.append((event, torch.cuda.Event(enable_timing=True)))

    def end(self) -> None:
        self._stretches[-1][1].record()
        if len(self._stretches) > EVENTS:
            self._read_oldest()

    def pause(self) -> None:
        self.end()

    def resume(self) -> None:
        self.begin()

    def times(self, passed: Marks, *, alone: bool) -> dict[str, float | None]:
        return {
            "compute_s": passed.busy_s,
            "communication_s": 0.0 if alone else None,
            "waiting_s": max(0.0, passed.now_s - passed.busy_s),
            "idle_s": None,
        }

    def busy_s(self) -> float:
        while self._stretches:
            self._stretches[0][1].synchronize()
            self._read_oldest()
        return self._busy_s

    def _read_oldest(self) -> None:
        begin, end = self._stretches.popleft()
        self._busy_s += begin.elapsed_time(end) / 1000


def create_step_clock(device: torch.device, links: Links) -> StepClock:
    """The clock of a rank on this device."""
    return HostClock(links) if device.type == "cpu" else DeviceClock()
