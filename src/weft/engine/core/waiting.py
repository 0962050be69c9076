"""Owner: a client of the engine and its requests. OrderedQueue: the waiting requests of an owner."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.engine.core.sequence import Sequence


class OrderedQueue:
    """Waiting requests, the lowest order first."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        """Add a request."""
        heappush(self._heap, (sequence.order, sequence))

    def first(self) -> Sequence | None:
        """The request that is to be admitted next.

        None if there is none, or if a step in flight has tokens for it: it was preempted in the middle of that step.
        """
        return self._heap[0][1] if self._heap and not self._heap[0][1].outstanding else None

    def pop(self) -> None:
        """Remove the request that `first` returned."""
        heappop(self._heap)

    def discard_done(self) -> None:
        """Remove all requests that have ended."""
        self._heap = [entry for entry in self._heap if not entry[1].done]
        heapify(self._heap)


class Owner:
    """A client of the engine: its weight, the tokens computed for it, and its requests.

    Under policies other than "fair" all requests have one owner. The scheduler keeps `queue`, and counts `unfinished`
    and `running` requests. The policy "fair" keeps the others: `served`, its virtual counter, is the number of computed
    tokens divided by `weight`; `streak` is the number since it last had no requests. `credit` is the number of tokens
    that steps may lose for it, as of the time when each owner had `earned` that number in total.
    """

    __slots__ = ("credit", "earned", "queue", "running", "served", "streak", "unfinished", "weight")

    def __init__(self) -> None:
        self.queue = OrderedQueue()
        self.unfinished = 0
        self.running = 0
        self.weight = 1.0
        self.served = 0.0
        self.streak = 0
        self.credit = inf
        self.earned = 0.0

    @property
    def rank(self) -> tuple[float, int]:
        """Place among the owners: by tokens served, then by the number of requests; the fewest first."""
        return self.served, self.unfinished
