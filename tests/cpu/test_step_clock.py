"""The time that a rank reports for its steps."""

import pytest
import torch

from weft.ranks.comm import Links, times
from weft.ranks.worker import step_clock
from weft.ranks.worker.step_clock import HostClock

CPU = torch.device("cpu")


class Passing:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        for module in (times, step_clock):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now_s)

    def exchange(self, links: Links, waits_s: float, sends_s: float) -> None:
        """Add an exchange with other ranks to the times of `links`."""
        began_s = self.now_s
        self.now_s += waits_s
        links.tensor.times.add_waited(began_s)
        self.now_s += sends_s
        links.tensor.times.add_spent(began_s)


def test_exchanges_outside_of_steps_are_no_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals at the start exchange too, and last longer than many steps."""
    links, passing = Links(), Passing(monkeypatch)
    clock = HostClock(links)
    passing.exchange(links, waits_s=7.0, sends_s=1.0)
    clock.steps += 1
    clock.begin()
    passing.exchange(links, waits_s=0.25, sends_s=0.5)
    passing.now_s += 2.0
    clock.end()
    report = clock.report(CPU, alone=False, reset=True)
    assert (report.compute_s, report.communication_s) == (2.0, 0.5)
    assert (report.waiting_s, report.idle_s) == (8.25, 8.0), "without a step, and in the exchange within one"

    passing.exchange(links, waits_s=0.5, sends_s=0.5)
    report = clock.report(CPU, alone=False, reset=True)
    assert (report.steps, report.compute_s, report.communication_s) == (0, 0.0, 0.0)
    assert report.waiting_s == report.idle_s == 1.0
