"""What the flags of weft simulate ask for: the load, the deployment, and how long it is watched."""

from __future__ import annotations

from argparse import Namespace
from math import inf
from typing import Any

import msgspec

from weft.architectures.model import Model
from weft.cli import plot
from weft.cli.parser import UsageError
from weft.cli.plan import ask, repeated
from weft.errors import ConfigError, PlanError
from weft.planner.deployment import default_lengths
from weft.planner.question import Question
from weft.planner.ranking import Candidate
from weft.simulate.deployment import SchedulerLimits, replica_specs
from weft.simulate.lengths import FixedLength, Lengths, UniformLength, parse_lengths
from weft.simulate.load import RequestDistribution, SimulatedLoad, trace_rate
from weft.simulate.objective import parse_duration, parse_objective
from weft.simulate.study import MeasurementWindow, Study
from weft.simulate.trace import TraceRow, read_trace

DURATION_S = 600.0  # if nothing is slow: otherwise as long as
LEAST_ANSWERS = 20  # answers after each other take,
LEAST_REQUESTS = 300  # and as this many requests of the lowest rate
WARMUP = 0.1  # of the duration
SHARES = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0)  # of the predicted capacity: the rates that nobody has named
FINDING_RUNS = 8  # about as many as a search makes


def check(said: dict[str, Any]) -> None:
    """Raises UsageError for flags that contradict each other, before anything is looked up."""
    loads = [f"--{name}" for name in ("rate", "rates", "users") if name in said]
    if len(loads) > 1:
        raise UsageError(f"{loads[0]} and {loads[1]} are different loads; give one of them")
    if "users" in said and "trace" in said:
        raise UsageError("--users and --trace are different loads; give one of them")
    if "think" in said and "users" not in said:
        raise UsageError("--think is what --users do; give both")
    drawn = [name for name in ("input-len", "output-len", "prefix-len") if name.replace("-", "_") in said]
    for file in ("trace", "lengths"):
        if file in said and any(name != "prefix-len" or file == "trace" for name in drawn):
            raise UsageError(f"--{file} has the lengths itself; leave --{drawn[0]} out")
    if "trace" in said and "lengths" in said:
        raise UsageError("--trace has the lengths itself; leave --lengths out")
    if "find" in said and "slo" not in said:
        raise UsageError(f"--find {said['find']} needs an objective, as in --slo ttft_p95=1s,tpot_p95=50ms")
    if "find" in said and "users" in said:
        raise UsageError("--find goes with a rate of requests, not with --users")
    if said.get("find") == "replicas":
        if "replicas" in said:
            raise UsageError("--find replicas finds how many; leave --replicas out")
        if "rate" not in said and "trace" not in said:
            raise UsageError("--find replicas needs the load, as in --rate 10 or --trace FILE")
    if "find" in said and "rates" in said:
        raise UsageError(f"--find {said['find']} takes one load; leave --rates out")
    if said.get("find") == "rate" and "rate" in said:
        raise UsageError("--find rate finds the rate; leave --rate out")
    if "plot" in said:
        plot.check(said["plot"])


def asked(said: dict[str, Any], model: Model) -> tuple[SimulatedLoad, int | None]:
    """The load, and its longest request where that is known."""
    most = said.get("max_model_len") or model.shape.longest
    trace = read_trace(said["trace"]) if "trace" in said else ()
    rows = read_trace(said["lengths"]) if "lengths" in said else ()
    input_len, output_len = drawn_lengths(said, most)
    if said.get("prefix_len", 0) >= most:
        raise ConfigError(f"--prefix-len is {said['prefix_len']:,}; {model.name} goes up to {most:,} tokens")
    drawn = RequestDistribution(
        input_len=input_len,
        output_len=output_len,
        rows=rows,
        prefixes=said["prefixes"],
        prefix_len=said.get("prefix_len", 0),
        most=most,
    )
    load = SimulatedLoad(
        distribution=drawn,
        rate=said.get("rate"),
        burstiness=said["burstiness"],
        users=said.get("users"),
        think_s=parse_duration(said["think"], "--think") if "think" in said else 0.0,
        trace=trace,
        seed=said["seed"],
    )
    if trace and trace_rate(trace) == inf:
        raise ConfigError(f"trace {said['trace']}: all its requests come at one time; it has no duration")
    longest = longest_of(trace or rows) if trace or rows else longest_drawn(input_len, output_len)
    if longest is not None and longest > most:
        if not trace and not rows:
            raise ConfigError(
                f"--input-len and --output-len make up to {longest:,} tokens; {model.name} goes up to {most:,}"
            )
        longest = most
    return load, longest


