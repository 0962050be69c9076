"""weft plan MODEL --users N --slo TARGETS: simulate the best layout, and check the promise."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import msgspec

from weft.checkpoint.architectures.model import Model
from weft.cli.flags.simulate_flags import SIMULATE
from weft.cli.parser import UsageError
from weft.cli.plan import outputs
from weft.cli.plan_question import NOTHING_FITS
from weft.cli.simulate import study as simulate_study
from weft.cli.simulate import view
from weft.cli.simulate.runs import find_count, finite, report_json, run_once
from weft.errors import WeftError
from weft.planner.question import Question
from weft.planner.report.plan_json import simulate_command
from weft.planner.search.ranking import Candidate
from weft.planner.search.search import search
from weft.study.simulate.capacity_search import CapacityResult
from weft.study.simulate.load import SimulatedLoad
from weft.study.simulate.objective import format_duration, parse_objective
from weft.study.simulate.report import Report
from weft.study.simulate.study import Study

REQUESTS = 2000  # requests of a run: enough for a p95 to a few percent
MIN_RUN_S = 60.0  # seconds of a run at a rate: an overload shows only as the queue grows
TURNS = 8  # requests of each user, each with the time to think
# Flags of a plan that exclude a simulation, with the message for each.
REFUSED = {
    "concurrency": "the simulated load determines how many requests run at once; leave --concurrency out",
    "speculative_config": "speculative decoding is not simulated; leave --speculative-config out",
    "deterministic": "the price of --deterministic is not simulated; leave it out",
    "emit": "--slo checks a plan and --emit writes one; give one of them",
    "check": "--slo checks a plan and --check a claim; give one of them",
}


def check_promise_flags(arguments: Namespace) -> None:
    """Raise UsageError for a promise without a load, a load without a promise, and flags that exclude both."""
    flags = vars(arguments)
    loads = [f"--{name} {flags[name]}" for name in ("users", "rate") if name in flags]
    if "slo" not in flags:
        named = loads[0] if loads else "--think"
        raise UsageError(
            f"{named} needs a promise, as in --slo ttft_p95=1s; without a promise: weft simulate MODEL",
            code="promise-missing",
        )
    if not loads:
        raise UsageError(f"--slo {flags['slo']} needs a load, as in --users 300 or --rate 4", code="load-missing")
    for name, remedy in REFUSED.items():
        if flags.get(name) is not None:
            raise UsageError(remedy, code="excluded-by-slo")
    simulate_study.check_load_flags(flags)
    parse_objective(flags["slo"])


def main(arguments: Namespace, model: Model) -> int:
    """Print the plan with the verdict on the promise; 3 if it is not kept or nothing fits."""
    flags = with_defaults(arguments)
    load, longest = simulate_study.parse_load(vars(flags), model)
    question = simulate_study.build_simulation_question(flags, model, load, longest)
    answer = search(question)
    promise = simulated_promise(vars(flags), question, answer.best, load) if answer.best else None
    outputs.write_outputs(arguments, answer, model, promise)
    return 0 if promise and promise["kept"] else NOTHING_FITS


def with_defaults(arguments: Namespace) -> Namespace:
    """The arguments in the form of weft simulate: with its defaults, and lengths as text."""
    defaults = {flag.dest: flag.default for _, flags in SIMULATE for flag in flags if flag.default is not None}
    lengths = {name: f"{getattr(arguments, name)}" for name in ("input_len", "output_len") if hasattr(arguments, name)}
    return Namespace(**{**defaults, **vars(arguments), **lengths})


def simulated_promise(
    flags: dict[str, Any], question: Question, best: Candidate, load: SimulatedLoad
) -> dict[str, Any]:
    """The verdict as JSON: `kept`, its text, each target, the run, and `needed` replicas if it is not kept."""
    flags = {**flags, "duration": f"{simulated_s(flags, load, best):g}s"}
    study = simulate_study.build_study(flags, question, best, load)
    report = run_once(study, load)
    needed = None if report.met else replicas_needed(flags, question, best, load, report.replicas)
    promise = {
        "kept": bool(report.met),
        "text": verdict(load, report),
        "slo": str(study.objective),
        "users": load.users,
        "rate": load.rate,
        "think_s": load.think_s,
        "replicas": report.replicas,
        "gpus": report.gpus,
        "command": simulation_command(flags, question, best),
        "targets": [msgspec.to_builtins(target) for target in report.objective],
        "needed": needed,
        "run": report_json(report),
    }
    as_json: dict[str, Any] = finite(promise)
    return as_json


def simulated_s(flags: dict[str, Any], load: SimulatedLoad, best: Candidate) -> float:
    """Seconds of virtual time for REQUESTS requests and TURNS of each user, at most the duration of weft simulate."""
    turn_s = best.predicted.ttft_s + load.mean[1] / best.predicted.single_tok_s + load.think_s
    rate = load.offered or (load.users or 1) / turn_s
    enough_s = max(REQUESTS / rate, TURNS * turn_s, 0.0 if load.users else MIN_RUN_S)
    usual_s = simulate_study.usual_duration(flags, load, best, best.layout.parallelism.engines)
    return float(f"{min(usual_s, enough_s):.2g}")


def simulation_command(flags: dict[str, Any], question: Question, best: Candidate) -> str | None:
    """The command that runs the same simulation; None for a device map, which weft simulate does not take."""
    command = simulate_command(question, best)
    return f"{command} --duration {flags['duration']}" if command else None


def verdict(load: SimulatedLoad, report: Report) -> str:
    """ "Promise kept with 50 users: ttft_p95 292 ms (1 s promised), tpot_p95 42.6 ms (50 ms promised)"."""
    demand = f"{load.users:,} users" if load.users else f"{load.rate:g} requests/s"
    if load.think_s:
        demand += f" who wait {format_duration(load.think_s)} between requests"
    targets = ", ".join(
        f"{target.target} {format_duration(target.value_s)} ({format_duration(target.limit_s)} promised)"
        for target in report.objective
    )
    return f"Promise {'kept' if report.met else 'not kept'} with {demand}: {targets}"


def replicas_needed(
    flags: dict[str, Any], question: Question, best: Candidate, load: SimulatedLoad, too_few: int
) -> dict[str, Any]:
    """The fewest replicas that keep the promise, with the command that simulates them, or the reason why none do."""
    try:
        study = simulate_study.build_study({**flags, "find": "replicas"}, question, best, load)
        result = find_count(study, load, best, too_few=too_few)
    except WeftError as error:
        return {"replicas": None, "gpus": None, "command": None, "text": f"more replicas were not tried: {error}"}
    return replicas_json(simulation_command(flags, question, best), study, result)


def replicas_json(command: str | None, study: Study, result: CapacityResult) -> dict[str, Any]:
    """The result of a search for replicas as JSON; `command` simulates the plan's own replicas."""
    if result.report is None:
        text = f"no number of replicas keeps it: {result.reason}"
        return {"replicas": None, "gpus": None, "command": None, "text": text}
    count = result.report.replicas
    with_replicas = f"{command} --replicas {count}" if command else None
    text = f"{count:,} replicas ({view.devices(result.report.gpus, study)}) keep it"
    if with_replicas:
        text += f": {with_replicas}"
    return {"replicas": count, "gpus": result.report.gpus, "command": with_replicas, "text": text}
