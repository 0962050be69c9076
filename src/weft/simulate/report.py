"""Report: what a run says of a deployment under a load."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, sqrt
from statistics import fmean, stdev

import msgspec

from weft.simulate.objective import LatencyTarget, Objective, percentile
from weft.simulate.simulation import SimulationResult
from weft.simulate.tally import Tally

PARTS = 10  # of the measured time, whose differences say how sure a figure is
STUDENT = 2.262  # of 9 degrees of freedom, 95 %


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class TimePercentiles(msgspec.Struct, frozen=True):
    """Seconds at each whole percentile, 0 to 100."""

    percentiles_s: tuple[float, ...]


class TargetVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A target, and what it came to. `plus_minus_s` is the half of its 95 % interval, None where too little was
    measured. Requests that were refused count as waiting for ever."""

    target: str
    limit_s: float
    value_s: float
    plus_minus_s: float | None
    met: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are per second and of the whole deployment, as are counts but for `requests` to `too_long`, which are of
    what was measured: all replicas, or the share `sampled` of them. Spreads are None where nothing was measured; those
    of requests are over the ones that were answered; `distributions` has the same times by field name.

    `goodput_rate` are the requests that meet the objective's limits. `kv_utilisation`, `running` (requests at once)
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
    run: SimulationResult,
    *,
    replicas: int,
    blocks: float,
    gpus: int,
    price: float | None,
    rate: float | None,
    users: int | None,
    objective: Objective | None,
) -> Report:
    """`replicas` and `gpus` are the whole deployment's, of which `run` may be a sample; `blocks` the mean KV blocks of
    a replica."""
    tally, scale = run.tally, replicas / run.replicas
    window = tally.end_s - tally.begin_s
    requests = len(tally.ttft) + len(tally.refused) + tally.too_long
    good = good_requests(tally, objective) if objective else 0
    judged = tuple(judge(tally, target) for target in objective.targets) if objective else ()
    tok_s, hourly = tally.output_tokens * scale / window, None if price is None else price * gpus
    return Report(
        rate=rate,
        users=users,
        replicas=replicas,
        sampled=run.replicas,
        window_s=window,
        requests=requests,
        completed=len(tally.ttft),
        refused=len(tally.refused),
        too_long=tally.too_long,
        request_rate=tally.ended * scale / window,
        input_tok_s=tally.input_tokens * scale / window,
        output_tok_s=tok_s,
        ttft_s=summarize_times(tally.ttft),
        tpot_s=summarize_times(tpots(tally)),
        itl_s=gaps(tally),
        e2e_s=summarize_times(tally.e2e),
        queue_s=summarize_times(tally.queued),
        distributions=distributions(tally),
        goodput_rate=good * scale / window if objective else None,
        goodput_share=good / requests if objective and requests else None,
        met=all(it.met for it in judged) if objective else None,
        objective=judged,
        preemptions=round(run.preemptions * scale),
        prefix_hit_share=run.prefix_hits / run.prefix_queries if run.prefix_queries else None,
        kv_utilisation=tally.block_s / (window * run.replicas * blocks),
        running=tally.request_s / (window * run.replicas),
        busy=tally.busy_s / (window * run.replicas),
        gpus=gpus,
        gpu_hours=gpus * window / 3600,
        dollars_per_hour=hourly,
        dollars_per_million_tokens=hourly / 3600 / tok_s * 1e6 if hourly is not None and tok_s else None,
    )


def tpots(tally: Tally) -> list[float]:
    """Of each answer of more than one token."""
    rows = zip(tally.ttft, tally.e2e, tally.output_len, strict=True)
    return [(e2e - ttft) / (tokens - 1) for ttft, e2e, tokens in rows if tokens > 1]


def summarize_times(values: Sequence[float]) -> LatencySummary | None:
    if not values:
        return None
    ascending = sorted(values)
    return LatencySummary(mean=fmean(values), **{f"p{q}": percentile(ascending, q) for q in (50, 90, 95, 99)})


def distributions(tally: Tally) -> dict[str, TimePercentiles]:
    """Times of the answered requests, under the names of the report's fields."""
    times = {"ttft_s": tally.ttft, "tpot_s": tpots(tally), "e2e_s": tally.e2e, "queue_s": tally.queued}
    return {name: distribution(values) for name, values in times.items() if values}


def distribution(values: Sequence[float]) -> TimePercentiles:
    ascending = sorted(values)
    return TimePercentiles(tuple(percentile(ascending, percent) for percent in range(101)))


def gaps(tally: Tally) -> LatencySummary | None:
    if not tally.gap_count:
        return None
    percents = {f"p{q}": tally.gap_percentile(q) for q in (50, 90, 95, 99)}
    return LatencySummary(mean=tally.gap_sum / tally.gap_count, **percents)


def good_requests(tally: Tally, objective: Objective) -> int:
    """How many measured requests meet the limits of their own times."""
    ttft, tpot, e2e, queue = (objective.limit_s(metric) for metric in ("ttft", "tpot", "e2e", "queue"))
    rows = zip(tally.ttft, tally.e2e, tally.output_len, tally.queued, strict=True)
    return sum(
        first <= ttft and whole <= e2e and waited <= queue and whole - first <= tpot * (tokens - 1)
        for first, whole, tokens, waited in rows
    )


def judge(tally: Tally, target: LatencyTarget) -> TargetVerdict:
    """What a target came to, and whether it is met."""
    if target.metric == "itl":
        value = gap_value(tally, target)
        return TargetVerdict(
            target=target.name, limit_s=target.limit_s, value_s=value, plus_minus_s=None, met=value <= target.limit_s
        )
    rows = waits(tally, target.metric)
    value = statistic([wait for _, wait in rows], target)
    parts: list[list[float]] = [[] for _ in range(PARTS)]
    for asked, wait in rows:
        parts[int((asked - tally.begin_s) / (tally.end_s - tally.begin_s) * PARTS)].append(wait)
    return TargetVerdict(
        target=target.name,
        limit_s=target.limit_s,
        value_s=value,
        plus_minus_s=half_interval([statistic(part, target) for part in parts if part]),
        met=value <= target.limit_s,
    )


def gap_value(tally: Tally, target: LatencyTarget) -> float:
    if not tally.gap_count:
        return 0.0
    return tally.gap_sum / tally.gap_count if target.percent is None else tally.gap_percentile(target.percent)


def waits(tally: Tally, metric: str) -> list[tuple[float, float]]:
    """When each measured request was asked, and its time; infinity where it was refused."""
    if metric == "tpot":
        rows = zip(tally.asked, tally.ttft, tally.e2e, tally.output_len, strict=True)
        found = [(asked, (e2e - ttft) / (tokens - 1)) for asked, ttft, e2e, tokens in rows if tokens > 1]
    else:
        times = {"ttft": tally.ttft, "e2e": tally.e2e, "queue": tally.queued}[metric]
        found = list(zip(tally.asked, times, strict=True))
    return found + [(asked, inf) for asked in tally.refused]


def statistic(values: list[float], target: LatencyTarget) -> float:
    """0 where there is nothing: a promise that nobody has asked for is kept."""
    if not values:
        return 0.0
    return fmean(values) if target.percent is None else percentile(sorted(values), target.percent)


def half_interval(parts: Sequence[float]) -> float | None:
    """Half-width of the 95 % confidence interval of a mean, from equal parts of the time (batch means)."""
    if len(parts) < PARTS or not all(map(isfinite, parts)):
        return None
    return STUDENT * stdev(parts) / sqrt(len(parts))
