"""glibc's malloc: arenas, and the return of free memory to the system.

Without glibc only reference cycles are collected.
"""

from __future__ import annotations

import ctypes
import gc
import sys

M_ARENA_MAX = -8
M_MMAP_THRESHOLD = -3
ARENAS = 2
MMAP_BYTES = 2**20


def limit_arenas() -> None:
    """Limit malloc to two arenas, and have it map each large block by itself, so that it goes back when it is freed.

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


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
