"""Signs of life of a child process: heartbeats that it answers, and the CPU time that it uses."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weft.engine.processes.causes import ExitReason

BEAT_S = 0.5  # seconds between two heartbeats while requests run
IDLE_BEATS = 10  # heartbeats within the limit while none runs: an idle engine is to sleep
SHORTEST_S = 1.0  # seconds of silence after which a process may count as dead
STEP = "step"  # the phase of steps
STATE_FIELD, USER_TIME_FIELD = 0, 11  # of /proc/PID/stat behind the command's name


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Ask a process for a sign of life. A thread answers, whatever the process's main thread is doing."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Heartbeat.

    - `steps`: from a rank, the number of steps that it has finished.
    - `stopped_s`: from the core, for how long one of its ranks has been stopped.
    - `computes`: from a rank, that it waits for a compiler; from the core, that its ranks compute or make progress.
    """

    steps: int = 0
    stopped_s: float = 0.0
    computes: bool = False


@dataclass(frozen=True)
class Work:
    """Work that the ranks have had for the longest: a step, a command, or a phase of their start.

    `key` changes with each sign of progress. `awaited` are the ranks that have not finished it; of a step they are not
    known, since all ranks but one report nothing.
    """

    phase: str
    key: object
    awaited: Collection[int] = ()


class ProcessTimes(msgspec.Struct, frozen=True):
    """State letter of a process in /proc, and the CPU seconds that it has used. Source: proc_pid_stat(5)."""

    state: str
    cpu_s: float

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")


def read_times(pid: int) -> ProcessTimes | None:
    """Return the state and CPU time of a process; None if it is gone, or on a system without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        ticks = int(fields[USER_TIME_FIELD]) + int(fields[USER_TIME_FIELD + 1])
        return ProcessTimes(fields[STATE_FIELD], ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


def catches_signal(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal; also on a system without /proc, where this is unknown."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
    except FileNotFoundError:
        return not Path("/proc/self/status").exists()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def read_other_work(pid: int) -> int:
    """Number that grows while a process reads files from a disk, or while processes compute that its main thread has
    started, such as compilers; 0 on a system without /proc."""
    total = 0
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    with suppress(OSError, ValueError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            times = read_times(child)
            total += (round(1000 * times.cpu_s) if times else 0) + read_other_work(child)
    return total


def idle_beat_s(limit_s: float) -> float:
    """Seconds between two heartbeats while no request runs."""
    return max(BEAT_S, limit_s / IDLE_BEATS)


class Silence:
    """Seconds for which a process has answered no heartbeat, used no CPU time and read no file.

    One that computes with Python's lock held, as an import does, cannot answer: its CPU time shows that it lives. So do
    the files that it reads, as weights from a slow disk.
    Call `tick` once for each heartbeat that is sent.
    """

    def __init__(self, pid: int) -> None:
        self.seconds = 0.0
        self.cpu_share = 0.0  # of one core, between the last two ticks
        self.times: ProcessTimes | None = None
        self.pid = pid
        self.is_busy = False  # by its own words: others compute for it
        self._other_work = 0
        self._heard = False
        self._ticked_s: float | None = None

    def hear(self, *, busy: bool = False) -> None:
        """Note an answer."""
        self._heard, self.seconds, self.is_busy = True, 0.0, busy

    def tick(self, now: float, beat_s: float = BEAT_S) -> None:
        """Note that a heartbeat has passed, at the monotonic time `now`.

        `beat_s` is the longest time between two heartbeats. A gap counts as two of these at most: this process has been
        stopped itself.
        """
        passed = 0.0 if self._ticked_s is None else now - self._ticked_s
        before, self.times = self.times, read_times(self.pid)
        used_s = self.times.cpu_s - before.cpu_s if before and self.times else 0.0
        self.cpu_share = used_s / passed if passed else 0.0
        if self._heard or used_s > 0 or self._reads():
            self.seconds = 0.0
        else:
            self.seconds += min(passed, 2 * beat_s)
        self._heard, self._ticked_s = False, now

    def _reads(self) -> bool:
        """Return True if the process has read files since the last call, and is not stopped."""
        if self.times is not None and self.times.stopped:
            return False
        before, self._other_work = self._other_work, read_other_work(self.pid)
        return self._other_work != before

    @property
    def stopped_s(self) -> float:
        """Seconds of silence of a process that is stopped; 0 for a process that may only be short of CPU time."""
        return self.seconds if self.times is not None and self.times.stopped else 0.0

    @property
    def reason(self) -> ExitReason:
        """The reason why the process counts as dead."""
        if self.times is not None and self.times.stopped:
            return ExitReason("process-stopped", f"stopped (SIGSTOP), and not continued for {self.seconds:.0f} s")
        text = f"has answered no heartbeat, used no CPU time and read no file for {self.seconds:.0f} s"
        return ExitReason("process-silent", text)
