"""Configuration of logging: to standard error, from the level in VLLM_LOGGING_LEVEL on."""

from __future__ import annotations

import logging
import os
import sys

from weft.errors import printable

VARIABLE = "VLLM_LOGGING_LEVEL"

_our_level = ""  # value of the variable if we have set it, not the user


class Printable(logging.Formatter):
    """Formatter that lets no control character reach the terminal, whatever names are logged."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def configure(level: str = "WARNING") -> None:
    """Log to standard error from the level in VLLM_LOGGING_LEVEL on, else from `level` on.

    The variable is set too, so that the processes that we start, which also call this, log at the same level.
    """
    global _our_level
    level_name = os.environ.get(VARIABLE, "").upper()
    if level_name == _our_level or level_name not in logging.getLevelNamesMapping():
        level_name = _our_level = level
    logger = logging.getLogger("weft")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Printable("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"))
    logger.handlers = [handler]
    logger.setLevel(level_name)
    logger.propagate = False
    os.environ[VARIABLE] = level_name
