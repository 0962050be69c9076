"""Queues of waiting requests: in their order, or by owners who share the engine."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

from weft.engine.core.sequence import Sequence

Entry = tuple[tuple[int, int], Sequence]


class OrderedQueue:
    """Waiting requests, the lowest order first."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []

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

    def pop(self, sequence: Sequence) -> None:
        """Remove the request that `first` returned."""
        heappop(self._heap)

    def discard_done(self) -> None:
        """Remove all requests that have ended."""
        self._heap = [entry for entry in self._heap if not entry[1].done]
        heapify(self._heap)


class Owner:
    """A client of the engine: its weight, the tokens computed for it, and its requests.

    `served`, its virtual counter, is the number of computed tokens divided by `weight`; `streak` is the number since it
    last had no requests. `unfinished` and `running` count requests. `credit` is the number of tokens that steps may
    lose for it, as of the time when each owner had `earned` that number in total.
    """

    __slots__ = ("credit", "earned", "queue", "running", "served", "streak", "unfinished", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.served = 0.0
        self.streak = 0
        self.unfinished = 0
        self.running = 0
        self.credit = inf
        self.earned = 0.0
        self.queue = OrderedQueue()

    @property
    def rank(self) -> tuple[float, int]:
        """Place among the owners: by tokens served, then by the number of requests; the fewest first."""
        return self.served, self.unfinished


class FairQueue(OrderedQueue):
    """Waiting requests of several owners, each of whom has a queue of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[int, Owner] = {}

    def __len__(self) -> int:
        return sum(len(owner.queue) for owner in self.owners.values())

    def push(self, sequence: Sequence) -> None:
        """Add a request to its owner's queue."""
        self.owners[sequence.request.owner].queue.push(sequence)

    def first(self) -> Sequence | None:
        """The first request of the least served owner that has a request to admit."""
        for owner in sorted((owner for owner in self.owners.values() if len(owner.queue)), key=lambda one: one.rank):
            if sequence := owner.queue.first():
                return sequence
        return None

    def pop(self, sequence: Sequence) -> None:
        """Remove a request that is the first of its owner's queue."""
        self.owners[sequence.request.owner].queue.pop(sequence)

    def discard_done(self) -> None:
        """Remove all requests that have ended."""
        for owner in self.owners.values():
            owner.queue.discard_done()
