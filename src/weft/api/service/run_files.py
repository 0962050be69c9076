"""Run files: how commands on this machine find the servers that run on it.

A server holds the lock on its file for as long as it lives. A file whose lock is free was left by a killed server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from weft.cache import cache_dir, cache_path, make_private, try_lock
from weft.errors import ModelError, error_reason

log = logging.getLogger("weft.serving")


class RunningServer(msgspec.Struct, frozen=True):
    """A server on this machine: the names of its model, its address, process, and start in seconds since 1970.

    `checkpoints` are the paths of the files or directories that it has read, of its model and its draft model.
    """

    names: tuple[str, ...]
    url: str
    pid: int
    began_s: float
    checkpoints: tuple[str, ...] = ()

    def stop(self) -> None:
        """Ask the server to end its requests and exit. Raises OSError."""
        os.kill(self.pid, signal.SIGTERM)


@contextlib.contextmanager
def announced(names: Sequence[str], url: str, checkpoints: Sequence[str] = ()) -> Iterator[None]:
    """Keep a run file while the block runs. Without a cache directory the server runs unannounced."""
    server = RunningServer(tuple(names), url, os.getpid(), time.time(), tuple(checkpoints))
    try:
        cache_dir()
        make_private(_folder())
        file = (_folder() / f"{server.pid}.json").open("w+b")
    except (OSError, ModelError) as error:
        log.info("`weft ps` does not show this server: %s", error_reason(error))
        yield
        return
    with file:
        try_lock(file.fileno())
        file.write(msgspec.json.encode(server))
        file.flush()
        try:
            yield
        finally:
            Path(file.name).unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """The servers of this user on this machine, the oldest first. Files of killed servers are removed."""
    servers = [server for path in sorted(_folder().glob("*.json")) if (server := _read_server(path)) is not None]
    return sorted(servers, key=lambda server: server.began_s)


def _read_server(path: Path) -> RunningServer | None:
    try:
        with path.open("r+b") as file:
            if try_lock(file.fileno()):
                path.unlink(missing_ok=True)
                return None
            return msgspec.json.decode(file.read(), type=RunningServer)
    except (OSError, msgspec.DecodeError):  # the server is ending or starting
        return None


def _folder() -> Path:
    return cache_path() / "running"
