"""Heartbeats between nodes: how often, and for how long a node may be silent."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger("weft")

BEAT_S, LATE_BEAT_S = 0.5, 2.0  # seconds between two heartbeats; the longest time between them that counts in full
# A link that is back within 5 s costs time only: TCP repeats what was lost up to 3.2 s later.
SILENCE_S = 8.0
STACKS_S = 0.5  # seconds for the ranks to print their stacks before they are killed
USER_TIMEOUT_MS = (
    20_000  # milliseconds for data that is not acknowledged: the heartbeats end sooner, with a better cause
)


class Watch:
    """Calls `beat` every BEAT_S seconds, and `silent` once if `heard` has not been called for SILENCE_S seconds."""

    def __init__(self, beat: Callable[[], None], silent: Callable[[], None], name: str) -> None:
        self._beat, self._silent, self._name = beat, silent, name
        self._heard_s = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_closed, name=f"weft-beat-{name}", daemon=True)

    def start(self) -> None:
        self._heard_s = time.monotonic()
        self._thread.start()

    def heard(self) -> None:
        """Note that the other side is there."""
        self._heard_s = time.monotonic()

    def stop(self) -> None:
        """End the thread. May be called twice, and before `start`."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _beat_until_closed(self) -> None:
        looked_s = time.monotonic()
        while not self._stopped.wait(BEAT_S):
            now = time.monotonic()
            # This process itself was stopped: messages that came in that time are not read yet.
            paused_s = max(0.0, now - looked_s - LATE_BEAT_S)
            self._heard_s = min(now, self._heard_s + paused_s)
            if now - self._heard_s > SILENCE_S:
                self._silent()
                return
            try:
                self._beat()
            except Exception:  # without the thread, the other side would count this one as silent
                log.exception("a heartbeat to the %s failed", self._name)
            looked_s = now


def keep_alive(connection: socket.socket) -> None:
    """Have the system notice a machine that is gone, even while nothing is sent; send small messages at once.

    Without effect on a plain socket in place of a connection with TLS, which has this done itself.
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(AttributeError, OSError):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 15)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
