"""WatchedFile: a file that is read again when it changes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Generic, TypeVar

from weft.errors import ConfigError
from weft.logs import event_fields

log = logging.getLogger("weft.gateway")

T = TypeVar("T")

Stamp = tuple[int, int, int, int]


class WatchedFile(Generic[T]):
    """A file, and the functions for a new content. `read` runs in a thread, and `take` in the event loop.

    Both raise ConfigError for a faulty content. Then one line with `code` says that `subject` stays, and nothing
    changes until the file does.
    """

    def __init__(self, path: str, read: Callable[[], T], take: Callable[[T], None], *, subject: str, code: str) -> None:
        self._path, self._read, self._take = path, read, take
        self._subject, self._code = subject, code
        self._stamp: Stamp | None = None

    async def look(self) -> None:
        """Read the file if it has changed. A disk that does not respond blocks only a thread."""
        try:
            for content in await asyncio.to_thread(self._read_changed):
                self._take(content)
        except ConfigError as error:
            log.error("%s as before: %s", self._subject, error, extra=event_fields(self._code))

    def _read_changed(self) -> list[T]:
        """The content of a changed file; else nothing. Raises ConfigError."""
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return []
        self._stamp = stamp
        return [self._read()]


def _stamp_of(path: str) -> Stamp:
    """Values that change with a file's content, and with its mode."""
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0, 0)
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
