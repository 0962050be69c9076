"""weft simulate MODEL: how long requests would wait, what the GPUs would carry, and how many of them that takes."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil, inf, isfinite
from typing import Any

import msgspec

from weft.cli import simulate_plots as plots
from weft.cli import simulate_view as view
from weft.cli.plan import NOTHING_FITS, look_up
from weft.cli.simulate_study import SHARES, asked, bare, check, questioned, studied
from weft.planner.answer import cut_json
from weft.planner.question import Question
from weft.planner.ranking import Candidate
from weft.planner.search import search
from weft.simulate.find import Found, alone, find_rate, find_replicas, hopeless
from weft.simulate.load import Load
from weft.simulate.report import Report
from weft.simulate.study import Study

SAFE = 0.7  # of the predicted capacity, about what meets an objective: where a search begins

Told = Callable[[float], object]


def main(arguments: Namespace) -> int:
    """Print what came of it; 3 where the model does not fit, or nothing meets the objective."""
    said = vars(arguments)
    check(said)
    model = look_up(arguments)
    load, longest = asked(said, model)
    question = questioned(arguments, model, load, longest)
    answer = search(question)
    if answer.best is None:
        why = f"{answer.obstacle}; weft plan tells what would help"
        print(f"{model.name} does not fit this hardware: {why}", file=sys.stderr)
        return NOTHING_FITS
    study = studied(said, question, answer.best, load)
    if said.get("find") == "replicas":
        study.check(load, ceil(first_guess(study, load)))
    elif "find" not in said:
        for rate in rates(said, study, load):
            study.check(msgspec.structs.replace(load, rate=rate))
    head = view.heading(question, answer.best, study, load)
    if not said.get("json"):
        print("\n".join(head))
    if "find" in said:
        found = find(said, study, load, answer.best)
        runs: tuple[Report, ...] = tuple(sorted(found.runs, key=lambda it: (it.replicas, it.rate or 0.0)))
    else:
        found, runs = None, tuple(swept(said, study, load))
    if said.get("json"):
        print(json.dumps(finite(as_json(said, question, answer.best, study, load, runs, found))))
    else:
        view.show(study, load, runs, found)
    if "plot" in said:
        plots.draw(said["plot"], view.deployed(question, answer.best), study, runs, found)
    return NOTHING_FITS if found is not None and found.value is None else 0


def swept(said: dict[str, Any], study: Study, load: Load) -> Iterator[Report]:
    """One run, or one at each rate."""
    each = rates(said, study, load)
    for number, rate in enumerate(each, 1):
        at = msgspec.structs.replace(load, rate=rate)
        name = f"{rate:g} requests/s" if rate else "simulating"
        with progress(name if len(each) == 1 else f"{number} of {len(each)}: {name}", study, at) as told:
            yield study.run(at, on_time=told)


def rates(said: dict[str, Any], study: Study, load: Load) -> tuple[float | None, ...]:
    """At which one run each is made."""
    if not bare(said):
        named: tuple[float, ...] | None = said.get("rates")
        return named or (load.rate,)
    whole = study.capacity * len(study.specs)
    return tuple(float(f"{share * whole:.3g}") for share in SHARES)


def find(said: dict[str, Any], study: Study, load: Load, best: Candidate) -> Found:
    """The answer to --find."""
    lone_s = best.predicted.ttft_s + load.mean[1] / best.predicted.single_tok_s
    lone = alone(study, load, lone_s)
    if reason := hopeless(lone):
        return Found(value=None, reason=reason, report=None, runs=(lone,))
    if said["find"] == "replicas":

        def with_replicas(count: int) -> Report:
            with progress(f"{count:,} replicas", study, load) as told:
                return study.run(load, count, judging=True, on_time=told)

        return find_replicas(with_replicas, first_guess(study, load))

    def at_rate(rate: float) -> Report:
        at = msgspec.structs.replace(load, rate=rate)
        with progress(f"{rate:.3g} requests/s", study, at) as told:
            return study.run(at, judging=True, on_time=told)

    return find_rate(at_rate, study.capacity * len(study.specs) * SAFE)


def first_guess(study: Study, load: Load) -> float:
    """How many replicas a search begins with."""
    assert load.offered is not None
    return load.offered / study.capacity / SAFE


@contextmanager
def progress(name: str, study: Study, load: Load) -> Iterator[Told]:
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


def as_json(
    said: dict[str, Any],
    question: Question,
    best: Candidate,
    study: Study,
    load: Load,
    runs: tuple[Report, ...],
    found: Found | None,
) -> dict[str, Any]:
    """Everything, under the names of `Report`; the same words give the same object."""
    input_len, output_len = load.mean
    told: dict[str, Any] = {
        "model": question.model,
        "engine": question.engine,
        "layout": {**cut_json(best.cut), "gpus_per_replica": study.gpus_each},
        "hardware": view.hardware(question),
        "policy": study.policy,
        "predicted_capacity": study.capacity,
        "load": {
            "input_len": input_len,
            "output_len": output_len,
            "burstiness": load.burstiness,
            "trace": said.get("trace"),
            "seed": load.seed,
        },
        "duration_s": study.times.duration_s,
        "warmup_s": study.times.warmup_s,
        "slo": str(study.objective) if study.objective else None,
        "runs": [report_json(run) for run in runs],
    }
    if found is not None:
        told["find"] = {
            "what": said["find"],
            "value": found.value,
            "reason": found.reason or None,
            "best": report_json(found.report) if found.report else None,
        }
    return told


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
