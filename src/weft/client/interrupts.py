"""Uninterrupted: Ctrl-C waits while something is done that must not be left half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Uninterrupted:
    """A context in which SIGINT is only noted; whoever handles it does so at the end of the context.

    Only the main thread is ever interrupted: elsewhere, and where SIGINT has no handler of Python's, this does
    nothing. For short work only, as nothing else ends it.
    """

    def __enter__(self) -> None:
        self._noted: tuple[int, FrameType | None] | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._noted is not None:
                self._handler(*self._noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number, frame
