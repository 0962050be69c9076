"""Memory in huge pages: a program that reads much of it in pages of 4 KiB waits for their addresses, too."""

from __future__ import annotations

import mmap
import threading
import weakref

SHARED = 64 << 20  # bytes of a mapping that small pieces share
HUGE = (
    32 << 20
)  # bytes from which on a mapping gets huge pages: of a smaller one, pages that are hardly used would matter
ALIGNMENT = 64  # bytes: a cache line, and a vector


def map_pages(size: int) -> mmap.mmap:
    """Map `size` bytes of zeros, from HUGE bytes on in huge pages if the system has them. They take no memory before
    they are written."""
    # Private: Python's mappings are shared with children otherwise, and Linux gives those no huge pages.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class PagePool:
    """Pieces of memory, from one byte to any size, that lie side by side in huge pages. A mapping is freed with the
    last of the buffers that use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapping: weakref.ref[mmap.mmap] | None = None  # the page that is being divided
        self._used = 0  # bytes of it

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """Take `size` bytes, which are zeros: the mapping and the offset in it, a multiple of ALIGNMENT."""
        with self._lock:
            mapping = self._mapping() if self._mapping else None
            offset = -(-self._used // ALIGNMENT) * ALIGNMENT
            if mapping is None or offset + size > len(mapping):
                mapping, offset = map_pages(max(size, SHARED)), 0
                self._mapping = weakref.ref(mapping)
            self._used = offset + size
            return mapping, offset
