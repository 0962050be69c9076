"""Lifeline: a socket without data, whose other end is the parent's. With it Linux itself kills an orphan."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal


def die_with(lifeline: int) -> None:
    """Have the system kill this process when the other end of `lifeline` closes.

    That also ends a process that is stopped, or in a library that lets no other thread run.
    """
    os.set_inheritable(lifeline, False)
    with contextlib.suppress(AttributeError, OSError):  # Linux only; elsewhere the listening thread must suffice
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
