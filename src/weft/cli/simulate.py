"""weft simulate MODEL: how long requests would wait, what the GPUs would carry, and how many of them that takes."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from math import ceil
from typing import Any

import msgspec

from weft.cli import simulate_plots as plots
from weft.cli import simulate_view as view
from weft.cli.plan import NOTHING_FITS, look_up
from weft.cli.simulate_runs import find_answer, finite, first_guess, rates, report_json, swept
from weft.cli.simulate_study import asked, check, questioned, studied
from weft.planner.plan_json import cut_json
from weft.planner.question import Question
from weft.planner.ranking import Candidate
from weft.planner.search import search
from weft.simulate.capacity_search import CapacityResult
from weft.simulate.load import SimulatedLoad
from weft.simulate.report import Report
from weft.simulate.study import Study


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
        study.check_run_length(load, ceil(first_guess(study, load)))
    elif "find" not in said:
        for rate in rates(said, study, load):
            study.check_run_length(msgspec.structs.replace(load, rate=rate))
    head = view.heading(question, answer.best, study, load)
    if not said.get("json"):
        print("\n".join(head))
    if "find" in said:
        found = find_answer(said, study, load, answer.best)
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


def as_json(
    said: dict[str, Any],
    question: Question,
    best: Candidate,
    study: Study,
    load: SimulatedLoad,
    runs: tuple[Report, ...],
    found: CapacityResult | None,
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
