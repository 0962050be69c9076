"""Search for the fewest replicas, or the highest request rate, with which simulations meet an objective."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import msgspec

from weft.study.simulate.load import SimulatedLoad
from weft.study.simulate.objective import format_duration
from weft.study.simulate.report import Report, TargetVerdict
from weft.study.simulate.study import MeasurementWindow, Study

CLOSE = 0.02  # relative accuracy of the rate
CLOSE_REPLICAS = 0.01  # relative accuracy of the number of replicas
MAX_DOUBLINGS = 6  # doublings of the first guess
LONE_REQUESTS = 300  # requests simulated one after the other


class CapacityResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search.

    `value`: the fewest replicas, or the highest rate, that meet the objective. None if there is none; `reason` then
    tells why. `report`: the run with `value`. `runs`: all runs, in order.
    """

    value: float | None
    reason: str
    report: Report | None
    runs: tuple[Report, ...]


def simulate_lone_requests(study: Study, load: SimulatedLoad, lone_s: float) -> Report:
    """Simulate requests of a load one after the other on one replica. `lone_s`: about the time that one takes."""
    times = MeasurementWindow(duration_s=(LONE_REQUESTS + 5) * lone_s, warmup_s=5 * lone_s)
    requests = load.distribution
    if load.trace:
        requests = msgspec.structs.replace(requests, rows=load.trace)
    lone = SimulatedLoad(distribution=requests, users=1, seed=load.seed)
    return msgspec.structs.replace(study, times=times, sample=None).run_load(lone, 1)


def explain_misses(report: Report) -> str:
    """Reason why an objective that lone requests miss cannot be met; empty if they meet it."""
    return "; ".join(f"even a request alone has {miss}" for miss in _misses(report))


def find_replicas(simulate: Callable[[int], Report], guess: float, *, too_few: int = 0) -> CapacityResult:
    """Find the fewest replicas that meet the objective, to CLOSE_REPLICAS, starting from a guess.

    `simulate` runs the load with a number of replicas. `too_few` replicas are known to miss the objective.
    """
    runs: list[Report] = []

    def met(count: int) -> bool:
        runs.append(simulate(count))
        return bool(runs[-1].met)

    low, high = too_few, max(too_few + 1, ceil(guess))
    while not met(high):
        if len(runs) > MAX_DOUBLINGS:
            reason = f"{high:,} replicas still have {'; '.join(_misses(runs[-1]))}"
            return CapacityResult(value=None, reason=reason, report=None, runs=tuple(runs))
        low, high = high, 2 * high
    while high - low > max(1, CLOSE_REPLICAS * high):
        # While no number is known to be too small, the guess is better information than the middle.
        middle = (low + high) // 2 if low else max(1, high * 3 // 4)
        low, high = (low, middle) if met(middle) else (middle, high)
    report = _last_run(runs, lambda run: run.replicas == high)
    return CapacityResult(value=high, reason="", report=report, runs=tuple(runs))


def find_rate(simulate: Callable[[float], Report], guess: float) -> CapacityResult:
    """Find the highest request rate that meets the objective, to CLOSE, starting from a guess.

    `simulate` runs the load at a rate in requests per second.
    """
    runs: list[Report] = []

    def met(rate: float) -> bool:
        runs.append(simulate(rate))
        return bool(runs[-1].met)

    low, high = _double_rate(met, guess)
    while high - low > CLOSE * high and high > CLOSE * guess:
        middle = (low + high) / 2
        low, high = (middle, high) if met(middle) else (low, middle)
    if not low:
        reason = f"at {high:.3g} requests/s there is still {'; '.join(_misses(runs[-1]))}"
        return CapacityResult(value=None, reason=reason, report=None, runs=tuple(runs))
    report = _last_run(runs, lambda run: run.rate == low)
    return CapacityResult(value=low, reason="", report=report, runs=tuple(runs))


def _double_rate(met: Callable[[float], bool], guess: float) -> tuple[float, float]:
    """Double the rate until it misses the objective. Return the highest rate that met it (or 0), and the next."""
    low, high = 0.0, guess
    for _ in range(MAX_DOUBLINGS):
        if not met(high):
            break
        low, high = high, 2 * high
    return low, high


def _misses(report: Report) -> list[str]:
    """Missed targets of a run, in words."""
    return [_describe_miss(verdict) for verdict in report.objective if not verdict.met]


def _describe_miss(verdict: TargetVerdict) -> str:
    value, limit = format_duration(verdict.value_s), format_duration(verdict.limit_s)
    return f"a {verdict.target} of {value} (limit {limit})"


def _last_run(runs: list[Report], fits: Callable[[Report], bool]) -> Report:
    return next(report for report in reversed(runs) if fits(report))
