"""Policies: which replica gets the next request. Pure: no sockets, no clock; equal calls give equal choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Policy(Protocol):
    """How requests are dealt out to replicas."""

    def choose_replica(self, connections: Sequence[int]) -> int:
        """The number of the replica for the next request. `connections` counts for each replica, of which there is at
        least one, the requests that it has been given and has not ended yet."""
        ...


class LeastConnections:
    """The replica with the fewest requests; equal ones take turns."""

    def __init__(self) -> None:
        self._next = 0

    def choose_replica(self, connections: Sequence[int]) -> int:
        fewest = min(connections)
        try:
            chosen = connections.index(fewest, self._next)
        except ValueError:
            chosen = connections.index(fewest)
        self._next = chosen + 1
        return chosen


class RoundRobin:
    """All replicas in turn, however busy they are."""

    def __init__(self) -> None:
        self._next = 0

    def choose_replica(self, connections: Sequence[int]) -> int:
        chosen = self._next % len(connections)
        self._next = chosen + 1
        return chosen


POLICIES: dict[str, Callable[[], Policy]] = {"least-connections": LeastConnections, "round-robin": RoundRobin}
