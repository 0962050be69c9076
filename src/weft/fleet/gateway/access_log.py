"""AccessLog: one line of JSON for each request."""

from __future__ import annotations

import logging
import os
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from weft.errors import ConfigError, error_reason
from weft.logs import event_fields
from weft.machine.sqlite_files import PRIVATE_FILE

log = logging.getLogger("weft.gateway")

STANDARD_OUTPUT = "-"
LOG_EVERY_S = 60.0  # between two warnings about lost rows: the log may be on the same full disk


class AccessLog:
    """Appends to a file; `-` is standard output. Raises ConfigError if the file cannot be opened.

    A row that cannot be written, as on a full disk, is dropped: no request fails. `on_loss` is called for each such
    row. Only the file's owner may read it, since it has addresses of clients and names of keys. `clock` reads monotonic
    seconds.
    """

    def __init__(
        self, path: str, on_loss: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._on_loss, self._clock = path, on_loss, clock
        self._lost = 0  # lost since the last warning
        self._logged_s = float("-inf")
        self._is_cut = False  # the last row was written in part
        try:
            self._descriptor = None if path == STANDARD_OUTPUT else _open_private(path)
        except OSError as error:
            raise ConfigError(
                f"cannot write the access log {path}: {error_reason(error)}", code="cannot-write-access-log"
            ) from None

    def write_row(self, row: dict[str, Any]) -> None:
        """Append a row, or count it as lost."""
        line = msgspec.json.encode(row) + b"\n"
        try:
            if self._descriptor is None:
                sys.stdout.write(line.decode())
                sys.stdout.flush()
            else:
                self._append(self._descriptor, line)
        except OSError as error:
            self._note_loss(error)

    def _append(self, descriptor: int, line: bytes) -> None:
        if self._is_cut:
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written:
            self._is_cut = written < len(line)
        if written < len(line):
            raise OSError("only a part of the row has room")

    def _note_loss(self, error: OSError) -> None:
        self._lost += 1
        self._on_loss()
        now = self._clock()
        if now < self._logged_s + LOG_EVERY_S:
            return
        log.error(
            "rows of the access log are lost, %d since the last such line: cannot write %s: %s",
            self._lost,
            self._path,
            error_reason(error),
            extra=event_fields("access-log-lost"),
        )
        self._lost, self._logged_s = 0, now

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _open_private(path: str) -> int:
    """Open a file for appending, for its owner alone; a file of an older version gets this mode. Raises OSError.

    A device or a pipe keeps its mode, and a write to it does not block.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, PRIVATE_FILE)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) != PRIVATE_FILE and status.st_uid == os.geteuid():
        os.fchmod(descriptor, PRIVATE_FILE)
    return descriptor
