"""Measurement of the network between two nodes: one listens, the other connects, with the cluster key."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from weft.engine.cluster.messages import Speed
from weft.engine.cluster.settings import NodeSettings
from weft.engine.processes.keys import CertificateError, NotWeftError, WrongKeyError
from weft.engine.processes.secure import Greeter, accept_securely, connect_securely
from weft.errors import ConfigError, error_reason
from weft.machine.hardware.addresses import check_private

CONNECT_S = 5.0
PINGS = 20
BLOCK_BYTES = 1 << 18
MORE, LAST = b"\0", b"\1"  # begin a block: another one follows, or none
MIN_BLOCKS = 4
MEASURE_S = 0.25  # seconds in which blocks are sent, unless MIN_BLOCKS take longer
LIMIT_S = 15.0  # seconds for a whole measurement


class PeerListener:
    """Answers the measurements of other nodes, several at a time, at a free port of `address`, until it is closed."""

    def __init__(self, address: str, key: bytes, certificate: str = "", *, allow_public: bool = False) -> None:
        """Raises ConfigError if the address cannot be bound."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, 0), family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {address}: {error_reason(error)}; check VLLM_HOST_IP", code="cannot-listen"
            ) from None
        self.port: int = listener.getsockname()[1]
        self._key, self._certificate, self._allow_public = key, certificate, allow_public
        self._greeter = Greeter(listener, self._answer, "weft-measured")
        self._greeter.start()

    def close(self) -> None:
        self._greeter.close()

    def _answer(self, connection: socket.socket, peer: str) -> Callable[[], None] | None:
        secured = connection
        with suppress(OSError, NotWeftError, WrongKeyError, CertificateError, ConfigError):
            check_private(peer, self._allow_public)
            secured = accept_securely(connection, self._key, self._certificate)
            answer_measurement(secured)
            return secured.close
        secured.close()
        return None


def listen_for_peers(address: str, settings: NodeSettings) -> PeerListener:
    """A listener with a node's key and certificate. Raises ConfigError."""
    return PeerListener(address, settings.key, settings.certificate, allow_public=settings.allow_public)


def answer_measurement(connection: socket.socket) -> None:
    """Send PINGS bytes back one at a time, then read blocks until the last one, and confirm it."""
    deadline_s = _prepare(connection)
    for _ in range(PINGS):
        connection.sendall(_receive(connection, 1, deadline_s))
    while _receive(connection, BLOCK_BYTES, deadline_s)[:1] == MORE:
        pass
    connection.sendall(LAST)


def measure_network(first: int, second: int, address: str, port: int, key: bytes, certificate: str = "") -> Speed:
    """Measure the network from node `first` to node `second`, which listens at the address.

    With a certificate the bytes are encrypted, so on a fast network encryption is the bottleneck that is measured.
    """
    try:
        connection = socket.create_connection((address, port), CONNECT_S)
        try:
            secured = connect_securely(connection, key, certificate)
        except BaseException:
            connection.close()
            raise
        with secured:
            round_trip_s, bytes_per_s = _measure(secured)
    except (OSError, NotWeftError, CertificateError) as error:
        return Speed(first=first, second=second, problem=f"{address}:{port}: {error_reason(error)}")
    except WrongKeyError:
        return Speed(first=first, second=second, problem=f"{address}:{port}: it has another cluster key")
    return Speed(first=first, second=second, round_trip_s=round_trip_s, bytes_per_s=bytes_per_s)


def _measure(connection: socket.socket) -> tuple[float, float]:
    """Shortest round trip of one byte in seconds, and bytes per second."""
    deadline_s = _prepare(connection)
    round_trips = []
    for _ in range(PINGS):
        began = time.perf_counter()
        connection.sendall(MORE)
        _receive(connection, 1, deadline_s)
        round_trips.append(time.perf_counter() - began)
    began, blocks, rest = time.perf_counter(), 1, bytes(BLOCK_BYTES - 1)
    while blocks < MIN_BLOCKS or time.perf_counter() - began < MEASURE_S:
        _limit(connection, deadline_s)
        connection.sendall(MORE + rest)
        blocks += 1
    connection.sendall(LAST + rest)
    _receive(connection, 1, deadline_s)
    return min(round_trips), blocks * BLOCK_BYTES / (time.perf_counter() - began)


def _prepare(connection: socket.socket) -> float:
    """Prepare a connection; return the monotonic time at which the measurement has to be over."""
    connection.settimeout(LIMIT_S)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return time.monotonic() + LIMIT_S


def _limit(connection: socket.socket, deadline_s: float) -> None:
    """Have the next operation end at the deadline. Raises TimeoutError if that has passed."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(f"the measurement takes longer than {LIMIT_S:g} s")
    connection.settimeout(left_s)


def _receive(connection: socket.socket, size: int, deadline_s: float) -> bytes:
    """Receive `size` bytes; return the first piece of them. Raises OSError if the other side ends before, or is late:
    however little it sends at a time, it has until the deadline for all."""
    first = b""
    while size:
        _limit(connection, deadline_s)
        data = connection.recv(min(size, 1 << 16))
        if not data:
            raise ConnectionError("the connection was closed")
        first, size = first or data, size - len(data)
    return first
