"""The three standard streams, so that the commands may rely on them."""

from __future__ import annotations

import io
import os
import sys


def settle() -> None:
    """Open those that were closed when we were started (`>&-`): print() would fail, and a socket of ours would take
    the number. What the terminal's encoding has no sign for becomes a question mark instead of an error."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def end_output() -> None:
    """What still waits for standard output goes there, or nowhere: Python would complain once more on closing it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
