"""Limits on all connections together: file descriptors, and bytes of unfinished requests."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from typing import Protocol

from weft.http.errors import HttpError
from weft.logs import event_fields

log = logging.getLogger("weft.serving")

MAX_FILES = 65536  # the soft limit is raised to this; beyond it, programs that walk their descriptors get slow
RESERVED_FILES = 32  # descriptors kept for pipes, files and the engine
LOG_EVERY_S = 60.0
# Key of a scope: a function by which an application reports the number of bytes of the body that it has written to
# disk.
STORED = "weft.stored"


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of the HTTP transport. Times are seconds.

    Per connection: `head_bytes`: URL and header fields together. `header_fields`: number of header fields. `chunks`:
    chunks of a chunked body, plus one for every `chunk_bytes` received. `queued_requests`: pipelined requests behind
    the current request. `head_s`: time until a head is complete. `body_s`: time without a byte of the body.
    `keepalive_s`: idle time after a response. `linger_s`: time to read an error while the client still sends. All
    connections together: `connections`: connections that are served. `spare`: further connections, on which only health
    probes are answered. `held_bytes`: bytes of requests that are incomplete or queued.
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
    """The part of a connection that `ConnectionAdmission` uses."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the client has still to take."""
        ...

    def drop(self) -> None:
        """Close at once, without a response."""
        ...

    def refuse(self, error: HttpError) -> None:
        """Send `error` and close."""
        ...


class ConnectionAdmission:
    """The connections of one server.

    At the limit, the oldest connection that only waits is closed (a spare connection, or one whose request is
    unfinished), so that clients that never finish their requests cannot keep out others.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._served: set[TrackedConnection] = set()
        self._spare: dict[TrackedConnection, None] = {}  # oldest first
        self._held: dict[TrackedConnection, int] = {}  # bytes, oldest first
        self._unread: dict[TrackedConnection, tuple[float, int]] = {}  # since when, and bytes at the last check
        self._held_bytes = 0
        self._refused = 0
        self._logged_at = float("-inf")

    def enter(self, connection: TrackedConnection) -> bool:
        """Count a new connection. Return False if it is over the limit and may only send health probes."""
        if len(self._served) < self.limits.connections:
            self._served.add(connection)
            return True
        if len(self._spare) >= self.limits.spare:
            next(iter(self._spare)).drop()
        self._spare[connection] = None
        self._log_refusal()
        return False

    def leave(self, connection: TrackedConnection) -> None:
        """Forget a connection. Calling it twice is harmless."""
        self._served.discard(connection)
        self._spare.pop(connection, None)
        self._unread.pop(connection, None)
        self.hold(connection, 0)

    def note_unread(self, connection: TrackedConnection, unread: bool) -> None:
        """Note that bytes of an answer wait for a client, or no longer do."""
        if unread:
            self._unread.setdefault(connection, (time.monotonic(), connection.unsent_bytes))
        else:
            self._unread.pop(connection, None)

    def unread_s(self) -> list[float]:
        """Seconds for which each client with unsent bytes has taken none, the longest first.

        The time restarts if a client has taken bytes since the last check: a long answer has unsent bytes until nearly
        its end.
        """
        now = time.monotonic()
        for connection, (since, before) in self._unread.items():
            size = connection.unsent_bytes
            self._unread[connection] = (now if size < before else since, size)
        return sorted((now - since for since, _ in self._unread.values()), reverse=True)

    def hold(self, connection: TrackedConnection, size: int) -> None:
        """Record that a connection holds `size` bytes of unanswered requests.

        While all connections together hold too many bytes, the oldest holder is refused.
        """
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
                    code="too-many-unfinished",
                    retry_after_s=1,
                )
            )
            self.hold(oldest, 0)

    def too_many_connections(self) -> HttpError:
        """Error for a request on a connection over the limit."""
        return HttpError(
            503,
            f"{self.limits.connections} connections are open, and more are not served; try again later",
            code="too-many-connections",
            retry_after_s=1,
        )

    def _log_refusal(self) -> None:
        """Log at most one line every LOG_EVERY_S, with the number of refusals since the last."""
        self._refused += 1
        now = time.monotonic()
        if now < self._logged_at + LOG_EVERY_S:
            return
        log.warning(
            "%d connections are open, the most that are served: others get 503, health probes excepted (%d since the "
            "last such line); the limit follows from `ulimit -n` if that is low",
            self.limits.connections,
            self._refused,
            extra=event_fields("too-many-connections", limit=self.limits.connections, refused=self._refused),
        )
        self._logged_at, self._refused = now, 0


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, at most MAX_FILES. Return the limit in force."""
    try:
        import resource
    except ImportError:  # not a Unix
        return MAX_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MAX_FILES if hard == unlimited else min(hard, MAX_FILES)
    if soft == unlimited or soft >= wanted:
        return MAX_FILES if soft == unlimited else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox that forbids it
        return soft
    return wanted


def fit_to_files(limits: ConnectionLimits, files: int) -> ConnectionLimits:
    """Copy of `limits` with at most as many connections as fit in `files` descriptors, given the open descriptors."""
    room = files - open_files() - RESERVED_FILES - limits.spare
    return replace(limits, connections=max(1, min(limits.connections, room)))


def open_files() -> int:
    """Number of descriptors that this process has open."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            return len(os.listdir(folder))
    return 0
