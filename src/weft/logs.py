"""Where our log lines go: standard error, from VLLM_LOGGING_LEVEL on."""

from __future__ import annotations

import logging
import os
import sys

from weft.errors import printable

VARIABLE = "VLLM_LOGGING_LEVEL"

_ours = ""  # what the variable holds where the user said nothing


class Printable(logging.Formatter):
    """Log lines in which no control character reaches the terminal, whoever chose a name that is logged."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def configure(level: str = "WARNING") -> None:
    """Log to standard error from the level on that VLLM_LOGGING_LEVEL names, else from `level`.

    The variable is set too, so that the processes that we start, which call this as well, are as loud as we.
    """
    global _ours
    wanted = os.environ.get(VARIABLE, "").upper()
    if wanted == _ours or wanted not in logging.getLevelNamesMapping():
        wanted = _ours = level
    logger = logging.getLogger("weft")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Printable("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"))
    logger.handlers = [handler]
    logger.setLevel(wanted)
    logger.propagate = False
    os.environ[VARIABLE] = wanted
