"""Measurement of the network between two nodes: one listens, the other connects, with the cluster key."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from weft.cluster.messages import Speed
from weft.errors import ConfigError, error_reason
from weft.executors.keys import NotWeftError, WrongKeyError, check_connector, prove_to_acceptor

CONNECT_S = 5.0
PINGS = 20
BLOCK = bytes(1 << 18)
LEAST_BLOCKS = 4  # of BLOCK's size
MEASURE_S = 0.25  # seconds in which blocks are sent, unless LEAST_BLOCKS take longer
LIMIT_S = 15.0  # seconds for a whole measurement


class PeerListener:
    """Answers the measurements of other nodes, at a free port of `address`, until it is closed."""

    def __init__(self, address: str, key: bytes) -> None:
        """Raises ConfigError if the address cannot be bound."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, 0), family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {address}: {error_reason(error)}; check VLLM_HOST_IP", code="cannot-listen"
            ) from None
        self.port: int = self._listener.getsockname()[1]
        self._key = key
        self._thread = threading.Thread(target=self._serve, name="weft-measured", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError, NotWeftError, WrongKeyError):
                    check_connector(connection, self._key)
                    answer_measurement(connection)


def answer_measurement(connection: socket.socket) -> None:
    """Send PINGS bytes back one by one, then read blocks until the other side ends, and confirm that."""
    connection.settimeout(LIMIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(PINGS):
        connection.sendall(connection.recv(1))
    while connection.recv(1 << 16):
        pass
    connection.sendall(b"\1")


def measure_network(first: int, second: int, address: str, port: int, key: bytes) -> Speed:
    """Measure the network from node `first` to node `second`, which listens at the address."""
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection:
            prove_to_acceptor(connection, key)
            round_trip_s, bytes_per_s = _measure(connection)
    except (OSError, NotWeftError) as error:
        return Speed(first=first, second=second, problem=f"{address}:{port}: {error_reason(error)}")
    except WrongKeyError:
        return Speed(first=first, second=second, problem=f"{address}:{port}: it has another cluster key")
    return Speed(first=first, second=second, round_trip_s=round_trip_s, bytes_per_s=bytes_per_s)


def _measure(connection: socket.socket) -> tuple[float, float]:
    """Shortest round trip of one byte in seconds, and bytes per second."""
    connection.settimeout(LIMIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    round_trips = []
    for _ in range(PINGS):
        began = time.perf_counter()
        connection.sendall(b"\0")
        if not connection.recv(1):
            raise OSError("the connection was closed")
        round_trips.append(time.perf_counter() - began)
    began, blocks = time.perf_counter(), 0
    while blocks < LEAST_BLOCKS or time.perf_counter() - began < MEASURE_S:
        connection.sendall(BLOCK)
        blocks += 1
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    return min(round_trips), blocks * len(BLOCK) / (time.perf_counter() - began)
