"""Health: is the engine alive, and does it get on with what it has to do?"""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    """Watches that steps finish while requests run. `clock` gives seconds."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._steps = -1
        self._moved_at = clock()

    def see(self, steps: int, busy: bool) -> None:
        """Tell the engine's count of finished steps, and whether it has anything to run."""
        if steps != self._steps or not busy:
            self._steps, self._moved_at = steps, self._clock()

    @property
    def stalled_s(self) -> float:
        """Seconds for which there was work and no step finished, where that is too long; else 0."""
        still = self._clock() - self._moved_at
        return still if still > self._timeout_s else 0.0
