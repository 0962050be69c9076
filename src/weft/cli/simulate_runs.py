"""The runs of a study, with their progress on a terminal: one, a sweep, or those of a search."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, isfinite
from typing import Any

import msgspec

from weft.cli.simulate_study import SHARES, bare
from weft.planner.ranking import Candidate
from weft.simulate.capacity_search import (
    CapacityResult,
    explain_misses,
    find_rate,
    find_replicas,
    simulate_lone_requests,
)
from weft.simulate.load import SimulatedLoad
from weft.simulate.report import Report
from weft.simulate.study import Study

SAFE = 0.7  # of the predicted capacity, about what meets an objective: where a search begins

Told = Callable[[float], object]


def swept(said: dict[str, Any], study: Study, load: SimulatedLoad) -> Iterator[Report]:
    """One run, or one at each rate."""
    each = rates(said, study, load)
    for number, rate in enumerate(each, 1):
        at = msgspec.structs.replace(load, rate=rate)
        name = f"{rate:g} requests/s" if rate else "simulating"
        with progress(name if len(each) == 1 else f"{number} of {len(each)}: {name}", study, at) as told:
            yield study.run_load(at, on_time=told)


def run_once(study: Study, load: SimulatedLoad) -> Report:
    """One run of the plan's own replicas."""
    with progress("simulating", study, load) as told:
        return study.run_load(load, on_time=told)


def rates(said: dict[str, Any], study: Study, load: SimulatedLoad) -> tuple[float | None, ...]:
    """At which one run each is made."""
    if not bare(said):
        named: tuple[float, ...] | None = said.get("rates")
        return named or (load.rate,)
    whole = study.capacity * len(study.specs)
    return tuple(float(f"{share * whole:.3g}") for share in SHARES)


def find_answer(said: dict[str, Any], study: Study, load: SimulatedLoad, best: Candidate) -> CapacityResult:
    """The answer to --find."""
    if said["find"] == "replicas":
        return find_count(study, load, best)
    if missed := missed_alone(study, load, best):
        return missed

    def at_rate(rate: float) -> Report:
        at = msgspec.structs.replace(load, rate=rate)
        with progress(f"{rate:.3g} requests/s", study, at) as told:
            return study.run_load(at, judging=True, on_time=told)

    return find_rate(at_rate, study.capacity * len(study.specs) * SAFE)


def find_count(study: Study, load: SimulatedLoad, best: Candidate, *, too_few: int = 0) -> CapacityResult:
    """The fewest replicas that meet the objective; `too_few` are known to miss it."""
    if missed := missed_alone(study, load, best):
        return missed

    def with_replicas(count: int) -> Report:
        with progress(f"{count:,} replicas", study, load) as told:
            return study.run_load(load, count, judging=True, on_time=told)

    # Users wait for their answers, so that their number does not tell how much they ask for.
    guess = 2 * too_few if load.offered is None else first_guess(study, load)
    return find_replicas(with_replicas, guess, too_few=too_few)


def missed_alone(study: Study, load: SimulatedLoad, best: Candidate) -> CapacityResult | None:
    """The answer of a search if requests miss the objective even alone; else None."""
    lone_s = best.predicted.ttft_s + load.mean[1] / best.predicted.single_tok_s
    lone = simulate_lone_requests(study, load, lone_s)
    reason = explain_misses(lone)
    return CapacityResult(value=None, reason=reason, report=None, runs=(lone,)) if reason else None


def first_guess(study: Study, load: SimulatedLoad) -> float:
    """How many replicas a search begins with."""
    assert load.offered is not None
    return load.offered / study.capacity / SAFE


@contextmanager
def progress(name: str, study: Study, load: SimulatedLoad) -> Iterator[Told]:
    """A bar on a terminal, of the virtual time."""
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
    """A run as JSON, less the distributions: they are for pictures."""
    told: dict[str, Any] = msgspec.to_builtins(report)
    del told["distributions"]
    return told


def finite(told: Any) -> Any:
    """The same with None for what is infinite: a time that never came."""
    if isinstance(told, dict):
        return {name: finite(value) for name, value in told.items()}
    if isinstance(told, list):
        return [finite(value) for value in told]
    return None if isinstance(told, float) and not isfinite(told) else told
