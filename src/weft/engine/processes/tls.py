"""TLS between nodes: both sides have a certificate of the cluster's own authority (`weft cluster cert`).

An `SSLObject` must not be read and written by two threads at once, and cannot be handed to another process. So a thread
owns it, and everybody else has one end of a pair of plain sockets, which behaves like the connection itself.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import selectors
import socket
import ssl
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.engine.processes.beats import keep_alive
from weft.engine.processes.keys import WANTS_NO_TLS, CertificateError, read_private
from weft.engine.processes.open_sockets import open_sockets
from weft.errors import ConfigError, error_reason

MAKE = "weft cluster cert makes new ones"
PIECE_BYTES = 1 << 16
MAX_HELD_BYTES = 1 << 20  # bytes held for a side that does not take them
FLUSH_S = 2.0  # seconds for the last bytes after the end
BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)
# Codes of OpenSSL's verification, and names of the alerts by which the other side refuses.
FAULTS = {9: "is not valid yet: set the clocks", 10: f"has expired: {MAKE}"}
ALERTS = {"CERTIFICATE_EXPIRED": f"has expired: {MAKE}", "UNKNOWN_CA": "is of another authority"}


def load_certificate(file: str | None) -> str:
    """Text of a node's bundle in PEM: its private key, its certificate, and the authority's. "" without a file.

    Raises ConfigError if it cannot be read or used, has expired, or if others may read or own it.
    """
    if file is None:
        return ""
    path = Path(file).expanduser()
    try:
        text, fault = read_private(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the cluster certificate {path}: {error_reason(error)}; {MAKE}",
            code="cannot-read-cluster-certificate",
        ) from None
    if fault:
        raise ConfigError(f"{fault}; it has a private key", code="open-cluster-certificate")
    if fault := bundle_fault(text):
        raise ConfigError(f"the cluster certificate {path} {fault}", code="bad-cluster-certificate")
    return text


def bundle_fault(bundle: str) -> str:
    """Fault of a bundle, found by a handshake with itself in memory; "" if there is none."""
    try:
        sides = [Side(bundle, server=True), Side(bundle, server=False)]
    except (OSError, IndexError, ValueError):
        return f"is no bundle of a key, a certificate and its authority's; {MAKE}"
    for _ in range(4):  # flights of a handshake
        for side, other in (sides, sides[::-1]):
            try:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.tls.do_handshake()
            except ssl.SSLError as error:
                return _fault(error)
            other.incoming.write(side.outgoing.read())
    return ""


def _fault(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return FAULTS.get(error.verify_code, "is of another authority")
    return next((fault for name, fault in ALERTS.items() if name in str(error.reason)), f"is refused: {error.reason}")


class Side:
    """One side of a TLS connection, in memory."""

    def __init__(self, bundle: str, *, server: bool) -> None:
        """Raises OSError, ValueError and IndexError for a bundle that cannot be used."""
        own, *_, authority = BLOCK.findall(bundle)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Nodes are known by the authority, not by their addresses, which change.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # no connection is resumed
        context.load_verify_locations(cadata=authority)
        with _as_file(bundle) as name:
            context.load_cert_chain(name)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=server)
        self._own = ssl.PEM_cert_to_DER_cert(own)
        self._server = server

    @property
    def binding(self) -> bytes:
        """Digest of both certificates, the acceptor's first: equal on both sides unless somebody stands between."""
        theirs = self.tls.getpeercert(binary_form=True) or b""
        pair = (self._own, theirs) if self._server else (theirs, self._own)
        return hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in pair)).digest()


