"""Summary of a load: times, rates, goodput, and the number of failed requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from math import floor
from statistics import fmean, median, pstdev
from typing import Any

from weft.errors import ConfigError
from weft.study.bench.load import LoadResult, RequestRecord

METRICS = {  # by their names in flags and JSON
    "ttft": "time to first token",
    "tpot": "time per token after it",
    "itl": "gap between pieces",
    "e2el": "whole answer",
}
PERCENTILES = (95.0, 99.0)
LATE_S = 0.01  # a request that the client sends later than this counts as late
LATE_SHARE = 0.01  # a measurement with more late requests than this share is spoiled


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile, interpolated linearly; `values` are in ascending order, at least one."""
    position = (len(values) - 1) * percent / 100
    low = floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def times_s(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Seconds of each metric over the complete responses."""
    whole = [record for record in records if record.error is None]
    return {
        "ttft": [record.ttft_s for record in whole],
        "tpot": [record.tpot_s for record in whole if record.tpot_s is not None],
        "itl": list(chain.from_iterable(_gaps(record.pieces_s) for record in whole)),
        "e2el": [record.e2e_s for record in whole],
    }


def _gaps(pieces_s: Sequence[float]) -> list[float]:
    """Seconds between successive pieces."""
    return [later - earlier for earlier, later in pairwise(pieces_s)]


def meets_limits(record: RequestRecord, limits_s: Mapping[str, float]) -> bool:
    """Return True if a request was answered within the limit of every metric."""
    if record.error is not None:
        return False
    seconds = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2e_s}
    return all(seconds[name] <= limit for name, limit in limits_s.items())


def _count_errors(records: Sequence[RequestRecord]) -> dict[str, int]:
    """The number of requests with each error, the most common first."""
    return dict(Counter(record.error for record in records if record.error is not None).most_common())


def _goodput_figures(
    records: Sequence[RequestRecord], limits_s: Mapping[str, float], seconds: float
) -> dict[str, float]:
    good = sum(meets_limits(record, limits_s) for record in records)
    return {"request_goodput": round(good / seconds, 4), "goodput_share": round(good / len(records), 4)}


def summarise_load(
    load: LoadResult, limits_s: Mapping[str, float] | None = None, percents: Sequence[float] = PERCENTILES
) -> dict[str, Any]:
    """Figures of a load, under vLLM's names if it has them: seconds, tokens and requests per second, milliseconds.

    `request_goodput` is None without limits.
    """
    records, seconds = load.records, max(load.seconds, 1e-9)
    whole = [record for record in records if record.error is None]
    input_tokens = sum(record.input_tokens for record in whole)
    output_tokens = sum(record.output_tokens for record in whole)
    figures: dict[str, Any] = {
        "duration": round(load.seconds, 4),
        "completed": len(whole),
        "failed": len(records) - len(whole),
        "errors": _count_errors(records),
        "short_answers": sum(record.output_tokens < record.requested_tokens for record in whole),
        "total_input_tokens": input_tokens,
        "cached_input_tokens": sum(record.cached_tokens for record in whole),
        "total_output_tokens": output_tokens,
        "request_throughput": round(len(whole) / seconds, 4),
        "request_goodput": None,
        "output_throughput": round(output_tokens / seconds, 2),
        "total_token_throughput": round((input_tokens + output_tokens) / seconds, 2),
        "most_at_once": load.most_at_once,
        "interrupted": load.interrupted,
    }
    if limits_s:
        figures |= _goodput_figures(records, limits_s, seconds)
    for name, values in times_s(records).items():
        figures.update(metric_statistics(name, sorted(values), percents))
    return figures | client_figures(load)


def metric_statistics(name: str, values: Sequence[float], percents: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles of `values` (seconds, ascending) in milliseconds; None without values."""
    statistics: dict[str, float | None] = {}
    functions: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "median": median, "std": pstdev}
    for kind, function in functions.items():
        statistics[f"{kind}_{name}_ms"] = round(1000 * function(values), 3) if values else None
    for percent in percents:
        statistics[f"p{percent:g}_{name}_ms"] = round(1000 * percentile(values, percent), 3) if values else None
    return statistics


def client_figures(load: LoadResult) -> dict[str, Any]:
    """Delays of the client itself: of its requests and of its event loop."""
    late = sorted(max(0.0, record.late_s) for record in load.records)
    beats = sorted(load.beats_late_s) or [0.0]
    return {
        "client_late_requests": sum(value > LATE_S for value in late),
        "client_p99_late_ms": round(1000 * percentile(late, 99), 3),
        "client_max_late_ms": round(1000 * late[-1], 3),
        "client_p99_loop_late_ms": round(1000 * percentile(beats, 99), 3),
        "held_back": sum(record.held_until_s is not None for record in load.records),
    }


def load_warnings(figures: Mapping[str, Any], requests: int) -> list[str]:
    """Warnings for readers of the figures, in sentences."""
    texts = []
    if figures["interrupted"]:
        ended = figures["completed"] + figures["failed"]
        texts.append(f"interrupted after {ended} of {requests} requests; the figures are for those")
    if figures["failed"]:
        texts.append(f"{figures['failed']} of {requests} requests failed; the times are for the others")
    if figures["short_answers"]:
        texts.append(f"{figures['short_answers']} responses have fewer tokens than requested")
    if figures["client_late_requests"] > LATE_SHARE * requests:
        texts.append(
            f"the client could not keep up: {figures['client_late_requests']} of {requests} requests were sent more "
            f"than {1000 * LATE_S:.0f} ms late (at most {figures['client_max_late_ms']:.0f} ms); "
            "send from another machine, or at a lower rate"
        )
    if figures["client_p99_loop_late_ms"] > 1000 * LATE_S:
        texts.append(
            f"the client's clock was up to {figures['client_p99_loop_late_ms']:.0f} ms late (p99), so the times of "
            "pieces are uncertain by as much"
        )
    return texts


def parse_limits(words: Sequence[str]) -> dict[str, float]:
    """Limits in seconds by metric, from vLLM's `ttft:1000 tpot:50` in milliseconds. Raises ConfigError."""
    limits: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limit = float(value) / 1000
        except ValueError:
            limit = -1.0
        if name not in ("ttft", "tpot", "e2el") or not 0 < limit < float("inf"):
            raise ConfigError(
                f"--goodput {word!r} is not a limit; give ttft, tpot or e2el in milliseconds, as in ttft:1000 tpot:50",
                code="bad-goodput-limit",
            )
        limits[name] = limit
    return limits
