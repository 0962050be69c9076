"""Times of a rank's steps: on a CPU by the host's clock, on a GPU by events, since the host runs ahead of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from time import perf_counter

import torch

from weft.core.commands import RankReport
from weft.worker.device import memory_in_use

EVENTS = 512  # pairs of events that are kept before the oldest are read: more than steps are in flight


class StepClock(ABC):
    """Counts the seconds between `begin` and `end`, in which a rank works, and `steps`, which the worker counts."""

    def __init__(self) -> None:
        self.steps = 0
        self._marks = (perf_counter(), 0, 0.0)  # at the last report: time, steps, busy seconds

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def end(self) -> None: ...

    @abstractmethod
    def busy_s(self) -> float:
        """Seconds so far."""

    def report(self, device: torch.device, *, alone: bool, reset: bool) -> RankReport:
        """Report times since the last report that had `reset`, and the memory of now.

        `alone`: the rank exchanges no tensors with other ranks of its stage.
        """
        marks = (perf_counter(), self.steps, self.busy_s())
        elapsed_s, steps, busy_s = (now - then for now, then in zip(marks, self._marks, strict=True))
        if reset:
            self._marks = marks
        allocated, reserved, driver = memory_in_use(device)
        return RankReport(
            steps=int(steps),
            compute_s=busy_s,
            communication_s=0.0 if alone else None,
            waiting_s=max(0.0, elapsed_s - busy_s),
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            driver_bytes=driver,
        )


class HostClock(StepClock):
    """A clock for work that has ended when the call returns."""

    def __init__(self) -> None:
        super().__init__()
        self._busy_s = self._began_s = 0.0

    def begin(self) -> None:
        self._began_s = perf_counter()

    def end(self) -> None:
        self._busy_s += perf_counter() - self._began_s

    def busy_s(self) -> float:
        return self._busy_s


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

    def busy_s(self) -> float:
        while self._stretches:
            self._stretches[0][1].synchronize()
            self._read_oldest()
        return self._busy_s

    def _read_oldest(self) -> None:
        begin, end = self._stretches.popleft()
        self._busy_s += begin.elapsed_time(end) / 1000


def create_step_clock(device: torch.device) -> StepClock:
    return HostClock() if device.type == "cpu" else DeviceClock()
