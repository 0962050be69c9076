"""Economics: what own GPUs cost per token, when they beat an API, and how much of a load to own.

Source of the formulas: dollars per hour over what is answered in an hour; the rest is arithmetic of means.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil
from statistics import fmean

import msgspec

HOUR = 3600.0


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that are rented by the hour: `replicas` equal ones, and what all of them answer at full load."""

    dollars_per_hour: float
    requests_per_s: float
    tokens_per_s: float  # of answers
    replicas: int

    @property
    def per_replica(self) -> Fleet:
        """One of the replicas."""
        return Fleet(
            dollars_per_hour=self.dollars_per_hour / self.replicas,
            requests_per_s=self.requests_per_s / self.replicas,
            tokens_per_s=self.tokens_per_s / self.replicas,
            replicas=1,
        )

    def dollars_per_million(self, utilization: float) -> float:
        """Of answer tokens, prompts included, where this share of the full load is there on average."""
        return self.dollars_per_hour * 1e6 / (HOUR * self.tokens_per_s * utilization)

    def break_even(self, request_dollars: float) -> float:
        """The share of the full load from which on the fleet is cheaper than an API; above 1 it never is."""
        return self.dollars_per_hour / (request_dollars * self.requests_per_s * HOUR)


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """A load, answered by `replicas` of one's own and what is beyond them by an API. `owned` is the share of the
    requests that the replicas answer, `utilization` how full they are on average; dollars are per hour."""

    replicas: int
    owned: float
    utilization: float
    rent_dollars: float
    api_dollars: float

    @property
    def dollars(self) -> float:
        return self.rent_dollars + self.api_dollars


def rent_and_api_mix(
    replica: Fleet, request_dollars: float, demand: Sequence[float], replicas: int, max_load: float
) -> Mix:
    """`demand` are requests per second in equal spans of time; a replica takes `max_load` of its full load, and
    what comes beyond overflows."""
    capacity = replicas * replica.requests_per_s * max_load
    answered = fmean(min(rate, capacity) for rate in demand)
    whole = fmean(demand)
    return Mix(
        replicas=replicas,
        owned=answered / whole,
        utilization=answered / (replicas * replica.requests_per_s) if replicas else 0.0,
        rent_dollars=replicas * replica.dollars_per_hour,
        api_dollars=(whole - answered) * request_dollars * HOUR,
    )


def cheapest_mix(replica: Fleet, request_dollars: float, demand: Sequence[float], max_load: float) -> Mix:
    """The mix with the least dollars. Each further replica is used less than the one before it, so the first that
    does not pay is the end."""

    def worse(count: int) -> bool:
        one, next_one = (rent_and_api_mix(replica, request_dollars, demand, it, max_load) for it in (count, count + 1))
        return next_one.dollars >= one.dollars

    found = bisect_left(range(replicas_for_peak(replica, demand, max_load)), True, key=worse)
    return rent_and_api_mix(replica, request_dollars, demand, found, max_load)


def replicas_for_peak(replica: Fleet, demand: Sequence[float], max_load: float) -> int:
    """Replicas that answer the highest demand without an API."""
    return ceil(max(demand) / (replica.requests_per_s * max_load))
