"""Study: one deployment, simulated under several loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf
from statistics import fmean

import msgspec

from weft.errors import ConfigError
from weft.fleet.upstreams.policy import POLICIES
from weft.study.simulate.load import RETRY_S, SimulatedLoad
from weft.study.simulate.objective import LatencyObjective, format_duration
from weft.study.simulate.replica import ReplicaSpec
from weft.study.simulate.report import Report, create_report, request_waits
from weft.study.simulate.simulation import simulate
from weft.study.simulate.tally import Tally

REQUESTS = 200_000  # requests of all runs of a study together; with more, only a sample of equal replicas is simulated
MIN_SAMPLE = 16  # replicas that are simulated
# Limits of one run, which then takes minutes: each request is an event, and the policy looks at every replica.
MAX_REQUESTS, MAX_REPLICAS = 10_000_000, 10_000
MARGIN = 1.2  # more requests than rate times time may arrive, by at most this factor


class MeasurementWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the virtual clock: requests arrive for `duration_s`, and the first `warmup_s` are not measured.

    An infinite `duration_s` covers a whole trace.
    """

    duration_s: float
    warmup_s: float


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all runs share.

    `specs`: the plan's replicas, each of `gpus_each` devices of the kind `device`. The attention groups of one engine
    are one replica.
    `capacity`: predicted requests per second of one saturated replica. `price`: dollars per GPU and hour.
    `sample`: number of equal replicas to simulate; None for as many as REQUESTS over `runs` allow.
    `prefix_caching`: None enables it if prompts share prefixes.
    `stretches`: simulate runs of steps with an unchanged batch at once.
    """

    specs: Sequence[ReplicaSpec]
    gpus_each: int
    device: str = "GPU"
    capacity: float
    times: MeasurementWindow
    policy: str
    price: float | None = None
    objective: LatencyObjective | None = None
    sample: int | None = None
    runs: int = 1
    prefix_caching: bool | None = None
    stretches: bool = True

    def run_load(
        self,
        load: SimulatedLoad,
        replicas: int | None = None,
        *,
        judging: bool = False,
        on_time: Callable[[float], object] = lambda now: None,
    ) -> Report:
        """Simulate a load on `replicas` replicas, or on the plan's number of them.

        `judging`: the caller only needs to know if the objective is met, so the run may end early once it cannot be.
        `on_time` gets the virtual time from time to time.
        """
        self.check_run_length(load, replicas)
        count = replicas or len(self.specs)
        specs = self._simulated_specs(load, count)
        simulated = len(specs)
        stop = self._early_stop(load, simulated / count) if judging else None
        result = simulate(
            specs,
            load.source(),
            POLICIES[self.policy](),
            warmup_s=self.times.warmup_s,
            end_s=self.times.duration_s,
            prefix_caching=load.shares_prefixes if self.prefix_caching is None else self.prefix_caching,
            unsimulated=count - simulated,
            stretches=self.stretches,
            enough=stop or _never,
            on_time=on_time,
        )
        if result.tally.end_s <= result.tally.begin_s:
            raise ConfigError(
                f"nothing is measured: all requests come in the {self.times.warmup_s:g} s of warm-up; "
                "shorten --warmup, or lengthen the load",
                code="only-warmup",
            )
        return create_report(
            result,
            replicas=count,
            blocks=sum(spec.all_blocks for spec in specs) / simulated,
            gpus=count * self.gpus_each,
            price=self.price,
            rate=load.offered,
            users=load.users,
            objective=self.objective,
        )

    def check_run_length(self, load: SimulatedLoad, replicas: int | None = None) -> None:
        """Raise ConfigError for a run with too many replicas or requests to simulate."""
        count = replicas or len(self.specs)
        if count > MAX_REPLICAS:
            raise ConfigError(
                f"{count:,} replicas; at most {MAX_REPLICAS:,} are simulated: give a smaller --replicas or --rate, "
                "since equal ones carry equal shares",
                code="too-many-replicas",
            )
        if load.trace:  # a trace is finite
            return
        most, last_s = count * self.capacity, self.times.duration_s
        if load.users:
            # Refused users ask again and again.
            places = count * fmean(spec.most for spec in self.specs)
            rate, source = most + max(0.0, load.users - places) / RETRY_S, f"{load.users:,} users"
        else:
            assert load.rate is not None
            rate, source = load.rate, f"{load.rate:g} requests/s"
        if rate * last_s > MAX_REQUESTS:
            raise ConfigError(
                f"{source} make about {rate * last_s:,.3g} requests in {format_duration(last_s)}, of which this "
                f"deployment can answer {most * last_s:,.3g}; at most {MAX_REQUESTS:,} are simulated: give fewer, or "
                "a shorter --duration",
                code="too-many-requests",
            )

    def _simulated_specs(self, load: SimulatedLoad, count: int) -> list[ReplicaSpec]:
        """Specs of the replicas to simulate: all `count` of them, or a sample if all are equal."""
        specs = [self.specs[number % len(self.specs)] for number in range(count)]
        all_equal = len({id(spec) for spec in specs}) == 1
        return specs[: self._sample_size(load, count)] if all_equal else specs

    def _sample_size(self, load: SimulatedLoad, count: int) -> int:
        """Number of `count` equal replicas to simulate."""
        if self.sample is not None:
            return min(count, self.sample)
        if load.trace:
            requests: float = len(load.trace)
        else:
            requests = min(count * self.capacity, load.offered or inf) * self.times.duration_s
        share = REQUESTS / self.runs / requests if requests else 1.0
        return count if share >= 1 else min(count, max(MIN_SAMPLE, ceil(count * share)))

    def _early_stop(self, load: SimulatedLoad, share: float) -> EarlyStop | None:
        """Condition to end a run early, if `share` of the replicas are simulated; None without one."""
        if self.objective is None or not load.offered:
            return None
        window_s = self.times.duration_s - self.times.warmup_s
        return EarlyStop(self.objective, load.offered * share * window_s)


class EarlyStop:
    """Condition to end a run: more requests missed a percentile's limit than it allows, so it cannot be met any more.

    `requests`: expected number of requests of the whole run.
    """

    def __init__(self, objective: LatencyObjective, requests: float) -> None:
        self._allowed_misses = [
            (target, MARGIN * requests * (1 - target.percent / 100))
            for target in objective.targets
            if target.percent is not None and target.metric != "itl"
        ]

    def __call__(self, tally: Tally) -> bool:
        """Return True if the run may end."""
        for target, allowed in self._allowed_misses:
            misses = sum(wait > target.limit_s for _, wait in request_waits(tally, target.metric))
            if misses > allowed:
                return True
        return False


def _never(tally: Tally) -> bool:
    return False
