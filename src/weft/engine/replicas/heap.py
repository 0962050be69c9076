"""CallersHeap: control of the garbage collector in a process that belongs to the caller."""

from __future__ import annotations

import gc


class CallersHeap:
    """Keeps full garbage collections short while requests run.

    A full collection looks through every object of the process, most of them torch's: 80 ms and more, in which no step
    is scheduled. A process of our own freezes its heap for good. In the caller's process that must not happen: frozen
    garbage in reference cycles is never freed. So the objects that exist when the first request comes are frozen until
    the last request has ended, then unfrozen. A heap that the caller has frozen is left alone from then on:
    to count its objects takes Python as long as a step.
    """

    frozen = False  # by an engine of this process
    left_alone = False  # frozen by somebody else

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
            self._frozen = CallersHeap.frozen = False
        elif busy and not (CallersHeap.frozen or CallersHeap.left_alone):
            CallersHeap.left_alone = gc.get_freeze_count() > 0
            if not CallersHeap.left_alone:
                gc.freeze()
                self._frozen = CallersHeap.frozen = True
