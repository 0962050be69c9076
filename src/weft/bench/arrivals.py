"""When requests arrive at a server that nobody asks whether it is ready for them."""

from __future__ import annotations

from math import inf
from random import Random


def arrival_times(seed: object, *, count: int, rate: float, burstiness: float = 1.0) -> list[float]:
    """Seconds from the start at which `count` requests arrive, `rate` in a second on average; all at 0 where that is
    infinite.

    The gaps between them are drawn from a gamma distribution of the shape `burstiness`: 1 makes a Poisson process,
    less comes in bursts, more comes evenly.
    """
    if rate == inf:
        return [0.0] * count
    random = Random(f"weft arrivals {seed}")
    now, times = 0.0, []
    for _ in range(count):
        now += random.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now)
    return times
