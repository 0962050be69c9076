"""Arrival times of requests in an open loop, which do not depend on the server."""

from __future__ import annotations

from math import inf
from random import Random


def arrival_times(seed: object, *, count: int, rate: float, burstiness: float = 1.0) -> list[float]:
    """Arrival times of `count` requests in seconds from the start, on average `rate` per second; all 0 if it is
    infinite.

    The gaps are drawn from a gamma distribution of the shape `burstiness`: 1 gives a Poisson process, less gives
    bursts, more gives even gaps.
    """
    if rate == inf:
        return [0.0] * count
    random = Random(f"weft arrivals {seed}")
    now, times = 0.0, []
    for _ in range(count):
        now += random.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now)
    return times
