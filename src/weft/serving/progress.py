"""Progress: whether steps finish while requests run."""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    """Tells an engine that works from one that hangs. `clock` gives seconds."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._steps = 0
        self._moved_at = clock()

    def begin(self) -> None:
        """There is work again, after there was none."""
        self._moved_at = self._clock()

    def stalled_s(self, steps: int) -> float:
        """For an engine that has work and has finished `steps` so far: the seconds since the last one, where
        that is too long, else 0."""
        now = self._clock()
        if steps != self._steps:
            self._steps, self._moved_at = steps, now
        still = now - self._moved_at
        return still if still > self._timeout_s else 0.0