def drawn_lengths(said: dict[str, Any], most: int) -> tuple[Lengths, Lengths]:
    """Of prompts and answers, as said; else those that weft plan takes, the answers from half of that to half as much
    again: where all are equally long, requests that begin together end together, and are followed by others that do."""
    input_len = parse_lengths(said["input_len"], "--input-len") if "input_len" in said else None
    output_len = parse_lengths(said["output_len"], "--output-len") if "output_len" in said else None
    usual_in, usual_out = default_lengths(most_of(input_len), most_of(output_len), most)
    high = max(usual_out, min(usual_out * 3 // 2, most - usual_in))
    return input_len or FixedLength(usual_in), output_len or UniformLength(2 * usual_out - high, high)


def most_of(lengths: Lengths | None) -> int | None:
    """The longest of them, or the mean where there is none."""
    return None if lengths is None else lengths.longest or round(lengths.mean)


def longest_of(rows: tuple[TraceRow, ...]) -> int:
    return max(row.request.input_len + row.request.output_len for row in rows)


def longest_drawn(input_len: Lengths, output_len: Lengths) -> int | None:
    ends = input_len.longest, output_len.longest
    return None if ends[0] is None or ends[1] is None else ends[0] + ends[1]


def questioned(arguments: Namespace, model: Model, load: SimulatedLoad, longest: int | None) -> Question:
    """What weft plan would be asked, and how far answers differ: the load's mean request, and room for its longest."""
    input_len, output_len = (max(1, round(mean)) for mean in load.mean)
    asked = Namespace(**{**vars(arguments), "input_len": input_len, "output_len": output_len})
    asked.__dict__.pop("concurrency", None)
    question = ask(asked, model)
    work = question.workload
    work = msgspec.structs.replace(work, max_model_len=work.max_model_len or longest, output_spread=load.output_spread)
    # A command that asks something like it has the lengths as they were given, not their means.
    return msgspec.structs.replace(question, workload=work, flags=tuple(repeated(vars(arguments))))


def studied(said: dict[str, Any], question: Question, best: Candidate, load: SimulatedLoad) -> Study:
    """The deployment as it is simulated."""
    limits = SchedulerLimits(
        max_num_seqs=said.get("max_num_seqs"),
        lookahead=said.get("async_scheduling"),
        **({"max_num_queued": said["max_num_queued_reqs"]} if "max_num_queued_reqs" in said else {}),
    )
    found = replica_specs(question, best, limits)
    counted = "replicas" in said or said.get("find") == "replicas"
    if counted and best.layout.expert_parallel > best.layout.tensor_parallel:
        raise PlanError(
            f"{best.cut}: its replicas share one set of experts, so that their number is part of the layout; describe "
            "other hardware, or give --no-enable-expert-parallel"
        )
    if "replicas" in said:
        found = [found[number % len(found)] for number in range(said["replicas"])]
    sample = said.get("sample_replicas")
    runs = FINDING_RUNS if "find" in said else len(said.get("rates", SHARES if bare(said) else (1,)))
    return Study(
        specs=found,
        gpus_each=best.layout.replica_size,
        device="CPU" if question.cluster.on_cpu else "GPU",
        capacity=capacity(best, load),
        times=times(said, load, usual_duration(said, load, best, len(found))),
        policy=said["policy"],
        price=question.price,
        objective=parse_objective(said["slo"]) if "slo" in said else None,
        sample=len(found) if sample == 0 else sample,
        runs=runs,
        prefix_caching=said.get("enable_prefix_caching"),
        stretches=said.get("stretches", True),
    )


def capacity(best: Candidate, load: SimulatedLoad) -> float:
    """Requests per second that one replica is predicted to answer, saturated."""
    return best.predicted.saturated_tok_s / best.layout.data_parallel / load.mean[1]


def usual_duration(said: dict[str, Any], load: SimulatedLoad, best: Candidate, replicas: int) -> float:
    """Seconds of virtual time that say something of a deployment as slow as this one, if no --duration is given."""
    if load.trace:
        return inf
    answer_s = best.predicted.ttft_s + load.mean[1] / best.predicted.single_tok_s
    enough = [DURATION_S, LEAST_ANSWERS * (answer_s + load.think_s)]
    lowest = min(said.get("rates", ()), default=load.rate)
    if bare(said):
        lowest = SHARES[0] * capacity(best, load) * replicas
    if lowest:
        enough.append(LEAST_REQUESTS / lowest)
    return float(f"{max(enough):.2g}")


def times(said: dict[str, Any], load: SimulatedLoad, usual_s: float) -> MeasurementWindow:
    """The measured time: all of a trace, and all but the beginning of a load that might go on for ever."""
    duration_s = parse_duration(said["duration"], "--duration") if "duration" in said else usual_s
    warmup_s = 0.0 if load.trace else WARMUP * duration_s
    if "warmup" in said:
        warmup_s = 0.0 if said["warmup"].strip() in ("0", "0s") else parse_duration(said["warmup"], "--warmup")
    if warmup_s >= duration_s:
        raise UsageError(f"--warmup is {warmup_s:g} s of {duration_s:g} s; it must leave something to measure")
    return MeasurementWindow(duration_s=duration_s, warmup_s=warmup_s)


def bare(said: dict[str, Any]) -> bool:
    """Whether nobody has said how much load there is."""
    return not any(name in said for name in ("rate", "rates", "users", "trace"))
