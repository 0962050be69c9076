"""weft plan MODEL --users N --slo TARGETS: simulate the planned deployment, and tell whether it keeps the promise."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import msgspec

from weft.architectures.model import Model
from weft.cli import plan_outputs, simulate_study, simulate_view
from weft.cli.parser import UsageError
from weft.cli.plan import NOTHING_FITS
from weft.cli.simulate_flags import SIMULATE
from weft.cli.simulate_runs import find_count, finite, report_json, run_once
from weft.errors import WeftError
from weft.planner.plan_json import simulate_command
from weft.planner.question import Question
from weft.planner.ranking import Candidate
from weft.planner.search import search
from weft.simulate.capacity_search import CapacityResult
from weft.simulate.load import SimulatedLoad
from weft.simulate.objective import format_duration, parse_objective
from weft.simulate.report import Report
from weft.simulate.study import Study

REQUESTS = 2000  # of a run: enough for a p95 to a few percent
LEAST_S = 60.0  # of a run at a rate: an overload shows only as the queue grows
TURNS = 8  # of a user, a request and the time to think each
# Flags of a plan that a simulation has no use for, and what to do about each.
REFUSED = {
    "concurrency": "the simulated load says how many requests run at once; leave --concurrency out",
    "speculative_config": "guesses are not simulated; leave --speculative-config out",
    "emit": "--slo judges a plan and --emit writes it down; give one of them",
    "check": "--slo judges a plan and --check a claim; give one of them",
}


def check(arguments: Namespace) -> None:
    """Raises UsageError for a promise without a load, a load without a promise, and flags that exclude either."""
    given = vars(arguments)
    loads = [f"--{name} {given[name]}" for name in ("users", "rate") if name in given]
    if "slo" not in given:
        named = loads[0] if loads else "--think"
        raise UsageError(
            f"{named} needs a promise to be judged by, as in --slo ttft_p95=1s; without one: weft simulate MODEL"
        )
    if not loads:
        raise UsageError(f"--slo {given['slo']} needs a load, as in --users 300 or --rate 4")
    for name, remedy in REFUSED.items():
        if given.get(name) is not None:
            raise UsageError(remedy)
    simulate_study.check(given)
    parse_objective(given["slo"])


def main(arguments: Namespace, model: Model) -> int:
    """Print the plan with the verdict on the promise; 3 if it is not kept or nothing fits."""
    given = with_defaults(arguments)
    load, longest = simulate_study.asked(vars(given), model)
    question = simulate_study.questioned(given, model, load, longest)
    answer = search(question)
    promise = simulated_promise(vars(given), question, answer.best, load) if answer.best else None
    plan_outputs.tell(arguments, answer, model, promise)
    return 0 if promise and promise["kept"] else NOTHING_FITS


def with_defaults(arguments: Namespace) -> Namespace:
    """The arguments as weft simulate would have them: its defaults, and lengths as texts."""
    defaults = {flag.dest: flag.default for _, flags in SIMULATE for flag in flags if flag.default is not None}
    lengths = {name: f"{getattr(arguments, name)}" for name in ("input_len", "output_len") if hasattr(arguments, name)}
    return Namespace(**{**defaults, **vars(arguments), **lengths})


def simulated_promise(
    given: dict[str, Any], question: Question, best: Candidate, load: SimulatedLoad
) -> dict[str, Any]:
    """The verdict as JSON has it: `kept`, its text, each target, the run, and what is needed if it is not kept."""
    given = {**given, "duration": f"{watched_s(given, load, best):g}s"}
    study = simulate_study.studied(given, question, best, load)
    report = run_once(study, load)
    needed = None if report.met else what_is_needed(given, question, best, load, report.replicas)
    promise = {
        "kept": bool(report.met),
        "text": verdict(load, report),
        "slo": str(study.objective),
        "users": load.users,
        "rate": load.rate,
        "think_s": load.think_s,
        "replicas": report.replicas,
        "gpus": report.gpus,
        "command": simulation(given, question, best),
        "targets": [msgspec.to_builtins(target) for target in report.objective],
        "needed": needed,
        "run": report_json(report),
    }
    told: dict[str, Any] = finite(promise)
    return told


def watched_s(given: dict[str, Any], load: SimulatedLoad, best: Candidate) -> float:
    """Seconds of virtual time that bring about REQUESTS requests, and that each user has time for a few; no more than
    weft simulate takes by itself."""
    turn_s = best.predicted.ttft_s + load.mean[1] / best.predicted.single_tok_s + load.think_s
    rate = load.offered or (load.users or 1) / turn_s
    enough_s = max(REQUESTS / rate, TURNS * turn_s, 0.0 if load.users else LEAST_S)
    usual_s = simulate_study.usual_duration(given, load, best, best.layout.data_parallel)
    return float(f"{min(usual_s, enough_s):.2g}")


def simulation(given: dict[str, Any], question: Question, best: Candidate) -> str | None:
    """The command that runs the same simulation; None for a device map, which no flag of it repeats."""
    shown = simulate_command(question, best)
    return f"{shown} --duration {given['duration']}" if shown else None


def verdict(load: SimulatedLoad, report: Report) -> str:
    """ "Promise kept with 50 users: ttft_p95 292 ms (1 s promised), tpot_p95 42.6 ms (50 ms promised)"."""
    who = f"{load.users:,} users" if load.users else f"{load.rate:g} requests/s"
    if load.think_s:
        who += f" who wait {format_duration(load.think_s)} between requests"
    targets = ", ".join(
        f"{target.target} {format_duration(target.value_s)} ({format_duration(target.limit_s)} promised)"
        for target in report.objective
    )
    return f"Promise {'kept' if report.met else 'not kept'} with {who}: {targets}"


def what_is_needed(
    given: dict[str, Any], question: Question, best: Candidate, load: SimulatedLoad, too_few: int
) -> dict[str, Any]:
    """The fewest replicas that keep the promise, with the command that shows it; or why no number of them does."""
    try:
        study = simulate_study.studied({**given, "find": "replicas"}, question, best, load)
        found = find_count(study, load, best, too_few=too_few)
    except WeftError as error:
        return {"replicas": None, "gpus": None, "command": None, "text": f"more replicas were not tried: {error}"}
    return told_need(simulation(given, question, best), study, found)


def told_need(shown: str | None, study: Study, found: CapacityResult) -> dict[str, Any]:
    """The answer of a search for replicas as JSON has it; `shown` is the command that simulates the plan's own."""
    if found.report is None:
        text = f"no number of replicas keeps it: {found.reason}"
        return {"replicas": None, "gpus": None, "command": None, "text": text}
    count = found.report.replicas
    words = f"{shown} --replicas {count}" if shown else None
    text = f"{count:,} replicas ({simulate_view.devices(found.report.gpus, study)}) keep it"
    if words:
        text += f": {words}"
    return {"replicas": count, "gpus": found.report.gpus, "command": words, "text": text}
