"""The socket to serve on, bound before anything slow: a port in use is reported at once.

The program that starts the server may have opened it: systemd's LISTEN_FDS (sd_listen_fds(3)).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import MutableMapping
from dataclasses import replace
from ipaddress import ip_address

from weft.errors import ConfigError, error_reason
from weft.http.certificate import validity_fault
from weft.http.options import ServeOptions
from weft.logs import event_fields
from weft.machine.hardware.listeners import port_holder

log = logging.getLogger("weft.serving")

BACKLOG = 2048  # connections waiting to be accepted; uvicorn's default
FIRST_PASSED = 3  # the first descriptor that is passed, behind standard input, output and error
PASSED_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


def bind(options: ServeOptions) -> socket.socket:
    """Bind a socket that does not listen yet, or take the listening socket that systemd passes.

    Raises ConfigError for an address that cannot be bound.
    """
    inherited = inherited_listener(os.environ)
    if inherited is not None:
        return inherited
    if options.uds is not None:
        return _bind_path(options.uds)
    if not 0 <= options.port <= 65535:
        raise ConfigError(
            f"port is {options.port}; it must be from 1 to 65535, or 0 for any that is free", code="invalid-port"
        )
    host = "127.0.0.1" if options.host == "localhost" else options.host  # `bind_beside` adds ::1
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"--host {options.host} is not an address of this machine: {error.strerror}", code="host-not-here"
        ) from None
    listener = socket.socket(family, kind, protocol)
    # The port of a server that has just ended counts as free, though its last connections linger.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _bind_error(options, error) from None
    # While this socket does not listen, another socket that may reuse the address could be bound to it too.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return listener


def bound_options(listener: socket.socket, options: ServeOptions) -> ServeOptions:
    """Options that name the path of the Unix socket that the server was given, by a flag or by systemd."""
    if listener.family != socket.AF_UNIX or options.uds is not None:
        return options
    return replace(options, uds=os.fsdecode(listener.getsockname()))


def start_listening(listener: socket.socket, options: ServeOptions) -> None:
    """Begin to accept clients. Raises ConfigError if another process has taken the address."""
    if options.uds is None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # `bind` cleared it
    try:
        # Here and not in the event loop, which would ignore a failure.
        listener.listen(BACKLOG)
    except OSError as error:
        raise _bind_error(options, error) from None


def bind_beside(listener: socket.socket) -> socket.socket | None:
    """Listen also at ::1, at the port of a listener on 127.0.0.1 or 0.0.0.0, for clients that resolve localhost to ::1.

    None for other listeners, on machines without IPv6, and with a warning if another process has that port.
    """
    if listener.family != socket.AF_INET or listener.getsockname()[0] not in ("127.0.0.1", "0.0.0.0"):
        return None
    port = listener.getsockname()[1]
    beside = None
    try:
        beside = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        beside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        beside.bind(("::1", port))
        beside.listen(BACKLOG)
    except OSError as error:
        if beside is not None:
            beside.close()
        if error.errno == errno.EADDRINUSE:
            log.warning("port %d of ::1 is taken; clients that take localhost for ::1 reach another server", port)
        return None
    return beside


def check_tls(options: ServeOptions) -> None:
    """Raise ConfigError if the certificate and the key cannot be used."""
    if options.ssl_certfile is None and options.ssl_keyfile is None:
        return
    if options.ssl_certfile is None:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile", code="ssl-certificate-missing")
    try:
        fault = validity_fault(options.ssl_certfile, options.ssl_keyfile)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"--ssl-certfile {options.ssl_certfile} cannot be used: {error}", code="ssl-certificate-unusable"
        ) from None
    if fault:
        raise ConfigError(
            f"--ssl-certfile {options.ssl_certfile} {fault}; renew it, or set this machine's clock",
            code="ssl-certificate-dates",
        )


def warn_without_key(listener: socket.socket, options: ServeOptions, *, has_keys: bool) -> None:
    """Log a warning for a server that other machines reach and whose clients need no key."""
    if options.uds is not None or has_keys:
        return
    host, port = listener.getsockname()[:2]
    if not ip_address(host.partition("%")[0]).is_loopback:
        log.warning(
            "everybody who reaches %s:%d may use this server: it has no key; set VLLM_API_KEY or --api-key-file, or "
            "serve with --host 127.0.0.1",
            host,
            port,
            extra=event_fields("no-key", host=host, port=port),
        )


def public_url(listener: socket.socket, options: ServeOptions) -> str:
    """URL at which clients reach the server."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{options.root_path}"


class PathListener(socket.socket):
    """A Unix socket that one process at a time may own.

    A lock file next to it shows the owner from the start, before the socket listens. Closing the socket removes both
    files. Raises OSError.
    """

    def __init__(self, path: str) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = path
        self._lock = -1
        try:
            self._lock = _lock(f"{path}.lock")
            if _is_left_over(path):
                os.unlink(path)
            self.bind(path)
        except BaseException:
            self._unlock()
            super().close()
            raise

    def close(self) -> None:
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._unlock()
        super().close()

    def _unlock(self) -> None:
        """Remove the lock file, then release the lock: a process that waits for it then creates a new one."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._path}.lock")
            os.close(self._lock)
            self._lock = -1


def _bind_path(path: str) -> socket.socket:
    try:
        return PathListener(path)
    except BlockingIOError:
        why, code = "in use by another server, which runs or starts", "path-taken"
    except OSError as error:
        why, code = error_reason(error), "path-taken" if error.errno == errno.EADDRINUSE else "cannot-listen"
    raise ConfigError(f"cannot listen on {path}: {why}; give another --uds", code=code) from None


def _lock(path: str) -> int:
    """Descriptor of a locked file, which the system unlocks at the end of this process.

    Raises BlockingIOError if another process holds the lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last owner may have removed it since it was opened.
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_left_over(path: str) -> bool:
    """Return True if `path` is a socket on which no process listens."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def _bind_error(options: ServeOptions, error: OSError) -> ConfigError:
    """The error for an address that cannot be bound, with the way out."""
    where = f"port {options.port} on {options.host}"
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(options.port)
        taken = f"{where} is taken{f' by {holder}' if holder else ''}"
        return ConfigError(f"{taken}; stop that, or give another --port (0: any)", code="port-taken")
    if error.errno == errno.EACCES:
        return ConfigError(
            f"{where} needs privileges that this user does not have; give a --port from 1024 on",
            code="port-needs-privileges",
        )
    return ConfigError(f"cannot listen on {where}: {error.strerror}", code="cannot-listen")


def inherited_listener(environ: MutableMapping[str, str]) -> socket.socket | None:
    """The listening socket that `environ` passes to this process; None if it passes none.

    LISTEN_PID must be this process: another number is meant for a parent. The variables are removed from `environ`, and
    the descriptor is closed in child processes, so that they do not use it. Raises ConfigError unless it is exactly one
    listening stream socket.
    """
    count, pid = environ.get("LISTEN_FDS", ""), environ.get("LISTEN_PID", "")
    if not count or pid != f"{os.getpid()}":
        return None
    for name in PASSED_VARIABLES:
        environ.pop(name, None)
    if count == "0":
        return None
    if count != "1":
        raise ConfigError(
            f"LISTEN_FDS is {count:.20}; the server takes one listening socket: give one ListenStream per service",
            code="several-sockets-passed",
        )
    return _listening_socket(FIRST_PASSED)


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
        f"descriptor {FIRST_PASSED}, which LISTEN_FDS passes, {why}; in the .socket file use ListenStream= and "
        "Accept=no",
        code="passed-socket-unusable",
    )
