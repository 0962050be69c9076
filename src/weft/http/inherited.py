"""A listening socket that was opened by the program that starts the server: systemd's LISTEN_FDS (sd_listen_fds(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from weft.errors import ConfigError, error_reason

FIRST = 3  # the first descriptor that is passed, behind standard input, output and error
VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


def inherited_listener(environ: MutableMapping[str, str]) -> socket.socket | None:
    """The listening socket that `environ` passes to this process; None if it passes none.

    LISTEN_PID must be this process: another number is meant for a parent. The variables are removed from `environ`, and
    the descriptor is closed in child processes, so that they do not use it. Raises ConfigError unless it is exactly one
    listening stream socket.
    """
    count, pid = environ.get("LISTEN_FDS", ""), environ.get("LISTEN_PID", "")
    if not count or pid != f"{os.getpid()}":
        return None
    for name in VARIABLES:
        environ.pop(name, None)
    if count == "0":
        return None
    if count != "1":
        raise ConfigError(
            f"LISTEN_FDS is {count:.20}; the server takes one listening socket: give one ListenStream per service",
            code="several-sockets-passed",
        )
    return _listening_socket(FIRST)


def _listening_socket(descriptor: int) -> socket.socket:
    """The socket of a descriptor. Raises ConfigError unless it is a stream socket that listens."""
    try:
        os.set_inheritable(descriptor, False)
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        raise _unusable(f"is not a socket ({error_reason(error)})") from None
    if listener.type != socket.SOCK_STREAM or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.detach()  # it stays open, as it was given
        raise _unusable("is not a listening stream socket")
    return listener


def _unusable(why: str) -> ConfigError:
    return ConfigError(
        f"descriptor {FIRST}, which LISTEN_FDS passes, {why}; in the .socket file use ListenStream= and Accept=no",
        code="passed-socket-unusable",
    )
