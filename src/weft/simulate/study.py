"""Study: one deployment, simulated under one load after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf
from statistics import fmean

import msgspec

from weft.errors import ConfigError
from weft.gateway.policy import POLICIES
from weft.simulate.load import RETRY_S, SimulatedLoad
from weft.simulate.objective import Objective, format_duration
from weft.simulate.replica import ReplicaSpec
from weft.simulate.report import Report, create_report, waits
from weft.simulate.simulation import simulate
from weft.simulate.tally import Tally

REQUESTS = 200_000  # of all runs of a study together; where more would come, equal replicas are sampled,
LEAST_SAMPLE = 16  # but no fewer than these
# Of one run, which takes minutes then: each request is somebody's turn, and the policy looks at every replica.
MOST_REQUESTS, MOST_REPLICAS = 10_000_000, 10_000
MARGIN = 1.2  # by which more requests may come than the rate says


class MeasurementWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the virtual clock: how long requests come that count, the first `warmup_s` of them not. An infinite
    `duration_s` is all of a trace."""

    duration_s: float
    warmup_s: float


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """What stays the same from run to run. `specs` are the plan's replicas, each of `gpus_each` GPUs or whatever the
    `device` is; `capacity` is the most requests per second that one is predicted to answer; `price` dollars for a GPU
    and hour. `sample` replicas are simulated of those that are equal, None for as many as REQUESTS over `runs` allow.
    `prefix_caching` None is where prompts share something.
    """

    specs: Sequence[ReplicaSpec]
    gpus_each: int
    device: str = "GPU"
    capacity: float
    times: MeasurementWindow
    policy: str
    price: float | None = None
    objective: Objective | None = None
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
        """The deployment with so many replicas, or the plan's number, under a load. `judging`: it is only to be said
        whether the objective is met, and the run ends early where it cannot be. `on_time` is told the virtual time now
        and then."""
        self.check_run_length(load, replicas)
        count = replicas or len(self.specs)
        specs = [self.specs[number % len(self.specs)] for number in range(count)]
        chosen = specs[: self._sampled(load, count)] if len(set(map(id, specs))) == 1 else specs
        early_stop = None
        if judging and self.objective and load.offered:
            window = self.times.duration_s - self.times.warmup_s
            early_stop = EarlyStop(self.objective, load.offered * len(chosen) / count * window)
        run = simulate(
            chosen,
            load.source(),
            POLICIES[self.policy](),
            warmup_s=self.times.warmup_s,
            end_s=self.times.duration_s,
            prefix_caching=load.shares_prefixes if self.prefix_caching is None else self.prefix_caching,
            unsimulated=count - len(chosen),
            stretches=self.stretches,
            enough=early_stop or (lambda tally: False),
            on_time=on_time,
        )
        if run.tally.end_s <= run.tally.begin_s:
            raise ConfigError(
                f"nothing is measured: all requests come in the {self.times.warmup_s:g} s of warm-up; "
                "shorten --warmup, or lengthen the load"
            )
        return create_report(
            run,
            replicas=count,
            blocks=sum(spec.num_blocks for spec in chosen) / len(chosen),
            gpus=count * self.gpus_each,
            price=self.price,
            rate=load.offered,
            users=load.users,
            objective=self.objective,
        )

    def check_run_length(self, load: SimulatedLoad, replicas: int | None = None) -> None:
        """Raises ConfigError for a run that would have no end in sight."""
        count = replicas or len(self.specs)
        if count > MOST_REPLICAS:
            raise ConfigError(
                f"{count:,} replicas; at most {MOST_REPLICAS:,} are simulated: give a smaller --replicas or --rate, "
                "since equal ones carry equal shares"
            )
        if load.trace:  # which has an end
            return
        most, last_s = count * self.capacity, self.times.duration_s
        if load.users:
            # Whom the queues have no place for asks again and again.
            each = fmean(it.max_num_seqs + it.max_num_queued for it in self.specs)
            rate, what = most + max(0.0, load.users - count * each) / RETRY_S, f"{load.users:,} users"
        else:
            assert load.rate is not None
            rate, what = load.rate, f"{load.rate:g} requests/s"
        if rate * last_s > MOST_REQUESTS:
            raise ConfigError(
                f"{what} make about {rate * last_s:,.3g} requests in {format_duration(last_s)}, of which this deployment can "
                f"answer {most * last_s:,.3g}; at most {MOST_REQUESTS:,} are simulated: give fewer, or a shorter "
                "--duration"
            )

    def _sampled(self, load: SimulatedLoad, count: int) -> int:
        """How many of so many equal replicas are simulated."""
        if self.sample is not None:
            return min(count, self.sample)
        most = count * self.capacity
        requests = min(most, load.offered or inf) * self.times.duration_s if not load.trace else len(load.trace)
        share = REQUESTS / self.runs / requests if requests else 1.0
        return count if share >= 1 else min(count, max(LEAST_SAMPLE, ceil(count * share)))


class EarlyStop:
    """Whether so many requests have missed a percentile's limit that, of as many as will come, it cannot be met."""

    def __init__(self, objective: Objective, requests: float) -> None:
        targets = [it for it in objective.targets if it.percent is not None and it.metric != "itl"]
        self._most = [(it, MARGIN * requests * (1 - (it.percent or 0.0) / 100)) for it in targets]

    def __call__(self, tally: Tally) -> bool:
        return any(
            sum(wait > target.limit_s for _, wait in waits(tally, target.metric)) > most for target, most in self._most
        )
