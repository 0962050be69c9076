"""weft plan MODEL --users N --slo TARGETS: simulate the best layout, and check the promise."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from weft.checkpoint.architectures.model import Model
from weft.cli.flags.plan_flags import LimitFlags, PlanArguments
from weft.cli.flags.simulate_flags import Load, Queue, Service, SimulateArguments, SimulationAnswer
from weft.cli.parser import UsageError
from weft.cli.plan import outputs
from weft.cli.plan_question import NOTHING_FITS
from weft.cli.simulate import study as simulate_study
from weft.cli.simulate import view
from weft.cli.simulate.runs import find_count, finite, report_json, run_once
from weft.errors import WeftError
from weft.plan.limits import limits_of
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


def check_promise_flags(arguments: PlanArguments) -> None:
    """Raise UsageError for a promise without a load, a load without a promise, and flags that exclude both."""
    promise, values = arguments.promise, arguments.values()
    loads = [f"--{name} {values[name]}" for name in ("users", "rate") if values[name] is not None]
    if promise.slo is None:
        named = loads[0] if loads else "--think"
        raise UsageError(
            f"{named} needs a promise, as in --slo ttft_p95=1s; without a promise: weft simulate MODEL",
            code="promise-missing",
        )
    if not loads:
        raise UsageError(f"--slo {promise.slo} needs a load, as in --users 300 or --rate 4", code="load-missing")
    for name, remedy in REFUSED.items():
        if name in arguments.given and values[name] is not None:
            raise UsageError(remedy, code="excluded-by-slo")
    simulate_study.check_load_flags(as_simulation(arguments))
    parse_objective(promise.slo)


def main(arguments: PlanArguments, model: Model) -> int:
    """Print the plan with the verdict on the promise; 3 if it is not kept or nothing fits."""
    simulation = as_simulation(arguments)
    load, longest = simulate_study.parse_load(simulation, model)
    question = simulate_study.build_simulation_question(simulation, model, load, longest)
    answer = search(question)
    promise = simulated_promise(simulation, question, answer.best, load) if answer.best else None
    outputs.write_outputs(arguments.answer, answer, model, promise)
    return 0 if promise and promise["kept"] else NOTHING_FITS


def as_simulation(arguments: PlanArguments) -> SimulateArguments:
    """The arguments of weft simulate for the promise, with its defaults, and lengths as text."""
    subject, promise = arguments.subject, arguments.promise
    input_len, output_len = (
        None if length is None else f"{length}" for length in (subject.workload.input_len, subject.workload.output_len)
    )
    return SimulateArguments(
        command="simulate",
        model=arguments.model,
        given=arguments.given,
        source=subject.source,
        hardware=subject.hardware,
        layout=subject.layout,
        aim=subject.aim,
        load=Load(
            rate=promise.rate, users=promise.users, think=promise.think, input_len=input_len, output_len=output_len
        ),
        service=Service(),
        limits=LimitFlags(**limits_of(subject.counted)),
        queue=Queue(),
        answer=SimulationAnswer(slo=promise.slo),
    )


def simulated_promise(
    simulation: SimulateArguments, question: Question, best: Candidate, load: SimulatedLoad
) -> dict[str, Any]:
    """The verdict as JSON: `kept`, its text, each target, the run, and `needed` replicas if it is not kept."""
    duration = f"{simulated_s(simulation, load, best):g}s"
    simulation = replace(simulation, load=replace(simulation.load, duration=duration))
    study = simulate_study.build_study(simulation, question, best, load)
    report = run_once(study, load)
    needed = None if report.met else replicas_needed(simulation, question, best, load, report.replicas)
    promise = {
        "kept": bool(report.met),
        "text": verdict(load, report),
        "slo": str(study.objective),
        "users": load.users,
        "rate": load.rate,
        "think_s": load.think_s,
        "replicas": report.replicas,
        "gpus": report.gpus,
        "command": simulation_command(simulation.load, question, best),
        "targets": [msgspec.to_builtins(target) for target in report.objective],
        "needed": needed,
        "run": report_json(report),
    }
    as_json: dict[str, Any] = finite(promise)
    return as_json


def simulated_s(simulation: SimulateArguments, load: SimulatedLoad, best: Candidate) -> float:
    """Seconds of virtual time for REQUESTS requests and TURNS of each user, at most the duration of weft simulate."""
    turn_s = best.predicted.ttft_s + load.mean[1] / best.predicted.single_tok_s + load.think_s
    rate = load.offered or (load.users or 1) / turn_s
    enough_s = max(REQUESTS / rate, TURNS * turn_s, 0.0 if load.users else MIN_RUN_S)
    usual_s = simulate_study.usual_duration(simulation, load, best, best.layout.parallelism.engines)
    return float(f"{min(usual_s, enough_s):.2g}")


def simulation_command(load: Load, question: Question, best: Candidate) -> str | None:
    """The command that runs the same simulation; None for a device map, which weft simulate does not take."""
    command = simulate_command(question, best)
    return f"{command} --duration {load.duration}" if command else None


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
    simulation: SimulateArguments, question: Question, best: Candidate, load: SimulatedLoad, too_few: int
) -> dict[str, Any]:
    """The fewest replicas that keep the promise, with the command that simulates them, or the reason why none do."""
    try:
        finding = replace(simulation, answer=replace(simulation.answer, find="replicas"))
        study = simulate_study.build_study(finding, question, best, load)
        result = find_count(study, load, best, too_few=too_few)
    except WeftError as error:
        return {"replicas": None, "gpus": None, "command": None, "text": f"more replicas were not tried: {error}"}
    return replicas_json(simulation_command(simulation.load, question, best), study, result)


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
