"""Admission: what all connections together may take, in descriptors and in bytes."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from typing import Protocol

from weft.serving.errors import HttpError

log = logging.getLogger("weft.serving")

MOST_FILES = 65536  # to which the soft limit is raised; beyond that, some programs that walk their descriptors are slow
RESERVED_FILES = 32  # descriptors kept for pipes, files, and the engine
LOG_EVERY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Bounds of the HTTP transport. Times are seconds.

    One connection: `head_bytes` of URL and header fields, and `header_fields` of these; `chunks` of a chunked body, and
    one more for every `chunk_bytes` of it; `queued_requests` behind one that is unanswered; `head_s` until a head is
    complete, `body_s` without a byte of a body, `keepalive_s` idle after an answer, `linger_s` to read a refusal while
    the client still writes. Together: `connections` that are served, `spare` more that are read for health probes, and
    `held_bytes` of requests that are not whole yet or wait.
    """

    head_bytes: int = 2**16
    header_fields: int = 256
    chunks: int = 2**14
    chunk_bytes: int = 64
    queued_requests: int = 8
    head_s: float = 10.0
    body_s: float = 30.0
    keepalive_s: float = 5.0
    linger_s: float = 10.0
    connections: int = 4096
    spare: int = 32
    held_bytes: int = 2**27


class TrackedConnection(Protocol):
    """A connection, as `Admission` sees it."""

    def drop(self) -> None:
        """Close at once, without a word."""
        ...

    def refuse(self, error: HttpError) -> None:
        """Say so and close."""
        ...


class Admission:
    """The connections of one server. Where there is no room, the oldest of those that only wait gives way, so that
    clients that never finish cannot keep out those that do."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._served: set[TrackedConnection] = set()
        self._spare: dict[TrackedConnection, None] = {}  # the oldest first
        self._held: dict[TrackedConnection, int] = {}  # bytes, the oldest first
        self._held_bytes = 0
        self._refused = 0
        self._logged_at = float("-inf")

    def enter(self, connection: TrackedConnection) -> bool:
        """Count a new connection; false if it is over the limit, and may only ask for the server's health."""
        if len(self._served) < self.limits.connections:
            self._served.add(connection)
            return True
        if len(self._spare) >= self.limits.spare:
            next(iter(self._spare)).drop()
        self._spare[connection] = None
        self._log_refusal()
        return False

    def leave(self, connection: TrackedConnection) -> None:
        """Forget a connection. It may be told twice."""
        self._served.discard(connection)
        self._spare.pop(connection, None)
        self.hold(connection, 0)

    def hold(self, connection: TrackedConnection, size: int) -> None:
        """Note that `size` bytes of unanswered requests lie with a connection."""
        self._held_bytes += size - self._held.get(connection, 0)
        if size:
            self._held[connection] = size
        else:
            self._held.pop(connection, None)
        while size and self._held_bytes > self.limits.held_bytes:
            oldest = next(iter(self._held))
            oldest.refuse(
                HttpError(
                    503,
                    f"unfinished requests take more than the {self.limits.held_bytes} bytes that are kept for them, "
                    "and this is the oldest; send it again, and faster",
                    code="too_many_unfinished",
                    retry_after_s=1,
                )
            )
            self.hold(oldest, 0)

    def too_many_connections(self) -> HttpError:
        """The refusal of a request over the limit of connections."""
        return HttpError(
            503,
            f"{self.limits.connections} connections are open, and more are not served; try again later",
            code="too_many_connections",
            retry_after_s=1,
        )

    def _log_refusal(self) -> None:
        """One line a minute, however many are refused."""
        self._refused += 1
        now = time.monotonic()
        if now < self._logged_at + LOG_EVERY_S:
            return
        log.warning(
            "%d connections are open, the most that are served: others get 503, health probes excepted (%d since the "
            "last such line); the limit follows from `ulimit -n` if that is low",
            self.limits.connections,
            self._refused,
        )
        self._logged_at, self._refused = now, 0


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, MOST_FILES at most; the limit as it is now."""
    try:
        import resource
    except ImportError:  # not a Unix
        return MOST_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MOST_FILES if hard == unlimited else min(hard, MOST_FILES)
    if soft == unlimited or soft >= wanted:
        return MOST_FILES if soft == unlimited else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox that forbids it
        return soft
    return wanted


def fit_to_files(limits: ConnectionLimits, files: int) -> ConnectionLimits:
    """`limits` with no more connections than `files` descriptors allow, beside those that are open."""
    room = files - open_files() - RESERVED_FILES - limits.spare
    return replace(limits, connections=max(1, min(limits.connections, room)))


def open_files() -> int:
    """Number of descriptors that this process has open."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            return len(os.listdir(folder))
    return 0
