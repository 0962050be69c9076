"""CallersHeap: the garbage collector of a process that is not ours alone."""

from __future__ import annotations

import gc


class CallersHeap:
    """Keeps full garbage collections short while requests run.

    A full collection looks through every object of the process, most of them torch's: 80 ms and more, in which no step
    is scheduled. A process of our own freezes its heap for good. The caller's process must not: garbage in reference
    cycles that is frozen is never freed. So what is there when the first request comes is frozen until the last one
    has ended, then handed back. A heap that somebody else has frozen is left alone.
    """

    def __init__(self) -> None:
        self._busy = False
        self._frozen = False

    def set_busy(self, busy: bool) -> None:
        """Freeze the heap when work begins and unfreeze it when all work has ended."""
        if busy == self._busy:
            return
        self._busy = busy
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
        elif busy and not gc.get_freeze_count():
            gc.freeze()
            self._frozen = True
