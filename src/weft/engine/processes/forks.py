"""Starts of child processes: directly, or by a fork of a process that has imported torch already."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

from weft.engine.processes.fork_client import AdoptedServer, ForkClient, ForkError

# With one of these variables, OpenMP binds the very process that loads it to a core.
BINDING_VARIABLES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
MIN_FORKS = 2  # processes for which a server pays: it imports as long as one of them does


class ChildProcess(Protocol):
    """Protocol of a started process: the part of subprocess.Popen that its parent uses."""

    @property
    def pid(self) -> int: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    @property
    def returncode(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end. Raises subprocess.TimeoutExpired. Returns None if the status is unknown."""
        ...

    def kill(self) -> None: ...

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended: its number may be another one's by now."""
        ...


def start_process(
    module: str,
    arguments: Sequence[int],
    files: Sequence[int],
    environment: Mapping[str, str],
    server: ForkClient | None,
) -> ChildProcess:
    """Run `python -m module ARGUMENTS`, with its output in a pipe, through a server if there is one that can.

    `files` are descriptors that the process inherits under the same numbers.
    """
    if server:
        with contextlib.suppress(ForkError):
            return server.fork(module, arguments, files, environment)
    return subprocess.Popen(
        # -P: a user's random.py in the current folder must not shadow the standard library's.
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        env=environment,
        pass_fds=files,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Ctrl-C in a terminal reaches the parent alone, and the parent ends its children.
        start_new_session=True,
    )


class ServerPool:
    """The fork server of this process, shared by its engines."""

    def __init__(self) -> None:
        self.min_forks = MIN_FORKS
        self.keep = False  # a server without clients is kept for the next engine
        self._lock = threading.Lock()
        self._server: ForkClient | None = None

    def acquire(self, environment: Mapping[str, str], count: int) -> ForkClient | None:
        """Return a server for `count` processes with these variables; None if a direct start is better.

        To be released.
        """
        if not can_fork(environment):
            return None
        with self._lock:
            server = self._server
            if not server or not server.alive or not server.suits(environment):
                if count < self.min_forks:
                    return None
                if server and not server.users:
                    server.end()
                server = self._server = ForkClient(environment)
            server.users += 1
            return server

    def adopt(self, descriptor: int, pid: int) -> None:
        """Use a server that the parent of this process has started, even for a single process."""
        with self._lock:
            self._server = AdoptedServer(descriptor, pid)

    def release(self, server: ForkClient) -> None:
        with self._lock:
            server.users -= 1
            if server.users or (self.keep and server is self._server):
                return
            if server is self._server:
                self._server = None
        server.end()

    def close(self) -> None:
        """End a server that was kept."""
        with self._lock:
            server, self._server = self._server, None
        if server:
            server.end()

    def forget(self) -> None:
        """Forget the server, in a fork of this process."""
        self._lock = threading.Lock()
        self._server = None


pool = ServerPool()
os.register_at_fork(after_in_child=pool.forget)
atexit.register(pool.close)


def can_fork(environment: Mapping[str, str]) -> bool:
    """Return True if this system, and libraries with these variables, allow a fork server."""
    return (
        sys.platform == "linux"
        and hasattr(os, "pidfd_open")
        and not any(name in environment for name in BINDING_VARIABLES)
    )
