"""Runs of a simulation, with their progress on a terminal: a single one, a sweep over rates, or a search."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, isfinite
from typing import Any

import msgspec

from weft.cli.flags.simulate_flags import Load, SimulateArguments
from weft.cli.simulate.study import SHARES, no_load_given
from weft.planner.search.ranking import Candidate
from weft.study.simulate.capacity_search import (
    CapacityResult,
    explain_misses,
    find_rate,
    find_replicas,
    simulate_lone_requests,
)
from weft.study.simulate.load import SimulatedLoad
from weft.study.simulate.report import Report
from weft.study.simulate.study import Study

SAFE = 0.7  # share of the predicted capacity that about keeps a promise: the first guess of a search

OnTime = Callable[[float], object]  # takes the virtual time in seconds


def run_rates(arguments: SimulateArguments, study: Study, load: SimulatedLoad) -> Iterator[Report]:
    """Reports of a run at each rate, or of one run if the load has no rate."""
    rates = simulated_rates(arguments.load, study, load)
    for number, rate in enumerate(rates, 1):
        at_rate = msgspec.structs.replace(load, rate=rate)
        name = f"{rate:g} requests/s" if rate else "simulating"
        with progress(name if len(rates) == 1 else f"{number} of {len(rates)}: {name}", study, at_rate) as on_time:
            yield study.run_load(at_rate, on_time=on_time)


def run_once(study: Study, load: SimulatedLoad) -> Report:
    """Report of one run with the plan's own replicas."""
    with progress("simulating", study, load) as on_time:
        return study.run_load(load, on_time=on_time)


def simulated_rates(flags: Load, study: Study, load: SimulatedLoad) -> tuple[float | None, ...]:
    """Rates of the runs, in requests per second; without a load on the command line, shares of the capacity."""
    if not no_load_given(flags):
        return flags.rates or (load.rate,)
    whole = study.capacity * len(study.specs)
    return tuple(float(f"{share * whole:.3g}") for share in SHARES)


def find_limit(arguments: SimulateArguments, study: Study, load: SimulatedLoad, best: Candidate) -> CapacityResult:
    """The result of --find."""
    if arguments.answer.find == "replicas":
        return find_count(study, load, best)
    if missed := missed_alone(study, load, best):
        return missed

    def run_at(rate: float) -> Report:
        at_rate = msgspec.structs.replace(load, rate=rate)
        with progress(f"{rate:.3g} requests/s", study, at_rate) as on_time:
            return study.run_load(at_rate, judging=True, on_time=on_time)

    return find_rate(run_at, study.capacity * len(study.specs) * SAFE)


def find_count(study: Study, load: SimulatedLoad, best: Candidate, *, too_few: int = 0) -> CapacityResult:
    """The fewest replicas that keep the promise; `too_few` are known to miss it."""
    if missed := missed_alone(study, load, best):
        return missed

    def run_replicas(count: int) -> Report:
        with progress(f"{count:,} replicas", study, load) as on_time:
            return study.run_load(load, count, judging=True, on_time=on_time)

    # Users wait for their answers, so that their number alone does not give the rate of requests.
    guess = 2 * too_few if load.offered is None else first_guess(study, load)
    return find_replicas(run_replicas, guess, too_few=too_few)


def missed_alone(study: Study, load: SimulatedLoad, best: Candidate) -> CapacityResult | None:
    """The result of a search if even a single request misses the promise; else None."""
    lone_s = best.predicted.ttft_s + load.mean[1] / best.predicted.single_tok_s
    lone = simulate_lone_requests(study, load, lone_s)
    reason = explain_misses(lone)
    return CapacityResult(value=None, reason=reason, report=None, runs=(lone,)) if reason else None


def first_guess(study: Study, load: SimulatedLoad) -> float:
    """Number of replicas that a search begins with; `load` has a rate or a trace."""
    assert load.offered is not None
    return load.offered / study.capacity / SAFE


@contextmanager
def progress(name: str, study: Study, load: SimulatedLoad) -> Iterator[OnTime]:
    """Show a bar of the virtual time on a terminal; yields the function that takes the time."""
    if not sys.stderr.isatty():
        yield lambda now: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    end_s = study.times.duration_s
    if end_s == inf:
        assert load.offered is not None
        end_s = len(load.trace) / load.offered
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=end_s)
        yield lambda now: bar.update(task, completed=min(now, end_s))


def report_json(report: Report) -> dict[str, Any]:
    """A run as JSON without the distributions, which only plots use."""
    run: dict[str, Any] = msgspec.to_builtins(report)
    del run["distributions"]
    return run


def finite(value: Any) -> Any:
    """A JSON value with None for infinite numbers, which stand for times of events that never came."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
