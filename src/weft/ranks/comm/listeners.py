"""Sockets of this process at which a library listens, and the end of that once its connections are made."""

from __future__ import annotations

import os
import select
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DESCRIPTORS, ABOUT = Path("/proc/self/fd"), Path("/proc/self/fdinfo")
EPOLL = "anon_inode:[eventpoll]"


def listening_sockets() -> set[int]:
    """Descriptors of the TCP sockets at which this process listens; none on a system without /proc."""
    listening = set()
    for descriptor in _descriptors("socket:"):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(descriptor)
    return listening


@contextmanager
def closing_listeners() -> Iterator[None]:
    """Close the listening sockets that are opened inside, which are not needed afterwards.

    To be used where no other thread begins to listen.
    """
    before = listening_sockets()
    yield
    stop_listening(listening_sockets() - before)


def stop_listening(descriptors: Iterable[int]) -> None:
    """Close sockets whose descriptors belong to a library, which cannot be asked to.

    In their place comes a socket that no process can reach. A thread of the library that is about to accept finds
    nothing there, as after a connection that has gone; an unbound socket would be an error, which ends the process.
    """
    descriptors = list(descriptors)
    if not descriptors:
        return
    silent = _silent_descriptor()
    try:
        for descriptor in descriptors:
            watchers = _epolls_of(descriptor)
            os.dup2(silent, descriptor, inheritable=False)
            for watcher in watchers:  # else the library's own end to it fails
                with select.epoll.fromfd(os.dup(watcher)) as epoll:
                    epoll.register(descriptor, select.EPOLLIN)
    finally:
        os.close(silent)


def _silent_descriptor() -> int:
    """A new descriptor that nothing ever comes from: of an unreachable listener, or else of a counter at 0.

    To accept from a counter is an error, but only a thread that is in the middle of that would notice.
    """
    try:
        return _unreachable_listener().detach()
    except OSError:  # there is no folder that this process may write to
        return os.eventfd(0, os.EFD_CLOEXEC)


def _unreachable_listener() -> socket.socket:
    """A listening socket without an address: its file is removed at once. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        number = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            silent.bind(f"/proc/self/fd/{number}/s")  # the folder's own name may be too long for a socket
            silent.listen(1)
        except OSError:
            silent.close()
            raise
        finally:
            os.close(number)
    return silent


def _epolls_of(descriptor: int) -> list[int]:
    """Descriptors of the epoll instances of this process that watch a descriptor."""
    watchers = []
    for number in _descriptors(EPOLL):
        with suppress(OSError):
            lines = (ABOUT / str(number)).read_text().splitlines()
            if any(line.startswith("tfd:") and int(line.split()[1]) == descriptor for line in lines):
                watchers.append(number)
    return watchers


def _descriptors(kind: str) -> Iterator[int]:
    """The open descriptors of this process whose files are of a kind."""
    names = os.listdir(DESCRIPTORS) if DESCRIPTORS.exists() else []
    for name in names:
        with suppress(OSError):
            if os.readlink(DESCRIPTORS / name).startswith(kind):
                yield int(name)
