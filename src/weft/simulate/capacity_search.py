"""Find: how many replicas an objective takes, and how much load one deployment carries."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import msgspec

from weft.simulate.load import SimulatedLoad
from weft.simulate.objective import format_duration
from weft.simulate.report import Report, TargetVerdict
from weft.simulate.study import MeasurementWindow, Study

CLOSE = 0.02  # as near is a rate found, relative
CLOSE_REPLICAS = 0.01
MOST_RISES = 6  # from the guess, each to twice as much
ALONE = 300  # requests, one after the other


class CapacityResult(msgspec.Struct, frozen=True, kw_only=True):
    """`value` is the least number of replicas, or the highest rate, that meets the objective, None where there is none:
    `reason` says why. `report` is the run with it, `runs` are all of them in the order in which they were made."""

    value: float | None
    reason: str
    report: Report | None
    runs: tuple[Report, ...]


def simulate_lone_requests(study: Study, load: SimulatedLoad, lone_s: float) -> Report:
    """Requests of a load, each alone on one replica. `lone_s` is about what one takes."""
    times = MeasurementWindow(duration_s=(ALONE + 5) * lone_s, warmup_s=5 * lone_s)
    drawn = msgspec.structs.replace(load.distribution, rows=load.trace) if load.trace else load.distribution
    lone = SimulatedLoad(distribution=drawn, users=1, seed=load.seed)
    return msgspec.structs.replace(study, times=times, sample=None).run_load(lone, 1)


def explain_misses(report: Report) -> str:
    """Why an objective cannot be met that requests do not even meet alone; empty where they do."""
    missed = [it for it in report.objective if not it.met]
    return "; ".join(f"even a request alone has {said(it)}" for it in missed)


def said(it: TargetVerdict) -> str:
    return f"a {it.target} of {format_duration(it.value_s)}, and {format_duration(it.limit_s)} is asked"


def find_replicas(run: Callable[[int], Report], guess: float, *, too_few: int = 0) -> CapacityResult:
    """The fewest replicas, to CLOSE_REPLICAS, beginning at a guess; `too_few` are known to miss the objective."""
    runs: list[Report] = []

    def met(count: int) -> bool:
        runs.append(run(count))
        return bool(runs[-1].met)

    low, high = too_few, max(too_few + 1, ceil(guess))
    while not met(high):
        if len(runs) > MOST_RISES:
            missed = "; ".join(said(it) for it in runs[-1].objective if not it.met)
            return CapacityResult(
                value=None, reason=f"{high:,} replicas still have {missed}", report=None, runs=tuple(runs)
            )
        low, high = high, 2 * high
    while high - low > max(1, CLOSE_REPLICAS * high):
        # Where nothing is known to be too few, the guess is as good as it gets.
        middle = (low + high) // 2 if low else max(1, high * 3 // 4)
        low, high = (low, middle) if met(middle) else (middle, high)
    return CapacityResult(value=high, reason="", report=best(runs, lambda it: it.replicas == high), runs=tuple(runs))


def find_rate(run: Callable[[float], Report], guess: float) -> CapacityResult:
    """The highest rate, to CLOSE, beginning at a guess."""
    runs: list[Report] = []

    def met(rate: float) -> bool:
        runs.append(run(rate))
        return bool(runs[-1].met)

    low, high = 0.0, guess
    for _ in range(MOST_RISES):
        if not met(high):
            break
        low, high = high, 2 * high
    while high - low > CLOSE * high and high > CLOSE * guess:
        middle = (low + high) / 2
        low, high = (middle, high) if met(middle) else (low, middle)
    if not low:
        missed = "; ".join(said(it) for it in runs[-1].objective if not it.met)
        return CapacityResult(
            value=None, reason=f"at {high:.3g} requests/s there is still {missed}", report=None, runs=tuple(runs)
        )
    return CapacityResult(value=low, reason="", report=best(runs, lambda it: it.rate == low), runs=tuple(runs))


def best(runs: list[Report], fits: Callable[[Report], bool]) -> Report:
    return next(report for report in reversed(runs) if fits(report))
