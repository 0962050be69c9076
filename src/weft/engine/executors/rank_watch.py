"""RankWatch: finds ranks that show no sign of life, and work that never finishes: steps, commands, and starts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weft.engine.executors.rank_processes import RankProcesses
from weft.engine.processes.beats import STACKS_S
from weft.engine.processes.liveness import BEAT_S, STEP, Alive, Heartbeat, Work, idle_beat_s, read_other_work
from weft.errors import CORE, Cause

# Share of a core from which on a rank counts as computing. When other programs run too, it may get little; a waiting
# rank uses none.
COMPUTING_SHARE = 0.03
LONG_STEP = 10  # times the limit, for a step in which ranks compute
SHORTEST_WORK_S = 10.0  # seconds for which a start or a command may wait at least, for a system that is busy


class RankWatch:
    """Watches the ranks of this machine in a thread of its own.

    `oldest_work` returns what the ranks have had for the longest, None if they have nothing to do. `fail` gets the
    cause once a rank has been silent for `limit_s` seconds, or once the work has made no progress for as long while no
    rank computes. A step in which ranks compute has LONG_STEP times as long: on a slow CPU a long prompt takes minutes.
    A start or a command in which ranks compute, read files or wait for a compiler has no limit, and SHORTEST_WORK_S in
    any case: large weights are read for long.
    """

    def __init__(
        self,
        processes: RankProcesses,
        limit_s: float,
        oldest_work: Callable[[], Work | None],
        fail: Callable[[Cause], None],
    ) -> None:
        self._processes, self._limit_s = processes, limit_s
        self._oldest_work, self._fail = oldest_work, fail
        self._work: Work | None = None
        self._moved_s = self._computed_s = 0.0  # when the oldest work was last seen to move, and a rank to compute
        self._looked_s: float | None = None
        self._other_work = 0
        self._idle_s = idle_beat_s(limit_s)
        self._asked, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch_ranks, name="weft-rank-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. May be called twice, and before `start`."""
        self._stopped.set()
        self._asked.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def state(self) -> Alive:
        """The longest stop of a rank, and whether ranks compute. Reading it also sends every rank a heartbeat."""
        self._asked.set()
        stopped_s = max((silence.stopped_s for silence in list(self._processes.silences.values())), default=0.0)
        moved_s = max(self._moved_s, self._computed_s)
        return Alive(stopped_s=stopped_s, computes=self._work is not None and time.monotonic() - moved_s < 3 * BEAT_S)

    def _watch_ranks(self) -> None:
        while True:
            self._asked.wait(self._idle_s)
            self._asked.clear()
            if self._stopped.is_set():
                return
            now = time.monotonic()
            self._processes.offer(Heartbeat())
            for silence in list(self._processes.silences.values()):
                silence.tick(now, self._idle_s)
            cause = self._silent_rank() or self._stuck_work(now)
            if cause is not None:
                self._fail(cause)
                return

    def _silent_rank(self) -> Cause | None:
        for rank, silence in list(self._processes.silences.items()):
            if silence.seconds >= self._limit_s:
                cause = silence.reason.of(rank, self._processes.phases[rank])
                if self._work is not None:
                    self._print_stacks()
                return cause
        return None

    def _stuck_work(self, now: float) -> Cause | None:
        """The cause if the oldest work has taken too long: it is the work of the rank that is behind the others."""
        self._leave_pause_out(now)
        before, work = self._work, self._oldest_work()
        self._work = work
        if work is None or before is None or work.key != before.key:
            self._moved_s = now
        if self._is_computing(work):
            self._computed_s = now
        if work is None or any(silence.seconds > BEAT_S for silence in list(self._processes.silences.values())):
            return None  # a silent rank is the cause, and will be named
        took_s = now - self._moved_s
        idle_s = min(took_s, now - self._computed_s)
        is_step = work.phase == STEP
        limit_s = self._limit_s if is_step else max(self._limit_s, SHORTEST_WORK_S)
        if idle_s < limit_s and not (is_step and took_s >= LONG_STEP * limit_s):
            return None
        self._print_stacks()
        if is_step:
            text = f"no step has finished for {took_s:.0f} s; the stacks of all ranks are printed above"
            return Cause(rank=self._rank_behind(), phase=STEP, code="step-stuck", cause=text)
        text = f"no progress for {idle_s:.0f} s, and no CPU time used; the stacks of all ranks are printed above"
        rank = next(iter(work.awaited)) if len(work.awaited) == 1 else CORE
        return Cause(rank=rank, phase=work.phase, code="rank-stuck", cause=text)

    def _leave_pause_out(self, now: float) -> None:
        """Leave out the time for which this process has been stopped itself, and most likely its ranks with it, as in a
        container that is paused. As for `Silence`, it has been if two heartbeats had the time to pass."""
        if self._looked_s is not None:
            paused_s = max(0.0, now - self._looked_s - 2 * self._idle_s)
            self._moved_s += paused_s
            self._computed_s += paused_s
        self._looked_s = now

    def _is_computing(self, work: Work | None) -> bool:
        """Return True if a rank computes. For a start or a command it may also read files, or wait for a compiler."""
        silences = list(self._processes.silences.values())
        if any(silence.cpu_share >= COMPUTING_SHARE for silence in silences):
            return True
        if work is None or work.phase == STEP:
            return False
        before, self._other_work = self._other_work, sum(read_other_work(silence.pid) for silence in silences)
        return self._other_work != before or any(silence.is_busy for silence in silences)

    def _rank_behind(self) -> int:
        """The rank that has finished fewer steps than all others; CORE if there is none."""
        steps = self._processes.steps
        least = min(steps.values(), default=0)
        behind = [rank for rank, count in steps.items() if count == least]
        return behind[0] if len(behind) == 1 else CORE

    def _print_stacks(self) -> None:
        self._processes.print_stacks()
        self._stopped.wait(STACKS_S)


def watch_silence(processes: RankProcesses, limit_s: float, fail: Callable[[Cause], None]) -> RankWatch:
    """Create a watch over ranks whose work others see, too: the ranks of one of several nodes, of which any may
    compute."""
    return RankWatch(processes, limit_s, lambda: None, fail)
