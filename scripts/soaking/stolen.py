"""Sockets of another process, shut down from outside, as a fault: Linux's pidfd_getfd lends them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from pathlib import Path

PIDFD_GETFD = 438  # the number of the system call on every architecture


def shut_down_sockets(pid: int) -> None:
    """Shut down the first stream socket that a process has: the connection to its parent.

    Raises OSError if this process may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        for number in sorted(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()):
            if not _is_socket(pid, number):
                continue
            lent = libc.syscall(PIDFD_GETFD, process, number, 0)
            if lent < 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
            with socket.socket(fileno=lent) as end:
                if end.type == socket.SOCK_STREAM:
                    end.shutdown(socket.SHUT_RDWR)
                    return
    finally:
        os.close(process)


def _is_socket(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket:")
    return False
