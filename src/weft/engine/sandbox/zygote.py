"""Zygote: the process that forks sandboxed workers, as its parent sees it; each process has one at most."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from itertools import count
from typing import IO, NamedTuple

import msgspec

from weft.engine.processes.open_sockets import open_sockets
from weft.engine.sandbox.messages import Registration
from weft.engine.sandbox.process import FORGET, FORK, ORDER, REGISTER

END_S = 5.0  # for the system to end a killed process
PASSED = ("PYTHON", "PATH", "HOME", "LANG", "LC_", "TMPDIR", "TZ", "LD_", "DYLD_", "VIRTUAL_ENV")


class WorkerEnds(NamedTuple):
    """The parent's ends of a worker's socket and of its lifeline, by whose end the system kills it."""

    work: socket.socket
    lifeline: socket.socket

    @property
    def ended(self) -> bool:
        """True if a worker that has nothing to answer has ended, or if these ends were closed in a fork."""
        if self.work.fileno() < 0:
            return True
        readable = select.poll()
        readable.register(self.work, select.POLLIN)
        return bool(readable.poll(0))

    def close(self) -> None:
        """Kill the worker."""
        for end in self:
            open_sockets.discard(end)
            end.close()


class Zygote:
    """A process that forks workers. Any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        self._lifeline, their_lifeline = socket.socketpair()
        open_sockets.update((self._control, self._lifeline))
        inherited = (theirs.fileno(), their_lifeline.fileno())
        with theirs, their_lifeline:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "weft.engine.sandbox.process", *map(str, inherited)],
                env=_environment(),
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # of libraries that print before they fail; the reply says why
                start_new_session=True,
            )
        self._registered: set[int] = set()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def spawn(self, registration: Registration) -> WorkerEnds:
        """Fork a worker for a registration. Without waiting: a zygote that fails closes the worker's socket.

        Raises OSError if no descriptor is left, and ConnectionError if the zygote is dead.
        """
        with contextlib.ExitStack() as opened:
            work, their_work = map(opened.enter_context, socket.socketpair())
            lifeline, their_lifeline = map(opened.enter_context, socket.socketpair())
            ends = WorkerEnds(work, lifeline)
            with self._lock:
                self._forget_collected()
                if registration.number not in self._registered:
                    with _file_of(msgspec.msgpack.encode(registration)) as file:
                        self._order(REGISTER, registration.number, file.fileno())
                    self._registered.add(registration.number)
                self._order(FORK, registration.number, their_work.fileno(), their_lifeline.fileno())
            open_sockets.update(ends)
            opened.pop_all()
        their_work.close()
        their_lifeline.close()
        return ends

    def is_used(self) -> bool:
        """Return True if a registration is there whose object lives."""
        with self._lock, contextlib.suppress(OSError):
            self._forget_collected()
        return bool(self._registered)

    def _forget_collected(self) -> None:
        """Drop the registrations of objects that are gone."""
        while forgotten:
            number = forgotten.popleft()
            if number in self._registered:
                self._registered.discard(number)
                self._order(FORGET, number)

    def close(self) -> None:
        """End the process. Its workers end with their own lifelines."""
        open_sockets.difference_update((self._control, self._lifeline))
        self._control.close()
        self._lifeline.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def _order(self, operation: bytes, number: int, *files: int) -> None:
        socket.send_fds(self._control, [ORDER.pack(operation, number)], files)


numbers = count(1)  # of registrations
forgotten: deque[int] = deque()  # of objects that were collected, perhaps by a thread that holds a lock
_current: Zygote | None = None
_starting = threading.Lock()


def current_zygote() -> Zygote:
    """Return this process's zygote. It is started for the first caller, and again if it has died."""
    with _starting:
        return _ensure()


def spawn_worker(registration: Registration) -> WorkerEnds:
    """Fork a worker by this process's zygote. Raises OSError if no descriptor or process is left."""
    with _starting:
        try:
            return _ensure().spawn(registration)
        except ConnectionError:  # it has died a moment ago
            _end_current()
            return _ensure().spawn(registration)


def close_unused() -> None:
    """End this process's zygote if it is unused."""
    with _starting:
        if _current is not None and not _current.is_used():
            _end_current()


def _end_current() -> None:
    global _current
    if _current is not None:
        _current.close()
        _current = None


def _ensure() -> Zygote:
    global _current
    if _current is None or not _current.alive:
        _end_current()
        _current = Zygote()
    return _current


def _environment() -> dict[str, str]:
    """Variables that Python and its libraries need to start; no key of a server is among them."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED)}


def _file_of(data: bytes) -> IO[bytes]:
    """Return an open file with this content, to be read from its beginning. On Linux no disk has to have room."""
    if sys.platform == "linux":
        file: IO[bytes] = os.fdopen(os.memfd_create("weft-sandbox"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    file.write(data)
    file.seek(0)
    return file


def _forget_in_fork() -> None:
    """In a process that somebody else has forked: its sockets are closed, and the zygote is its parent's."""
    global _current
    _current = None


def _close_at_exit() -> None:
    if _current is not None:
        _current.close()


os.register_at_fork(after_in_child=_forget_in_fork)
atexit.register(_close_at_exit)
