"""CapturePace: when the ranks capture the CUDA graphs that a start or a wake-up has left."""

from __future__ import annotations

from collections.abc import Callable

BUSY_SHARE = 0.1  # of the time, at most, that captures take while steps run


class CapturePace:
    """Says when the next graph is captured: at once while no step runs, else so that BUSY_SHARE is kept.

    `clock` gives seconds. Every capture is between `begin` and `end`; no step runs in between.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._next_s = float("-inf")

    def is_due(self, *, idle: bool) -> bool:
        """Return True if a graph is to be captured now."""
        return idle or self._clock() >= self._next_s

    def begin(self) -> None:
        """Note that the ranks have been told to capture a graph, after the steps in flight."""
        self._began_s = self._clock()

    def end(self) -> None:
        """Note that all ranks have captured it."""
        now = self._clock()
        self._next_s = now + (now - self._began_s) * (1 / BUSY_SHARE - 1)
