"""CPU time of the host: for the servers under abuse, for other processes, and for other machines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import psutil


def stolen_s() -> float:
    """CPU seconds, of all cores together, that the hypervisor gave to others since boot; 0 where that is unknown."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


@dataclass(frozen=True)
class HostTimes:
    """CPU seconds of all cores together: all since boot, those stolen, those in use, and those of our processes."""

    all_s: float
    stolen_s: float
    busy_s: float
    ours_s: float

    @classmethod
    def now(cls, processes: Iterable[psutil.Process]) -> HostTimes:
        """Times of now. `processes` are ours; those that have ended count if one of ours has waited for them."""
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        # The kernel counts guests as user time too.
        all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        stolen = float(getattr(times, "steal", 0.0))
        ours_s = 0.0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                own = process.cpu_times()
                ours_s += own.user + own.system + own.children_user + own.children_system
        return cls(all_s, stolen, all_s - idle_s - stolen, ours_s)

    def shares_since(self, before: HostTimes) -> tuple[float, float]:
        """Shares of the CPU time since `before` that were stolen, and that other processes used."""
        all_s = max(self.all_s - before.all_s, 1e-9)
        others_s = (self.busy_s - before.busy_s) - (self.ours_s - before.ours_s)
        return (self.stolen_s - before.stolen_s) / all_s, max(0.0, others_s) / all_s
