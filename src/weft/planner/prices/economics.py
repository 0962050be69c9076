"""Costs of own GPUs per token, the load at which they beat an API, and the share of a load to serve with them.

Source of the formulas: dollars per hour divided by the tokens answered in an hour; all else is arithmetic of means.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil
from statistics import fmean

import msgspec

HOUR = 3600.0


class RentedReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs rented by the hour: `replicas` equal ones, and the rates that all of them reach together at full load."""

    dollars_per_hour: float
    requests_per_s: float
    tokens_per_s: float  # of answers
    replicas: int

    @property
    def per_replica(self) -> RentedReplicas:
        """A fleet with a single one of the replicas."""
        return RentedReplicas(
            dollars_per_hour=self.dollars_per_hour / self.replicas,
            requests_per_s=self.requests_per_s / self.replicas,
            tokens_per_s=self.tokens_per_s / self.replicas,
            replicas=1,
        )

    def dollars_per_million(self, utilization: float) -> float:
        """Dollars per million answer tokens, prompts included, at a mean load of `utilization` of the full load."""
        return self.dollars_per_hour * 1e6 / (HOUR * self.tokens_per_s * utilization)

    def break_even(self, request_dollars: float) -> float:
        """The share of the full load above which the fleet is cheaper than an API; above 1 it never is."""
        return self.dollars_per_hour / (request_dollars * self.requests_per_s * HOUR)


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """A load that `replicas` own replicas answer, with an API for what exceeds them.

    `owned` is the share of the requests that the replicas answer, `utilization` their mean load as a share of the full
    load. Dollars are per hour.
    """

    replicas: int
    owned: float
    utilization: float
    rent_dollars: float
    api_dollars: float

    @property
    def dollars(self) -> float:
        return self.rent_dollars + self.api_dollars


def rent_and_api_mix(
    replica: RentedReplicas, request_dollars: float, demand: Sequence[float], replicas: int, max_load: float
) -> Mix:
    """The mix with this number of replicas.

    `demand` is in requests per second, one figure per equal span of time. A replica takes at most `max_load` of its
    full load; the API takes the overflow.
    """
    capacity = replicas * replica.requests_per_s * max_load
    answered = fmean(min(rate, capacity) for rate in demand)
    total = fmean(demand)
    return Mix(
        replicas=replicas,
        owned=answered / total,
        utilization=answered / (replicas * replica.requests_per_s) if replicas else 0.0,
        rent_dollars=replicas * replica.dollars_per_hour,
        api_dollars=(total - answered) * request_dollars * HOUR,
    )


def cheapest_mix(replica: RentedReplicas, request_dollars: float, demand: Sequence[float], max_load: float) -> Mix:
    """The mix that costs least.

    Each further replica is used less than the one before. So the first replica that does not pay ends the search.
    """

    def costs(replicas: int) -> float:
        return rent_and_api_mix(replica, request_dollars, demand, replicas, max_load).dollars

    def next_does_not_pay(replicas: int) -> bool:
        return costs(replicas + 1) >= costs(replicas)

    peak = replicas_for_peak(replica, demand, max_load)
    count = bisect_left(range(peak), True, key=next_does_not_pay)
    return rent_and_api_mix(replica, request_dollars, demand, count, max_load)


def replicas_for_peak(replica: RentedReplicas, demand: Sequence[float], max_load: float) -> int:
    """Number of replicas that answer the highest demand without an API."""
    return ceil(max(demand) / (replica.requests_per_s * max_load))
