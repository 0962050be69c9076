"""Connections between nodes, from both sides: TLS if this node has a certificate, then the proof of the key."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from weft.engine.processes.keys import (
    HANDSHAKE_S,
    WANTS_NO_TLS,
    WANTS_TLS,
    CertificateError,
    NotWeftError,
    check_connector,
    prove_to_acceptor,
)
from weft.engine.processes.tls import start_tls
from weft.errors import error_reason

FIRST_BYTE = b"\x16"  # first byte of a TLS connection: a record of its handshake
MAX_GREETED = 64  # connections of unknown addresses that prove their key at the same time
# The most of these that one address has: a quarter, so that one machine cannot take all. A node opens one for each of
# its replicas, and tries again if it is refused.
PER_ADDRESS = 16
MAX_KNOWN = 1024  # addresses that have proved the key, of which the last are remembered: more than there are nodes
QUIET_S = 10.0  # seconds between two lines about refused connections from one address
MAX_PEERS = 1024  # addresses remembered for QUIET_S
AGAIN_S = 0.1  # after a connection that could not be accepted


def connect_securely(connection: socket.socket, key: bytes, certificate: str = "") -> socket.socket:
    """Prove the key to the side that was connected to; return the socket to use in place of the connection.

    `certificate` is a node's bundle in PEM. The connection stays the caller's to close if this raises: WrongKeyError,
    CertificateError, or NotWeftError.
    """
    return _secure(connection, key, certificate, prove_to_acceptor, server=False)


def accept_securely(connection: socket.socket, key: bytes, certificate: str = "") -> socket.socket:
    """Have the side that has connected prove the key; otherwise as `connect_securely`."""
    try:
        connection.settimeout(HANDSHAKE_S)
        first = connection.recv(1, socket.MSG_PEEK)
        if not first:
            raise NotWeftError("it closed the connection")
        has_tls = first == FIRST_BYTE
        if has_tls and not certificate:
            connection.recv(1 << 16)  # unread bytes would have the answer dropped
            connection.sendall(WANTS_NO_TLS)
            raise CertificateError("it has a certificate, and this node has none: give all nodes --cluster-cert-file")
        if certificate and not has_tls:
            connection.recv(1 << 16)
            connection.sendall(WANTS_TLS)
            raise CertificateError("it has no certificate: give it --cluster-cert-file, from weft cluster cert")
    except OSError as error:
        raise NotWeftError(error_reason(error)) from None
    return _secure(connection, key, certificate, check_connector, server=True)


def _secure(
    connection: socket.socket,
    key: bytes,
    certificate: str,
    prove: Callable[[socket.socket, bytes, bytes], None],
    *,
    server: bool,
) -> socket.socket:
    if not certificate:
        prove(connection, key, b"")
        return connection
    try:
        pump = start_tls(connection, certificate, server=server, within_s=HANDSHAKE_S)
    except OSError as error:
        raise NotWeftError(error_reason(error)) from None
    try:
        prove(pump.outer, key, pump.binding)
    except BaseException:
        pump.finish()  # the other side learns of a wrong key
        raise
    return pump.outer


class Complaints:
    """Choice of the refused connections that are logged: one of each address in QUIET_S seconds.

    Otherwise a stranger could fill the disk with lines about connections that cost nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next
        self._said_s: dict[str, float] = {}

    def is_due(self, peer: str) -> bool:
        """Return True if a line about this address shall be logged now."""
        now = time.monotonic()
        with self._lock:
            if now - self._said_s.get(peer, -QUIET_S) < QUIET_S:
                return False
            if len(self._said_s) >= MAX_PEERS:
                self._said_s.clear()
            self._said_s[peer] = now
            return True


Greet = Callable[[socket.socket, str], Callable[[], object] | None]


class Places:
    """Places of the connections that prove their key at the same time.

    Unknown addresses share MAX_GREETED, each has `per_address` of them at most. An address that has proved the key
    before has `per_address` places of its own: no number of strangers keeps it out.
    """

    def __init__(self, per_address: int = PER_ADDRESS) -> None:
        self._per_address = per_address
        self._lock = threading.Lock()  # guards the next
        self._known: OrderedDict[str, None] = OrderedDict()
        self._taken: Counter[tuple[bool, str]] = Counter()  # by whether the address was known then
        self._strangers = 0

    def take(self, address: str) -> Callable[[], None] | None:
        """Take a place; return the function that gives it back, or None if there is none for this address."""
        with self._lock:
            known = address in self._known
            full = not known and self._strangers >= MAX_GREETED
            if full or self._taken[known, address] >= self._per_address:
                return None
            self._taken[known, address] += 1
            self._strangers += not known
            return partial(self._give_back, known, address)

    def remember(self, address: str) -> None:
        """Note that an address has proved the key."""
        with self._lock:
            self._known[address] = None
            self._known.move_to_end(address)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _give_back(self, known: bool, address: str) -> None:
        with self._lock:
            self._strangers -= not known
            self._taken[known, address] -= 1
            if not self._taken[known, address]:
                del self._taken[known, address]


class Greeter:
    """Accepts connections at a listener and greets each in a thread of its own, so that none waits for another.

    `greet` gets a connection and its peer's address, and closes the connection, or returns a function that takes it
    over: its peer has proved the key. Connections for which there is no place are closed.
    """

    def __init__(self, listener: socket.socket, greet: Greet, name: str, *, per_address: int = PER_ADDRESS) -> None:
        self._listener, self._greet = listener, greet
        self._places = Places(per_address)
        self._lock = threading.Lock()  # guards the next
        self._greeting: dict[socket.socket, threading.Thread] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Listen no longer, and end the connections that are being greeted."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            greeting = dict(self._greeting)
            for connection in greeting:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in greeting.values():
            thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError:  # closed, or one that has gone before it was accepted
                self._closed.wait(AGAIN_S)
                continue
            give_back = self._places.take(peer[0])
            if give_back is None:
                connection.close()
                continue
            thread = threading.Thread(target=self._greet_peer, args=(connection, peer[0], give_back), daemon=True)
            with self._lock:
                self._greeting[connection] = thread
            thread.start()

    def _greet_peer(self, connection: socket.socket, peer: str, give_back: Callable[[], None]) -> None:
        take_over: Callable[[], object] | None = None
        try:
            take_over = self._greet(connection, peer)
        finally:
            if take_over:
                self._places.remember(peer)
            give_back()
            with self._lock:  # `close` ends the connection, or it is taken over
                del self._greeting[connection]
                if take_over:
                    take_over()
