"""RankWatch: finds ranks that show no sign of life, and steps that never finish."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weft.errors import CORE, Cause
from weft.executors.beats import STACKS_S
from weft.executors.liveness import BEAT_S, Alive, Heartbeat, idle_beat_s
from weft.executors.rank_processes import RankProcesses

# Share of a core from which on a rank counts as computing. Beside other programs it may get little; one that waits
# uses none.
COMPUTING_SHARE = 0.03
LONG_STEP = 10  # times the limit, for a step in which ranks compute


class RankWatch:
    """Watches the ranks of this machine in a thread of its own.

    `oldest_step` returns the step that the ranks have had for the longest, None if they have none. `fail` gets the
    cause once a rank has been silent for `limit_s` seconds, or a step has not finished for as long. If ranks compute
    meanwhile, a step has LONG_STEP times as long: on a slow CPU a long prompt takes minutes.
    """

    def __init__(
        self,
        processes: RankProcesses,
        limit_s: float,
        oldest_step: Callable[[], object | None],
        fail: Callable[[Cause], None],
    ) -> None:
        self._processes, self._limit_s = processes, limit_s
        self._oldest_step, self._fail = oldest_step, fail
        self._step: object | None = None
        self._began_s = self._computed_s = 0.0  # when the oldest step was first seen; when ranks were seen to compute
        self._idle_s = idle_beat_s(limit_s)
        self._asked, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-rank-watch", daemon=True)

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
        """The longest silence of a rank, and whether ranks compute a step. Whoever asks has heartbeats sent to them."""
        self._asked.set()
        silent_s = max((silence.seconds for silence in list(self._processes.silences.values())), default=0.0)
        computes = self._step is not None and time.monotonic() - self._computed_s < 3 * BEAT_S
        return Alive(silent_s=silent_s, computes=computes)

    def _run(self) -> None:
        while True:
            self._asked.wait(self._idle_s)
            self._asked.clear()
            if self._stopped.is_set():
                return
            now = time.monotonic()
            self._processes.offer(Heartbeat())
            for silence in list(self._processes.silences.values()):
                silence.tick(now, self._idle_s)
            cause = self._silent_rank() or self._stuck_step(now)
            if cause is not None:
                self._fail(cause)
                return

    def _silent_rank(self) -> Cause | None:
        for rank, silence in list(self._processes.silences.items()):
            if silence.seconds >= self._limit_s:
                cause = silence.reason.of(rank, self._processes.phases[rank])
                if self._step is not None:
                    self._print_stacks()
                return cause
        return None

    def _stuck_step(self, now: float) -> Cause | None:
        """The cause if the oldest step has taken too long: it is that of the rank that is behind the others."""
        silences = list(self._processes.silences.values())
        if any(silence.cpu_share >= COMPUTING_SHARE for silence in silences):
            self._computed_s = now
        if any(silence.seconds > BEAT_S for silence in silences):
            return None  # that rank is the cause, and will be named
        step = self._oldest_step()
        if step is not self._step:
            self._step, self._began_s = step, now
        took_s = now - self._began_s
        idle_s = min(took_s, now - self._computed_s)
        if step is None or (idle_s < self._limit_s and took_s < LONG_STEP * self._limit_s):
            return None
        self._print_stacks()
        text = f"no step has finished for {took_s:.0f} s; the stacks of all ranks are printed above"
        return Cause(rank=self._rank_behind(), phase="step", code="step-stuck", cause=text)

    def _rank_behind(self) -> int:
        """The rank that has finished fewer steps than all others; CORE if there is none."""
        steps = self._processes.steps
        least = min(steps.values(), default=0)
        behind = [rank for rank, count in steps.items() if count == least]
        return behind[0] if len(behind) == 1 else CORE

    def _print_stacks(self) -> None:
        self._processes.print_stacks()
        self._stopped.wait(STACKS_S)
