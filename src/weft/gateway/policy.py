"""Routing policies: choose the replica for the next request.

Policies are deterministic: no sockets and no clock. Equal sequences of calls give equal choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Policy(Protocol):
    """Distributes requests over replicas."""

    def choose_replica(self, connections: Sequence[int]) -> int:
        """Index of the replica for the next request.

        `connections`: for each replica, of which there is at least one, its number of unfinished requests.
        """
        ...


class LeastConnections:
    """The replica with the fewest unfinished requests; replicas with equal numbers take turns."""

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
    """All replicas in turn, regardless of their load."""

    def __init__(self) -> None:
        self._next = 0

    def choose_replica(self, connections: Sequence[int]) -> int:
        chosen = self._next % len(connections)
        self._next = chosen + 1
        return chosen


POLICIES: dict[str, Callable[[], Policy]] = {"least-connections": LeastConnections, "round-robin": RoundRobin}
