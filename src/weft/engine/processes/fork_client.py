"""The parent's side of a fork server, and of the processes that it has forked."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

import msgspec

from weft.engine.processes.fork_server import (
    MAX_FILES,
    MAX_REQUEST,
    Exited,
    Forked,
    ForkRefused,
    ForkRequest,
    FromServer,
    Greeting,
    ServerReady,
)
from weft.engine.processes.liveness import read_times
from weft.engine.processes.open_sockets import open_sockets

# No library reads it, and it differs from test to test.
UNREAD_VARIABLES = ("PYTEST_CURRENT_TEST",)
OWN_FILES = 3  # descriptors of a request besides the caller's: two of the output, and the gate
END_S = 1.0  # seconds for a server to end by itself
# A server is given up that has been stopped (SIGSTOP) for so long, or that answers nothing and uses no CPU time.
POLL_S, STOPPED_S, SILENT_S = 0.5, 2.0, 30.0


class ForkError(Exception):
    """The server cannot start a process; a direct start may."""


class ForkClient:
    """The parent's side of a fork server. Any thread may call its methods."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start a server, which imports its modules with these variables. It is not waited for."""
        self.environment = read_variables(environment)
        self.users = 0  # guarded by the pool's lock
        self._lock = threading.Lock()  # guards the conversation and the statuses
        self._statuses: dict[int, int] = {}  # of processes that have ended, by pid
        self._ready = False
        self._messages = msgspec.msgpack.Decoder[FromServer](FromServer)
        (self._socket, theirs) = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lifeline, their_lifeline = socket.socketpair()
        open_sockets.update((self._socket, self._lifeline))
        inherited = (theirs.fileno(), their_lifeline.fileno())
        with theirs, their_lifeline:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "weft.engine.processes.fork_server", *map(str, inherited)],
                # numpy's library of matrices would start threads at its import; ranks multiply with torch's.
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=inherited,
                # If an import fails, a direct start fails too, and says why.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def alive(self) -> bool:
        return self._socket.fileno() >= 0 and self.process.poll() is None

    @property
    def descriptor(self) -> int:
        """The socket, for a process that inherits it and adopts the server. Only that process may use the server
        then."""
        return self._socket.fileno()

    def reclaim(self) -> None:
        """Use the server again, once the process that had adopted it has ended."""
        self._ready = False
        self._statuses.clear()

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Return True if the server's libraries have read the same variables."""
        return read_variables(environment) == self.environment

    def fork(
        self, module: str, arguments: Sequence[int], files: Sequence[int], environment: Mapping[str, str]
    ) -> ForkedProcess:
        """Fork a process, with the arguments of `start_process`. Raises ForkError."""
        if not self.suits(environment):
            raise ForkError("its environment differs from the server's")
        if len(files) + OWN_FILES > MAX_FILES:
            raise ForkError(f"{len(files)} descriptors are too many")
        reading, writing = os.pipe()
        gate, their_gate = socket.socketpair()
        open_sockets.add(gate)
        try:
            request = ForkRequest(
                module=module,
                arguments=list(arguments),
                environment=dict(environment),
                folder=os.getcwd(),
                cores=sorted(os.sched_getaffinity(0)),
                numbers=[1, 2, *files],
            )
            with self._lock:
                pid, pidfd = self._converse(request, [writing, writing, *files, their_gate.fileno()])
                # The status of an earlier process with this number, which was never asked for.
                self._statuses.pop(pid, None)
            with contextlib.suppress(OSError):  # it was killed in between
                gate.send(b"\0")
        except OSError as error:
            os.close(reading)
            raise ForkError(str(error)) from error
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
            their_gate.close()
            gate.close()  # without the byte, a process whose pid has not come ends
        return ForkedProcess(self, pid, pidfd, os.fdopen(reading, "rb", buffering=0))

    def _converse(self, request: ForkRequest, files: Sequence[int]) -> tuple[int, int]:
        """Send a request; return the pid and the pidfd of its process. Raises ForkError and OSError."""
        try:
            if not self._ready:
                self._await_ready()
            socket.send_fds(self._socket, [msgspec.msgpack.encode(request)], files)
            message, received = self._receive()
        except BaseException:  # a later answer would be taken for that to another request
            self._hang_up()
            raise
        if isinstance(message, Forked):
            return message.pid, received[0]
        assert isinstance(message, ForkRefused)
        raise ForkError(message.reason)

    def _await_ready(self) -> None:
        """Greet the server, and drop what it had to say to a process before this one."""
        number = int.from_bytes(os.urandom(6), "little") + 1
        self._socket.send(msgspec.msgpack.encode(Greeting(number)))
        while True:
            message, files = self._receive_any()
            for file in files:
                os.close(file)
            if isinstance(message, ServerReady) and message.number == number:
                break
        if message.problem:
            raise ForkError(message.problem)
        self._ready = True

    def _receive(self) -> tuple[FromServer, list[int]]:
        """Wait for a message that is not the end of a process; note the ends of processes. Raises ForkError."""
        while True:
            message, files = self._receive_any()
            if not isinstance(message, Exited):
                return message, files
            self._statuses[message.pid] = message.returncode

    def _receive_any(self) -> tuple[FromServer, list[int]]:
        """Wait for a message.

        Raises ForkError for a server that has ended, that has been stopped for STOPPED_S, or that has used no CPU time
        for SILENT_S.
        """
        quiet_s, times = 0.0, read_times(self.pid)
        while not wait_readable(self._socket.fileno(), time.monotonic() + POLL_S):
            before, times = times, read_times(self.pid)
            if times is None or (times != before and not times.stopped):
                quiet_s = 0.0
                continue
            quiet_s += POLL_S
            if quiet_s >= (STOPPED_S if times.stopped else SILENT_S):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                raise ForkError("the server shows no sign of life")
        data, files, _, _ = socket.recv_fds(self._socket, MAX_REQUEST, 1)
        if not data:
            raise ForkError("the server has ended")
        return self._messages.decode(data), files

    def wait_status(self, pid: int, deadline: float) -> int | None:
        """Return the status of a process that has ended; None if it does not come until `deadline`, a monotonic time,
        or if the server is gone."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return None
        try:
            while pid not in self._statuses:
                if not wait_readable(self._socket.fileno(), deadline):
                    return None
                message, files = self._receive_any()
                for file in files:  # of an answer to a process before this one
                    os.close(file)
                if isinstance(message, Exited):
                    self._statuses[message.pid] = message.returncode
            return self._statuses.pop(pid)
        except (ForkError, OSError):
            return None
        finally:
            self._lock.release()

    def end(self) -> None:
        """End the server, also while it imports. May be called twice."""
        self._hang_up()
        try:
            self.process.wait(END_S if self._ready else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with self._lock:
            self._socket.close()
            self._lifeline.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class AdoptedServer(ForkClient):
    """A server that another process has started and ends. This process has inherited the socket."""

    def __init__(self, descriptor: int, pid: int) -> None:
        os.set_inheritable(descriptor, False)
        self.pid, self.users = pid, 1  # its starter is a user for as long as this process lives
        self._lock = threading.Lock()
        self._statuses, self._ready = {}, False
        self._messages = msgspec.msgpack.Decoder[FromServer](FromServer)
        self._socket = socket.socket(fileno=descriptor)
        open_sockets.add(self._socket)

    @property
    def alive(self) -> bool:
        times = read_times(self.pid)
        return self._socket.fileno() >= 0 and times is not None and times.state != "Z"

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Return True: its starter has planned the same ranks."""
        return True

    def end(self) -> None:
        """Leave the server to its starter."""
        with self._lock:
            self._socket.close()


class ForkedProcess:
    """A `ChildProcess` that a server has forked."""

    def __init__(self, server: ForkClient, pid: int, pidfd: int, stdout: IO[bytes]) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._server = server
        self._lock = threading.Lock()  # guards the next attribute: the number may soon be another file's
        self._pidfd: int | None = pidfd

    def wait(self, timeout: float | None = None) -> int | None:
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if timeout is None else timeout)
        with self._lock:
            if self._pidfd is None:
                return self.returncode
            watched = os.dup(self._pidfd)  # without the lock, so that another thread may kill the process
        try:
            if not wait_readable(watched, deadline):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        finally:
            os.close(watched)
        with self._lock:
            if self._pidfd is not None:
                # The server reports the end at once, unless it is gone, or has told a process before this one.
                self.returncode = self._server.wait_status(self.pid, time.monotonic() + END_S)
                os.close(self._pidfd)
                self._pidfd = None
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self._pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a library may read when it is imported."""
    return {name: value for name, value in environment.items() if name not in UNREAD_VARIABLES}


def wait_readable(descriptor: int, deadline: float) -> bool:
    """Wait until a descriptor can be read, at most until `deadline`, a monotonic time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(min(max(0.0, deadline - time.monotonic()), 1e6) * 1000))
