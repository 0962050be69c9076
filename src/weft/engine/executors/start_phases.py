"""StartPhases: words on what a start of ranks does now, from its first moment, and the seconds of what it has done."""

from __future__ import annotations

import logging
import sys
import threading
import time

from weft.formatting import counted
from weft.logs import event_fields

logger = logging.getLogger("weft")

# Phases in their order: the name, what is done in it, and what has been done.
ORDER = ("start", "load", "profile", "allocate")
NOW = {
    "start": "starting {ranks}",
    "load": "reading the weights",
    "profile": "measuring the memory of a step",
    "allocate": "allocating the KV cache and warming up",
}
DONE = {
    "start": "{ranks} started",
    "load": "weights loaded",
    "profile": "memory measured",
    "allocate": "warm",
}


def in_notebook() -> bool:
    """Return True in a kernel of Jupyter, whose cells show standard error though it is no terminal."""
    return "ipykernel" in sys.modules


class StartPhases:
    """Log of the phases of a start; each begins when the first rank enters it. Threads may call `enter` at once.

    If the log's level is too high for them, a terminal gets them as one line that changes, and a notebook as lines.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = counted(ranks, "rank")
        self._lock = threading.Lock()
        self._phase = ""
        self._began_s = 0.0
        self._drawn = False

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before. A phase that has begun, or is not of a start, changes nothing."""
        with self._lock:
            if phase in ORDER and (not self._phase or ORDER.index(phase) > ORDER.index(self._phase)):
                self._tell(phase)

    def close(self) -> None:
        """End the last phase; the start is over, or has failed."""
        with self._lock:
            if self._phase:
                self._tell("")
            if self._drawn:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
            self._phase, self._drawn = ORDER[-1], False

    def _tell(self, phase: str) -> None:
        now_s = time.monotonic()
        spent_s, self._began_s = now_s - self._began_s, now_s
        parts = [f"{DONE[self._phase]} ({spent_s:.1f} s)"] if self._phase else []
        parts += [NOW[phase]] if phase else []
        self._phase = phase or self._phase
        text = "; ".join(parts).format(ranks=self._ranks)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", text, extra=event_fields("start-phase", phase=phase))
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text} ..." if phase else "")
            sys.stderr.flush()
            self._drawn = True
        elif in_notebook():
            print(text, file=sys.stderr, flush=True)
