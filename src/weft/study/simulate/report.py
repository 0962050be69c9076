"""Report: the results of a simulation run."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, sqrt
from statistics import fmean, stdev

import msgspec

from weft.study.simulate.objective import LatencyObjective, LatencyTarget, percentile
from weft.study.simulate.simulation import SimulationResult
from weft.study.simulate.tally import Tally

PARTS = 10  # batches that the window is divided into for confidence intervals
STUDENT = 2.262  # Student's t for 95 % and 9 degrees of freedom


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and percentiles of a latency, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class TimePercentiles(msgspec.Struct, frozen=True):
    """A latency at each whole percentile from 0 to 100, in seconds."""

    percentiles_s: tuple[float, ...]


class TargetVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A latency target with the measured value.

    `plus_minus_s`: half-width of the 95 % confidence interval, None if too little was measured. A refused request
    counts as an infinite wait.
    """

    target: str
    limit_s: float
    value_s: float
    plus_minus_s: float | None
    met: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a run.

    Rates are per second. Rates and counts cover the whole deployment, except the counts `requests` to `too_long`, which
    cover the `sampled` replicas that were simulated. Latencies are the completed requests', and None if there are none;
    `distributions` holds their percentiles by field name.

    `goodput_rate`: requests per second that meet the objective's limits. `kv_utilisation`, `running` (requests at once)
    and `busy` are means over the window and the replicas.
    """

    rate: float | None
    users: int | None
    replicas: int
    sampled: int
    window_s: float
    requests: int
    completed: int
    refused: int
    too_long: int
    request_rate: float
    input_tok_s: float
    output_tok_s: float
    ttft_s: LatencySummary | None
    tpot_s: LatencySummary | None
    itl_s: LatencySummary | None
    e2e_s: LatencySummary | None
    queue_s: LatencySummary | None
    distributions: dict[str, TimePercentiles]
    goodput_rate: float | None
    goodput_share: float | None
    met: bool | None
    objective: tuple[TargetVerdict, ...]
    preemptions: int
    prefix_hit_share: float | None
    kv_utilisation: float
    running: float
    busy: float
    gpus: int
    gpu_hours: float
    dollars_per_hour: float | None
    dollars_per_million_tokens: float | None


def create_report(
    result: SimulationResult,
    *,
    replicas: int,
    blocks: float,
    gpus: int,
    price: float | None,
    rate: float | None,
    users: int | None,
    objective: LatencyObjective | None,
) -> Report:
    """Create the report of a run.

    `replicas` and `gpus` are the numbers of the whole deployment, of which the run may have simulated a sample.
    `blocks`: mean number of KV blocks of a replica. `price`: dollars per GPU and hour.
    """
    tally, scale = result.tally, replicas / result.replicas
    window_s = tally.end_s - tally.begin_s
    replica_s = window_s * result.replicas
    tok_s = tally.output_tokens * scale / window_s
    hourly = None if price is None else price * gpus
    goodput = _goodput(tally, objective) if objective else None
    verdicts = tuple(judge_target(tally, target) for target in objective.targets) if objective else ()
    return Report(
        rate=rate,
        users=users,
        replicas=replicas,
        sampled=result.replicas,
        window_s=window_s,
        requests=_measured_requests(tally),
        completed=len(tally.ttft),
        refused=len(tally.refused),
        too_long=tally.too_long,
        request_rate=tally.ended * scale / window_s,
        input_tok_s=tally.input_tokens * scale / window_s,
        output_tok_s=tok_s,
        ttft_s=summarize_times(tally.ttft),
        tpot_s=summarize_times(tpot_times(tally)),
        itl_s=summarize_gaps(tally),
        e2e_s=summarize_times(tally.e2e),
        queue_s=summarize_times(tally.queued),
        distributions=time_percentiles(tally),
        goodput_rate=None if goodput is None else goodput * scale / window_s,
        goodput_share=_share(goodput, _measured_requests(tally)),
        met=all(verdict.met for verdict in verdicts) if objective else None,
        objective=verdicts,
        preemptions=round(result.preemptions * scale),
        prefix_hit_share=_share(result.prefix_hits, result.prefix_queries),
        kv_utilisation=tally.block_s / (replica_s * blocks),
        running=tally.request_s / replica_s,
        busy=tally.busy_s / replica_s,
        gpus=gpus,
        gpu_hours=gpus * window_s / 3600,
        dollars_per_hour=hourly,
        dollars_per_million_tokens=hourly / 3600 / tok_s * 1e6 if hourly is not None and tok_s else None,
    )


def _measured_requests(tally: Tally) -> int:
    return len(tally.ttft) + len(tally.refused) + tally.too_long


def _share(part: int | None, whole: int) -> float | None:
    return part / whole if part is not None and whole else None


def tpot_times(tally: Tally) -> list[float]:
    """Time per output token of each completed request with more than one token, in seconds."""
    rows = zip(tally.ttft, tally.e2e, tally.output_len, strict=True)
    return [(e2e - ttft) / (tokens - 1) for ttft, e2e, tokens in rows if tokens > 1]


def summarize_times(values: Sequence[float]) -> LatencySummary | None:
    """Mean and percentiles of seconds; None without values."""
    if not values:
        return None
    ascending = sorted(values)
    return LatencySummary(mean=fmean(values), **{f"p{q}": percentile(ascending, q) for q in (50, 90, 95, 99)})


def time_percentiles(tally: Tally) -> dict[str, TimePercentiles]:
    """Percentiles of the completed requests' latencies, by the names of the report's fields."""
    times = {"ttft_s": tally.ttft, "tpot_s": tpot_times(tally), "e2e_s": tally.e2e, "queue_s": tally.queued}
    return {name: _whole_percentiles(values) for name, values in times.items() if values}


def _whole_percentiles(values: Sequence[float]) -> TimePercentiles:
    ascending = sorted(values)
    return TimePercentiles(tuple(percentile(ascending, percent) for percent in range(101)))


def summarize_gaps(tally: Tally) -> LatencySummary | None:
    """Mean and percentiles of the gaps between tokens; None without gaps."""
    if not tally.gap_count:
        return None
    percents = {f"p{q}": tally.gap_percentile(q) for q in (50, 90, 95, 99)}
    return LatencySummary(mean=tally.gap_sum / tally.gap_count, **percents)


def _goodput(tally: Tally, objective: LatencyObjective) -> int:
    """Number of measured requests that meet the objective's limits."""
    ttft, tpot, e2e, queue = (objective.limit_s(metric) for metric in ("ttft", "tpot", "e2e", "queue"))
    rows = zip(tally.ttft, tally.e2e, tally.output_len, tally.queued, strict=True)
    return sum(
        first <= ttft and whole <= e2e and waited <= queue and whole - first <= tpot * (tokens - 1)
        for first, whole, tokens, waited in rows
    )


