"""Memory of this process, given back to the system after large requests. Without glibc nothing is done."""

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
    """Keep malloc to two arenas, and have it map large blocks one by one, so that they go back when they are freed.
    To be called before the first thread starts: as MALLOC_ARENA_MAX in the environment, but for this process only."""
    if libc := _glibc():
        libc.mallopt(M_ARENA_MAX, ARENAS)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def release() -> None:
    """Free what hangs in reference cycles, and give free pages back to the system."""
    gc.collect()
    if libc := _glibc():
        libc.malloc_trim(0)


class Trimmer:
    """Calls `release` in a thread, `QUIET_S` after the last large request."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def trim_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(QUIET_S, lambda: loop.run_in_executor(None, release))


class Tidying:
    """The same for a loop without asyncio: `wait_s` is how long it may sleep, and `tidy` is called when it wakes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due_s: float | None = None

    def later(self) -> None:
        """Plan a `release` for QUIET_S from now, in place of one that is planned."""
        self._due_s = self._clock() + QUIET_S

    @property
    def wait_s(self) -> float | None:
        """Seconds until something is due; None if nothing is."""
        return None if self._due_s is None else max(0.0, self._due_s - self._clock())

    def tidy(self) -> None:
        """Call `release` if that is due."""
        if self.wait_s == 0.0:
            self._due_s = None
            release()


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
