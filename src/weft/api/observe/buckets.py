"""BucketCounts: a histogram that only the event loop counts in, so that a value costs no lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class BucketCounts:
    """Counts of values by bucket. `bounds` are the ascending upper bounds; another bucket has no bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> list[int]:
        """Number of values up to each bound, and last the number of all values."""
        return list(accumulate(self._counts))

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """The upper bounds and cumulative counts, as Prometheus gets them."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, self.cumulative, strict=True)]
