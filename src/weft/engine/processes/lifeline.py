"""Lifeline: a socket without data, whose other end is the parent's. With it Linux itself kills or wakes an orphan."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal


def die_with(lifeline: int) -> None:
    """Have the system kill this process when the other end of `lifeline` closes.

    That also ends a process that is stopped, or in a library that lets no other thread run.
    """
    _signal_at_end(lifeline, signal.SIGKILL)


def continue_with(lifeline: int) -> None:
    """Have the system continue this process, if it is stopped, when the other end of `lifeline` closes.

    It then notices the end of its parent by its socket, and ends in order.
    """
    _signal_at_end(lifeline, signal.SIGCONT)


def _signal_at_end(lifeline: int, number: signal.Signals) -> None:
    os.set_inheritable(lifeline, False)
    with contextlib.suppress(AttributeError, OSError):  # Linux only; elsewhere the listening thread must suffice
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, number)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