@contextlib.contextmanager
def _as_file(text: str) -> Iterator[str]:
    """A name of a file with this text that no other user can read: OpenSSL takes certificates by name only."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("weft-certificate")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            yield f"/proc/self/fd/{descriptor}"
        return
    with tempfile.NamedTemporaryFile("w") as file:  # mode 0600
        file.write(text)
        file.flush()
        yield file.name


def start_tls(connection: socket.socket, bundle: str, *, server: bool, within_s: float) -> Pump:
    """Do the handshake; return the running pump, to which the connection belongs.

    The connection stays the caller's to close if this raises: CertificateError, OSError.
    """
    side = Side(bundle, server=server)
    deadline = time.monotonic() + within_s
    try:
        _step(connection, side, side.tls.do_handshake, deadline)
        # In TLS 1.3 the acceptor judges the connector's certificate last: this says that it has.
        if server:
            side.tls.write(b"\1")
            connection.sendall(side.outgoing.read())
        else:
            _step(connection, side, lambda: side.tls.read(1), deadline)
    except ssl.SSLError as error:
        with contextlib.suppress(OSError):
            connection.sendall(side.outgoing.read())  # the alert, which tells the other side
        theirs = isinstance(error, ssl.SSLCertVerificationError)
        raise CertificateError(f"{'its' if theirs else 'our'} certificate {_fault(error)}") from None
    pump = Pump(connection, side)
    pump.start()
    return pump


def _step(connection: socket.socket, side: Side, step: Callable[[], object], deadline: float) -> None:
    """Do a step of the handshake, with as many bytes to and from the other side as it takes."""
    first = True
    while True:
        try:
            if step() == b"":
                raise ConnectionError("it closed the connection")
            break
        except ssl.SSLWantReadError:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.sendall(side.outgoing.read())
            if time.monotonic() > deadline:
                raise TimeoutError("the handshake takes too long") from None
            data = connection.recv(PIECE_BYTES)
            if not data:
                raise ConnectionError("it closed the connection") from None
            if first and data.startswith(WANTS_NO_TLS):
                raise CertificateError("it has no certificate: give all nodes --cluster-cert-file") from None
            first = False
            side.incoming.write(data)
    connection.sendall(side.outgoing.read())


class Pump:
    """Carries bytes between a TLS connection and a plain socket until one of them ends, in a thread of its own.

    `outer` is the socket to use in place of the connection. `binding` names both certificates.
    """

    def __init__(self, connection: socket.socket, side: Side) -> None:
        keep_alive(connection)
        self._plain, self.outer = socket.socketpair()
        self.binding = side.binding
        self._connection, self._side = connection, side
        open_sockets.update((connection, self._plain))
        for end in (connection, self._plain):
            end.setblocking(False)
        self._to_network, self._to_plain = bytearray(), bytearray()
        self._ended = False  # one of the two has
        self._deadline = float("inf")  # of the last bytes to the network
        self.thread = threading.Thread(target=self._pump, name="weft-tls", daemon=True)

    def start(self) -> None:
        pumps.add(self)
        self.thread.start()

    def finish(self) -> None:
        """End both sides, after the last bytes."""
        self.outer.close()
        self.thread.join(FLUSH_S)

    def _pump(self) -> None:
        try:
            with selectors.DefaultSelector() as selector, contextlib.suppress(OSError, ValueError, KeyError):
                self._take_decrypted()  # what came with the end of the handshake
                self._carry(selector)
        finally:
            self._connection.close()
            self._plain.close()

    def _carry(self, selector: selectors.BaseSelector) -> None:
        for end in (self._connection, self._plain):
            selector.register(end, selectors.EVENT_READ)
        while not self._is_done():
            self._choose_events(selector, self._connection, self._to_plain, self._to_network)
            self._choose_events(selector, self._plain, self._to_network, self._to_plain)
            for key, events in selector.select(FLUSH_S if self._ended else None):
                self._handle(key.fileobj is self._plain, events)

    def _choose_events(
        self, selector: selectors.BaseSelector, end: socket.socket, full: bytearray, waiting: bytearray
    ) -> None:
        """Read from an end while there is room for what comes from it; write to it if something waits."""
        events = selectors.EVENT_READ if len(full) < MAX_HELD_BYTES and not self._ended else 0
        events |= selectors.EVENT_WRITE if waiting else 0
        if end in selector.get_map():
            if events:
                selector.modify(end, events)
            else:
                selector.unregister(end)
        elif events:
            selector.register(end, events)

    def _is_done(self) -> bool:
        nothing_waits = not self._to_network and not self._to_plain
        return self._ended and (nothing_waits or time.monotonic() > self._deadline)

    def _handle(self, plain: bool, events: int) -> None:
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
            if events & selectors.EVENT_READ:
                if plain:
                    self._read_plain()
                else:
                    self._read_network()
        if events & selectors.EVENT_WRITE:
            end, waiting = (self._plain, self._to_plain) if plain else (self._connection, self._to_network)
            with contextlib.suppress(BlockingIOError):
                del waiting[: end.send(waiting)]

    def _read_plain(self) -> None:
        data = self._plain.recv(PIECE_BYTES)
        if data:
            self._side.tls.write(data)
        else:
            self._ended, self._deadline = True, time.monotonic() + FLUSH_S
            self._to_plain.clear()
            with contextlib.suppress(ssl.SSLError):
                self._side.tls.unwrap()
        self._to_network += self._side.outgoing.read()

    def _read_network(self) -> None:
        data = self._connection.recv(PIECE_BYTES)
        if not data:
            self._ended = True
            self._to_network.clear()
            return
        self._side.incoming.write(data)
        self._take_decrypted()
        self._to_network += self._side.outgoing.read()

    def _take_decrypted(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            while data := self._side.tls.read(PIECE_BYTES):
                self._to_plain += data
            self._ended = True  # the other side has said its last


pumps: weakref.WeakSet[Pump] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """Let the last messages out before this process ends."""
    deadline = time.monotonic() + FLUSH_S / 2
    for pump in list(pumps):
        pump.thread.join(max(0.0, deadline - time.monotonic()))
