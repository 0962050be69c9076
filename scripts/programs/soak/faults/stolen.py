"""Sockets of another process, shut down from outside, as a fault: pidfd_getfd of Linux lends them."""

from __future__ import annotations

import ctypes
import os
import socket

PIDFD_GETFD = 438  # the number of the system call on every architecture


def shut_down_socket(pid: int, number: int) -> None:
    """Shut down the socket behind descriptor `number` of a process. Raises OSError if this process may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        lent = libc.syscall(PIDFD_GETFD, process, number, 0)
        if lent < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        with socket.socket(fileno=lent) as end:
            end.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)
