"""Rest: the replicas of a deployment that are not simulated, but which the policy counts with."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from random import Random

SPREAD = 0.25  # of the time that a request took: so much later, at most, its like ends in others


class UnsimulatedReplicas:
    """Replicas of which only the number of requests is known.

    They are equal to those that are simulated: for each end there, as many come here as there are replicas here for one
    there, in replicas that had as many requests, and at times that are spread a little. So a policy finds the same
    numbers everywhere, and a simulated replica gets requests as soon after an end as it would among all of them, which
    in a large deployment is at once.
    """

    def __init__(self, connections: list[int], simulated: int, *, most: int) -> None:
        """`connections` is every replica's number of requests, `simulated` of them first; none of the others takes more
        than `most`."""
        self._connections, self._first, self._most = connections, simulated, most
        self._each = len(connections) / simulated - 1
        self._random = Random("weft rest")
        self._ends: list[tuple[float, int, int]] = []  # when, of how many requests, how many end
        self.next_s = inf

    def give(self, index: int) -> bool:
        """A request goes to one of them. False where it is refused."""
        if self._connections[index] >= self._most:
            return False
        self._connections[index] += 1
        return True

    def copy(self, now: float, requests: int, ended: int, lasted_s: float) -> None:
        """In a simulated replica with so many requests some ended, one of which had lasted so long."""
        whole = int(self._each)
        for _ in range(whole + (self._random.random() < self._each - whole)):
            heappush(self._ends, (now + self._random.uniform(0, SPREAD * lasted_s), requests, ended))
        self._turn()

    def end(self) -> int:
        """What is due at `next_s`. Returns how many requests end."""
        _, requests, ended = heappop(self._ends)
        self._turn()
        index = self._like(requests)
        ended = min(ended, self._connections[index])
        self._connections[index] -= ended
        return ended

    def _like(self, requests: int) -> int:
        """A replica with so many requests, or with the most next to that."""
        start = self._random.randrange(self._first, len(self._connections))
        for low, high in ((start, len(self._connections)), (self._first, start)):
            try:
                return self._connections.index(requests, low, high)
            except ValueError:
                continue
        return min(range(self._first, len(self._connections)), key=lambda at: abs(self._connections[at] - requests))

    def _turn(self) -> None:
        self.next_s = self._ends[0][0] if self._ends else inf
