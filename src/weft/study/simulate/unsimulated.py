"""UnsimulatedReplicas: replicas that the routing policy counts with, but that are not simulated."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from random import Random

SPREAD = 0.25  # copied ends are delayed by up to this share of the request's duration


class UnsimulatedReplicas:
    """Replicas of which only the number of requests is known.

    They are equal to the simulated replicas. For each end of requests in a simulated replica, requests end here as
    well, at times that are spread a little. They end in as many replicas as there are for one simulated replica, each
    with the same number of requests. The policy thus sees the same numbers everywhere, and a simulated replica gets its
    next request as soon after an end as it would among all replicas. In a large deployment that is at once.
    """

    def __init__(self, connections: list[int], simulated: int, *, most: int) -> None:
        """`connections`: number of requests of every replica, with the `simulated` ones first; updated in place.

        A replica takes at most `most` requests.
        """
        self._connections, self._first, self._most = connections, simulated, most
        self._per_simulated = len(connections) / simulated - 1
        self._random = Random("weft rest")
        self._ends: list[tuple[float, int, int]] = []  # (time, requests before the end, requests that end)
        self.next_s = inf

    def add_request(self, index: int) -> bool:
        """Give a request to replica `index`. Return False if it is refused."""
        if self._connections[index] >= self._most:
            return False
        self._connections[index] += 1
        return True

    def copy_ends(self, now: float, requests: int, ended: int, lasted_s: float) -> None:
        """Copy an event of a simulated replica: `ended` of its `requests` requests ended, one after `lasted_s`."""
        whole = int(self._per_simulated)
        for _ in range(whole + (self._random.random() < self._per_simulated - whole)):
            heappush(self._ends, (now + self._random.uniform(0, SPREAD * lasted_s), requests, ended))
        self._update_next()

    def end_requests(self) -> int:
        """Process the ends that are due at `next_s`. Return the number of requests that end."""
        _, requests, ended = heappop(self._ends)
        self._update_next()
        index = self._similar_replica(requests)
        ended = min(ended, self._connections[index])
        self._connections[index] -= ended
        return ended

    def _similar_replica(self, requests: int) -> int:
        """Index of a random replica with this number of requests, or else with the nearest number."""
        start = self._random.randrange(self._first, len(self._connections))
        for low, high in ((start, len(self._connections)), (self._first, start)):
            try:
                return self._connections.index(requests, low, high)
            except ValueError:
                continue
        return min(range(self._first, len(self._connections)), key=lambda at: abs(self._connections[at] - requests))

    def _update_next(self) -> None:
        self.next_s = self._ends[0][0] if self._ends else inf
