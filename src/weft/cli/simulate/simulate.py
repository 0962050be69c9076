"""weft simulate MODEL: waiting times under a load, the highest load, or the number of replicas for a promise."""

from __future__ import annotations

import json
import sys
from math import ceil
from typing import Any

import msgspec

from weft.cli.flags.simulate_flags import SimulateArguments
from weft.cli.plan_question import NOTHING_FITS, find_model
from weft.cli.simulate import plots, view
from weft.cli.simulate.runs import find_limit, finite, first_guess, report_json, run_rates, simulated_rates
from weft.cli.simulate.study import build_simulation_question, build_study, check_load_flags, parse_load
from weft.cli.simulate.verdict import judge_run, judge_sweep
from weft.planner.question import Question
from weft.planner.report.plan_json import cut_json
from weft.planner.search.ranking import Candidate
from weft.planner.search.search import search
from weft.study.simulate.capacity_search import CapacityResult
from weft.study.simulate.load import SimulatedLoad
from weft.study.simulate.report import Report
from weft.study.simulate.study import Study


def main(arguments: SimulateArguments) -> int:
    """Simulate and print the report; return 3 if the model does not fit, or the promise of the run is not kept."""
    check_load_flags(arguments)
    model = find_model(arguments.model, arguments.source)
    load, longest = parse_load(arguments, model)
    question = build_simulation_question(arguments, model, load, longest)
    answer = search(question)
    if answer.best is None:
        print(
            f"{model.name} does not fit this hardware: {answer.obstacle}; weft plan shows what would help",
            file=sys.stderr,
        )
        return NOTHING_FITS
    study = build_study(arguments, question, answer.best, load)
    check_runs(arguments, study, load)
    capacity, runs = run_study(arguments, study, load, answer.best)
    judged = None if capacity else judge_run(study, runs[0]) if len(runs) == 1 else judge_sweep(study, runs)
    if arguments.answer.json:
        document = as_json(arguments, question, answer.best, study, load, runs, capacity)
        if judged is not None:
            document["verdict"] = msgspec.to_builtins(judged)
        print(json.dumps(finite(document)))
    else:
        first = view.verdict(study, capacity) if capacity else [judged.text] if judged else []
        print("\n".join([*first, "", *view.heading(question, answer.best, study, load)]))
        view.print_runs(study, load, runs, capacity)
    if arguments.answer.plot is not None:
        plots.write_plots(arguments.answer.plot, view.deployment_title(question, answer.best), study, runs, capacity)
    unkept = capacity.value is None if capacity else judged is not None and judged.kept is False and len(runs) == 1
    return NOTHING_FITS if unkept else 0


def check_runs(arguments: SimulateArguments, study: Study, load: SimulatedLoad) -> None:
    """Raise an error for a run that is too long to be simulated, before the first one starts."""
    if arguments.answer.find == "replicas":
        study.check_run_length(load, ceil(first_guess(study, load)))
    elif arguments.answer.find is None:
        for rate in simulated_rates(arguments.load, study, load):
            study.check_run_length(msgspec.structs.replace(load, rate=rate))


def run_study(
    arguments: SimulateArguments, study: Study, load: SimulatedLoad, best: Candidate
) -> tuple[CapacityResult | None, tuple[Report, ...]]:
    """The result of --find, None without the flag, and the reports of all runs in ascending order of the load."""
    if arguments.answer.find is None:
        return None, tuple(run_rates(arguments, study, load))
    capacity = find_limit(arguments, study, load, best)
    return capacity, tuple(sorted(capacity.runs, key=lambda run: (run.replicas, run.rate or 0.0)))


def as_json(
    arguments: SimulateArguments,
    question: Question,
    best: Candidate,
    study: Study,
    load: SimulatedLoad,
    runs: tuple[Report, ...],
    capacity: CapacityResult | None,
) -> dict[str, Any]:
    """The whole report as JSON; runs have the fields of `Report`. The same command line gives the same object."""
    input_len, output_len = load.mean
    document: dict[str, Any] = {
        "model": question.model,
        "engine": question.engine,
        "layout": {**cut_json(best.cut), "gpus_per_replica": study.gpus_each},
        "hardware": view.hardware_text(question),
        "policy": study.policy,
        "predicted_capacity": study.capacity,
        "load": {
            "input_len": input_len,
            "output_len": output_len,
            "burstiness": load.burstiness,
            "trace": arguments.load.trace,
            "seed": load.seed,
        },
        "duration_s": study.times.duration_s,
        "warmup_s": study.times.warmup_s,
        "slo": str(study.objective) if study.objective else None,
        "runs": [report_json(run) for run in runs],
    }
    if capacity is not None:
        document["find"] = {
            "what": arguments.answer.find,
            "value": capacity.value,
            "reason": capacity.reason or None,
            "best": report_json(capacity.report) if capacity.report else None,
        }
    return document
