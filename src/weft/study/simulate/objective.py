"""LatencyObjective: latency targets of a service (SLO), as in ttft_p95=1s,tpot_p95=50ms."""

from __future__ import annotations

import re
from math import floor, inf

import msgspec

from weft.errors import ConfigError

METRICS = {  # metrics that a target may name, with their meaning
    "ttft": "time to first token",
    "tpot": "time per token after it",
    "itl": "gap between tokens",
    "e2e": "whole answer",
    "queue": "wait for the first step",
}
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TARGET = re.compile(
    r"\s*(?P<metric>[a-z]\w*?)_(?P<statistic>mean|p\d+(?:\.\d+)?)\s*(?:=|<=|<)\s*(?P<number>[^a-z\s]+)\s*(?P<unit>[a-z]*)\s*",
    re.IGNORECASE,
)
_DURATION = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>[a-z]*)\s*", re.IGNORECASE)


class LatencyTarget(msgspec.Struct, frozen=True):
    """Upper limit of `limit_s` seconds on a metric's percentile, or on its mean if `percent` is None."""

    metric: str
    percent: float | None
    limit_s: float

    @property
    def name(self) -> str:
        """For example ttft_p95."""
        return f"{self.metric}_mean" if self.percent is None else f"{self.metric}_p{self.percent:g}"

    def __str__(self) -> str:
        return f"{self.name} {format_duration(self.limit_s)}"


class LatencyObjective(msgspec.Struct, frozen=True):
    """Latency targets that must all be met. A single request meets the objective if its own times are within limits."""

    targets: tuple[LatencyTarget, ...]

    def limit_s(self, metric: str) -> float:
        """Limit for the metric of a single request, in seconds: the loosest of the metric's targets."""
        return max((target.limit_s for target in self.targets if target.metric == metric), default=inf)

    def __str__(self) -> str:
        return ", ".join(map(str, self.targets))


def parse_objective(text: str) -> LatencyObjective:
    """Parse the value of --slo. Raises ConfigError for an invalid one."""
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError("--slo is empty; write it as ttft_p95=1s,tpot_p95=50ms", code="empty-slo")
    return LatencyObjective(tuple(map(_target, parts)))


def _target(text: str) -> LatencyTarget:
    match = _TARGET.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--slo {text.strip()!r} is no target; write METRIC_STATISTIC=TIME, as in ttft_p95=1s",
            code="bad-slo-target",
        )
    metric, statistic = match["metric"].lower(), match["statistic"].lower()
    if metric not in METRICS:
        raise ConfigError(
            f"--slo {text.strip()!r}: unknown metric {metric!r}; known: {', '.join(METRICS)}", code="unknown-slo-metric"
        )
    percent = None if statistic == "mean" else float(statistic[1:])
    if percent is not None and not 0 < percent < 100:
        raise ConfigError(
            f"--slo {text.strip()!r}: a percentile lies between 0 and 100, as in {metric}_p95",
            code="bad-slo-percentile",
        )
    return LatencyTarget(metric, percent, parse_duration(match["number"] + match["unit"], f"--slo {text.strip()!r}"))


def parse_duration(text: str, source: str) -> float:
    """Seconds of `50ms`, `1.5s`, `10m` or `1h`. Raises ConfigError with `source`, the name of the flag."""
    match = _DURATION.fullmatch(text)
    unit = UNITS_S.get(match["unit"].lower()) if match else None
    if match is None or unit is None or not 0 < float(match["number"]) * unit < inf:
        raise ConfigError(
            f"{source}: {text.strip()!r} is no time above 0 with a unit, as 50ms, 1.5s, 10m or 1h", code="bad-duration"
        )
    return float(match["number"]) * unit


def format_duration(seconds: float) -> str:
    """Format seconds for a person: 12.3 ms, 1.5 s, 10 min, 3 h."""
    if seconds == inf:
        return "for ever"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def percentile(ascending: list[float], percent: float) -> float:
    """Percentile of at least one value, interpolated linearly between the nearest two. Values may be infinite."""
    at = (len(ascending) - 1) * percent / 100
    low = floor(at)
    if at == low or ascending[low] == inf:
        return ascending[low]
    return ascending[low] + (ascending[low + 1] - ascending[low]) * (at - low)
