"""The `weft` command. Everything is imported inside main(), so that Ctrl-C works from the first moment."""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run `weft ARGV`; return the exit status: 0, 1 for an error, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        from weft.cli.dispatch import dispatch

        return dispatch(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return INTERRUPTED
