"""Configuration of logging: to standard error, from the level in VLLM_LOGGING_LEVEL on, as text or as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from weft.errors import printable

VARIABLE = "VLLM_LOGGING_LEVEL"
FORMAT_VARIABLE = "WEFT_LOG_FORMAT"  # "json" or "text"; of the processes that a server starts too

TEXT, DATE = "%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"  # of a line as text

request_id: ContextVar[str] = ContextVar("request_id", default="")  # of the HTTP request that is being answered

_our_level = ""  # value of the variable if we have set it, not the user


def event_fields(code: str, **values: object) -> dict[str, dict[str, object]]:
    """`extra` of a line about an event that tests or programs look for: its code, and its values.

    The code stays when the line is reworded. In a JSON line they are fields.
    """
    return {"fields": {"code": code, **values}}


class Printable(logging.Formatter):
    """Formatter that lets no control character reach the terminal, whatever names are logged."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class JsonLines(logging.Formatter):
    """Formatter of one JSON object a line: time, level, logger, message, process, and the request's id if there is one.

    `extra={"fields": {...}}` adds fields; `event_fields` makes them for a line with a code.
    """

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if id := request_id.get():
            row["request_id"] = id
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row | getattr(record, "fields", {}), default=str)


class StandardError(logging.StreamHandler[Any]):
    """Handler that writes to what sys.stderr is now: a progress bar takes its place, and shows lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def use_format(name: str) -> None:
    """Log as "text" or "json" from now on, in the processes that we start too."""
    os.environ[FORMAT_VARIABLE] = name
    for handler in logging.getLogger("weft").handlers:
        handler.setFormatter(_formatter())


def _formatter() -> logging.Formatter:
    if os.environ.get(FORMAT_VARIABLE) == "json":
        return JsonLines()
    return Printable(TEXT, DATE)


def configure(level: str = "WARNING") -> None:
    """Log to standard error from the level in VLLM_LOGGING_LEVEL on, else from `level` on.

    The variable is set too, so that the processes that we start, which also call this, log at the same level.
    """
    global _our_level
    level_name = os.environ.get(VARIABLE, "").upper()
    if level_name == _our_level or level_name not in logging.getLevelNamesMapping():
        level_name = _our_level = level
    logger = logging.getLogger("weft")
    handler = StandardError()
    handler.setFormatter(_formatter())
    logger.handlers = [handler]
    logger.setLevel(level_name)
    logger.propagate = False
    os.environ[VARIABLE] = level_name
