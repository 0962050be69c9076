"""Progress of ranks that read their weights and capture graphs: a bar on a terminal, else lines of the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from abc import ABC, abstractmethod

from weft.formatting import format_bytes

logger = logging.getLogger("weft")

WIDTH = 24  # characters of a full bar
BAR_S, LINE_S = 0.1, 5.0  # seconds between two states of the bar, and between two lines of the log
SHORTEST_S = 1.0  # a shorter task gets no bar


class RanksProgress(ABC):
    """Sum of what all ranks have done, shown while it grows. Threads may call `update` at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: dict[int, int] = {}
        self._total: dict[int, int] = {}
        self._began = self._shown = time.monotonic()
        self._is_drawn = self._is_closed = False

    def update(self, rank: int, done: int, total: int) -> None:
        """Note that a rank has done `done` of `total` parts."""
        with self._lock:
            if not self._total:
                self._began = self._shown = time.monotonic()
            self._done[rank], self._total[rank] = done, total
            now = time.monotonic()
            is_terminal = sys.stderr.isatty()
            is_due = now - self._shown >= (BAR_S if is_terminal else LINE_S) and now - self._began >= SHORTEST_S
            if self._is_closed or not is_due:
                return
            self._shown = now
            if is_terminal:
                self._is_drawn = True
                sys.stderr.write(f"\r\x1b[K{self._bar()}")
                sys.stderr.flush()
            else:
                logger.info("%s", self._state())

    def complete(self, ranks: int) -> bool:
        """Return True once this many ranks have done all of their parts."""
        with self._lock:
            return len(self._total) == ranks and self._done == self._total

    def close(self) -> None:
        """Remove the bar, and log the sum."""
        with self._lock:
            if self._is_drawn:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
            if self._total and not self._is_closed:
                logger.info("%s", self._state())
            self._is_closed, self._is_drawn = True, False

    def _bar(self) -> str:
        full = round(WIDTH * self._share())
        return f"[{'#' * full}{'.' * (WIDTH - full)}] {self._state()}"

    @abstractmethod
    def _state(self) -> str:
        """Sentence on what has been done until now."""

    def _seconds(self) -> float:
        return max(time.monotonic() - self._began, 1e-3)

    def _share(self) -> float:
        return min(1.0, max(0.0, sum(self._done.values()) / max(sum(self._total.values()), 1)))


class ReadingProgress(RanksProgress):
    """Bytes of the weights."""

    def _state(self) -> str:
        """Bytes read of all bytes, and their number per second."""
        done, total = sum(self._done.values()), sum(self._total.values())
        seconds = self._seconds()
        return (
            f"Weights: {format_bytes(done)} of {format_bytes(total)} read, {100 * self._share():.0f} %, in "
            f"{seconds:.1f} s, {done / seconds / 1e9:.2f} GB/s"
        )


class CapturingProgress(RanksProgress):
    """CUDA graphs for which a start waits; every rank captures the same ones."""

    def _state(self) -> str:
        """Graphs that every rank has captured, of all."""
        done, total = min(self._done.values()), max(self._total.values())
        return f"CUDA graphs: {done} of {total} captured in {self._seconds():.1f} s"
