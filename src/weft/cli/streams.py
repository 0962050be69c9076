"""The three standard streams, made safe for every command."""

from __future__ import annotations

import io
import os
import sys


def settle() -> None:
    """Open the standard streams that were closed when the process started (`>&-`), and make output encodable.

    print() would fail on a closed stream, and the next socket would take its number. A character that the terminal's
    encoding lacks becomes a question mark instead of an error.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def end_output() -> None:
    """Flush standard output, or discard what cannot be written: Python would complain again when it closes it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