def judge_target(tally: Tally, target: LatencyTarget) -> TargetVerdict:
    """Compare a target with the measured value."""
    if target.metric == "itl":
        value = _gap_value(tally, target)
        return TargetVerdict(
            target=target.name, limit_s=target.limit_s, value_s=value, plus_minus_s=None, met=value <= target.limit_s
        )
    rows = request_waits(tally, target.metric)
    value = _target_value([wait for _, wait in rows], target)
    parts: list[list[float]] = [[] for _ in range(PARTS)]
    for arrival_s, wait in rows:
        parts[int((arrival_s - tally.begin_s) / (tally.end_s - tally.begin_s) * PARTS)].append(wait)
    return TargetVerdict(
        target=target.name,
        limit_s=target.limit_s,
        value_s=value,
        plus_minus_s=half_interval([_target_value(part, target) for part in parts if part]),
        met=value <= target.limit_s,
    )


def _gap_value(tally: Tally, target: LatencyTarget) -> float:
    if not tally.gap_count:
        return 0.0
    return tally.gap_sum / tally.gap_count if target.percent is None else tally.gap_percentile(target.percent)


def request_waits(tally: Tally, metric: str) -> list[tuple[float, float]]:
    """(arrival time, latency) of each measured request, in seconds; the latency of a refused one is infinite."""
    if metric == "tpot":
        rows = zip(tally.arrivals, tally.ttft, tally.e2e, tally.output_len, strict=True)
        waits = [(arrival_s, (e2e - ttft) / (tokens - 1)) for arrival_s, ttft, e2e, tokens in rows if tokens > 1]
    else:
        times = {"ttft": tally.ttft, "e2e": tally.e2e, "queue": tally.queued}[metric]
        waits = list(zip(tally.arrivals, times, strict=True))
    return waits + [(arrival_s, inf) for arrival_s in tally.refused]


def _target_value(values: list[float], target: LatencyTarget) -> float:
    """The target's mean or percentile of `values`; 0 without values: a target without requests is met."""
    if not values:
        return 0.0
    return fmean(values) if target.percent is None else percentile(sorted(values), target.percent)


def half_interval(parts: Sequence[float]) -> float | None:
    """Half-width of the 95 % confidence interval of a mean, from equal parts of the window (batch means)."""
    if len(parts) < PARTS or not all(map(isfinite, parts)):
        return None
    return STUDENT * stdev(parts) / sqrt(len(parts))
