"""Return of this process's free memory to the system after large requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weft.machine.hardware.malloc import release

QUIET_S = 2.0


class Trimmer:
    """Calls `release` in a thread, QUIET_S seconds after the last large request. For an asyncio event loop."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def trim_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(QUIET_S, lambda: loop.run_in_executor(None, release))


class DelayedRelease:
    """Calls `release` QUIET_S seconds after the last large request, for a loop without asyncio.

    The loop sleeps for at most `wait_s` and calls `release_if_due` when it wakes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due_s: float | None = None

    def schedule(self) -> None:
        """Plan a `release` for QUIET_S from now, in place of an earlier planned release."""
        self._due_s = self._clock() + QUIET_S

    @property
    def wait_s(self) -> float | None:
        """Seconds until the planned `release`; None if none is planned."""
        return None if self._due_s is None else max(0.0, self._due_s - self._clock())

    def release_if_due(self) -> None:
        """Call `release` if its time has come."""
        if self.wait_s == 0.0:
            self._due_s = None
            release()
