"""StepProgress: detects an engine that finishes no step while requests run."""

from __future__ import annotations

from collections.abc import Callable


class StepProgress:
    """Time since the engine's last finished step. `clock` returns seconds."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._steps = 0
        self._moved_at = clock()

    def begin(self) -> None:
        """Restart the time: the engine has work again after it had none."""
        self._moved_at = self._clock()

    def stalled_s(self, steps: int) -> float:
        """Seconds since the last finished step if they exceed the timeout, else 0.

        Call it only while the engine has work; `steps` is the number of steps finished so far.
        """
        now = self._clock()
        if steps != self._steps:
            self._steps, self._moved_at = steps, now
        stalled = now - self._moved_at
        return stalled if stalled > self._timeout_s else 0.0
