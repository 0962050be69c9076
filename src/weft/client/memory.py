"""Return of this process's free memory to the system after large requests.

Without glibc only reference cycles are collected.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import Callable

M_ARENA_MAX = -8
M_MMAP_THRESHOLD = -3
ARENAS = 2
MMAP_BYTES = 2**20
QUIET_S = 2.0


def limit_arenas() -> None:
    """Limit malloc to two arenas, and have it map large blocks one by one, so that they go back when they are freed.

    To be called before the first thread starts. Like MALLOC_ARENA_MAX in the environment, but for this process only.
    """
    if libc := _glibc():
        libc.mallopt(M_ARENA_MAX, ARENAS)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def release() -> None:
    """Collect reference cycles, and give free pages back to the system."""
    gc.collect()
    if libc := _glibc():
        libc.malloc_trim(0)


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
        """Plan a `release` for QUIET_S from now, in place of one that is planned already."""
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


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
