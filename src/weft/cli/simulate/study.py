"""SimulatedLoad, deployment and duration of a simulation, from the flags of weft simulate."""

from __future__ import annotations

from argparse import Namespace
from math import inf
from typing import Any

import msgspec

from weft.checkpoint.architectures.model import Model
from weft.cli import plot
from weft.cli.parser import UsageError
from weft.cli.plan_question import build_question, repeated_flags
from weft.errors import ConfigError, PlanError
from weft.planner.deployment import default_lengths
from weft.planner.question import Question
from weft.planner.search.ranking import Candidate
from weft.study.simulate.lengths import FixedLength, Lengths, UniformLength, parse_lengths
from weft.study.simulate.load import RequestDistribution, SimulatedLoad, trace_rate
from weft.study.simulate.objective import parse_duration, parse_objective
from weft.study.simulate.replica import ReplicaSpec
from weft.study.simulate.replica_specs import SchedulerLimits, replica_specs
from weft.study.simulate.study import MeasurementWindow, Study
from weft.study.simulate.trace import TraceRow, read_trace

DURATION_S = 600.0  # seconds of virtual time if nothing is slow; longer for MIN_ANSWERS or MIN_REQUESTS
MIN_ANSWERS = 20  # answers, one after the other, that the time has room for
MIN_REQUESTS = 300  # requests that arrive at the lowest rate
WARMUP = 0.1  # share of the duration
SHARES = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0)  # shares of the predicted capacity: the rates if no load is given
FINDING_RUNS = 8  # about as many runs as a search makes


def check_load_flags(flags: dict[str, Any]) -> None:
    """Raise UsageError for flags that contradict each other, before any file or model is read."""
    _check_loads(flags)
    _check_lengths(flags)
    if "find" in flags:
        _check_find(flags)
    if "plot" in flags:
        plot.check_image_path(flags["plot"])


def _check_loads(flags: dict[str, Any]) -> None:
    loads = [f"--{name}" for name in ("rate", "rates", "users") if name in flags]
    if len(loads) > 1:
        raise UsageError(f"{loads[0]} and {loads[1]} are different loads; give one of them", code="two-loads")
    if "users" in flags and "trace" in flags:
        raise UsageError("--users and --trace are different loads; give one of them", code="two-loads")
    if "think" in flags and "users" not in flags:
        raise UsageError("--think is the time that users think; give --users too", code="think-without-users")


def _check_lengths(flags: dict[str, Any]) -> None:
    excluded = {"trace": ("input_len", "output_len", "prefix_len", "lengths"), "lengths": ("input_len", "output_len")}
    for file, names in excluded.items():
        twice = [name for name in names if name in flags]
        if file in flags and twice:
            raise UsageError(
                f"--{file} has lengths of its own; leave --{twice[0].replace('_', '-')} out", code="lengths-given-twice"
            )


def _check_find(flags: dict[str, Any]) -> None:
    wanted = flags["find"]
    if "slo" not in flags:
        raise UsageError(
            f"--find {wanted} needs a promise, as in --slo ttft_p95=1s,tpot_p95=50ms", code="promise-missing"
        )
    if "users" in flags:
        raise UsageError("--find needs a rate of requests or a trace, not --users", code="find-with-users")
    if wanted in flags:
        raise UsageError(f"--find {wanted} finds that number; leave --{wanted} out", code="found-number-given")
    if wanted == "replicas" and not {"rate", "trace"} & flags.keys():
        raise UsageError("--find replicas needs the load, as in --rate 10 or --trace FILE", code="load-missing")
    if "rates" in flags:
        raise UsageError(f"--find {wanted} takes one load; leave --rates out", code="find-with-several-rates")


def parse_load(flags: dict[str, Any], model: Model) -> tuple[SimulatedLoad, int | None]:
    """The load of the flags, and the tokens of its longest request, None if that has no limit.

    Raises ConfigError for requests that are longer than the model's context.
    """
    most = flags.get("max_model_len") or model.shape.longest
    trace = read_trace(flags["trace"]) if "trace" in flags else ()
    drawn = parse_drawn(flags, model, most)
    load = SimulatedLoad(
        distribution=drawn,
        rate=flags.get("rate"),
        burstiness=flags["burstiness"],
        users=flags.get("users"),
        think_s=parse_duration(flags["think"], "--think") if "think" in flags else 0.0,
        trace=trace,
        seed=flags["seed"],
    )
    if trace and trace_rate(trace) == inf:
        raise ConfigError(
            f"trace {flags['trace']}: all its requests arrive at the same time, so it has no duration",
            code="trace-without-duration",
        )
    if rows := trace or drawn.rows:
        return load, min(longest_row(rows), most)
    longest = longest_drawn(drawn.input_len, drawn.output_len)
    if longest is not None and longest > most:
        raise ConfigError(
            f"--input-len and --output-len make up to {longest:,} tokens; {model.name} goes up to {most:,}",
            code="lengths-above-model",
        )
    return load, longest


def parse_drawn(flags: dict[str, Any], model: Model, most: int) -> RequestDistribution:
    """The distribution of the requests' tokens; no request has more than `most`."""
    rows = read_trace(flags["lengths"]) if "lengths" in flags else ()
    input_len, output_len = drawn_lengths(flags, most)
    prefix_len = flags.get("prefix_len", 0)
    if prefix_len >= most:
        raise ConfigError(
            f"--prefix-len is {prefix_len:,}; {model.name} goes up to {most:,} tokens", code="prefix-above-model"
        )
    return RequestDistribution(
        input_len=input_len,
        output_len=output_len,
        rows=rows,
        prefixes=flags["prefixes"],
        prefix_len=prefix_len,
        most=most,
    )


def drawn_lengths(flags: dict[str, Any], most: int) -> tuple[Lengths, Lengths]:
    """Distributions of the tokens of prompts and answers; together they do not exceed `most` by default.

    Without flags, the mean lengths are weft plan's, and answers have from half to one and a half of the mean. If all
    answers had the same length, requests that begin together would end together, and so would those after them.
    """
    input_len = parse_lengths(flags["input_len"], "--input-len") if "input_len" in flags else None
    output_len = parse_lengths(flags["output_len"], "--output-len") if "output_len" in flags else None
    usual_in, usual_out = default_lengths(longest_or_mean(input_len), longest_or_mean(output_len), most)
    high = max(usual_out, min(usual_out * 3 // 2, most - usual_in))
    return input_len or FixedLength(usual_in), output_len or UniformLength(2 * usual_out - high, high)


def longest_or_mean(lengths: Lengths | None) -> int | None:
    """The largest length, or the mean of lengths without a limit; None without lengths."""
    return None if lengths is None else lengths.longest or round(lengths.mean)


def longest_row(rows: tuple[TraceRow, ...]) -> int:
    """Tokens of the longest request in a trace."""
    return max(row.request.input_len + row.request.output_len for row in rows)


def longest_drawn(input_len: Lengths, output_len: Lengths) -> int | None:
    """Tokens of the longest request that can be drawn; None without a limit."""
    ends = input_len.longest, output_len.longest
    return None if ends[0] is None or ends[1] is None else ends[0] + ends[1]


def build_simulation_question(arguments: Namespace, model: Model, load: SimulatedLoad, longest: int | None) -> Question:
    """The question for the planner: the load's mean request, the spread of its answers, and room for its longest."""
    input_len, output_len = (max(1, round(mean)) for mean in load.mean)
    mean_arguments = Namespace(**{**vars(arguments), "input_len": input_len, "output_len": output_len})
    mean_arguments.__dict__.pop("concurrency", None)
    question = build_question(mean_arguments, model)
    work = question.workload
    work = msgspec.structs.replace(work, max_model_len=work.max_model_len or longest, output_spread=load.output_spread)
    # A command for a similar question has the lengths of the flags, not their means.
    return msgspec.structs.replace(question, workload=work, flags=tuple(repeated_flags(vars(arguments))))


def build_study(flags: dict[str, Any], question: Question, best: Candidate, load: SimulatedLoad) -> Study:
    """The simulation of the best layout. Raises PlanError for a number of replicas that the layout cannot have."""
    replicas = study_replicas(flags, question, best)
    sample = flags.get("sample_replicas")
    return Study(
        specs=replicas,
        gpus_each=best.layout.parallelism.engine_ranks,
        device="CPU" if question.cluster.on_cpu else "GPU",
        capacity=replica_capacity(best, load),
        times=simulated_times(flags, load, usual_duration(flags, load, best, len(replicas))),
        policy=flags["policy"],
        price=question.price,
        objective=parse_objective(flags["slo"]) if "slo" in flags else None,
        sample=len(replicas) if sample == 0 else sample,
        runs=expected_runs(flags),
        prefix_caching=flags.get("enable_prefix_caching"),
        stretches=flags.get("stretches", True),
    )


def study_replicas(flags: dict[str, Any], question: Question, best: Candidate) -> list[ReplicaSpec]:
    """The replicas of the layout, or as many as --replicas says."""
    limits = SchedulerLimits(
        max_num_seqs=flags.get("max_num_seqs"),
        lookahead=flags.get("async_scheduling"),
        **({"max_num_queued": flags["max_num_queued_reqs"]} if "max_num_queued_reqs" in flags else {}),
    )
    replicas = replica_specs(question, best, limits)
    other_count = "replicas" in flags or flags.get("find") == "replicas"
    if other_count and best.layout.parallelism.shares_experts:
        raise PlanError(
            f"{best.cut}: its replicas share one set of experts, so their number is part of the layout; describe "
            "other hardware, or give --no-enable-expert-parallel",
            code="replicas-share-experts",
        )
    if "replicas" in flags:
        return [replicas[number % len(replicas)] for number in range(flags["replicas"])]
    return replicas


def expected_runs(flags: dict[str, Any]) -> int:
    """Number of runs that the flags will need, about."""
    if "find" in flags:
        return FINDING_RUNS
    return len(flags.get("rates", SHARES if no_load_given(flags) else (1,)))


def replica_capacity(best: Candidate, load: SimulatedLoad) -> float:
    """Predicted requests per second of one saturated replica."""
    return best.predicted.saturated_tok_s / best.layout.parallelism.engines / load.mean[1]


def usual_duration(flags: dict[str, Any], load: SimulatedLoad, best: Candidate, replicas: int) -> float:
    """Seconds of virtual time without --duration, long enough for slow answers and low rates; inf for a trace."""
    if load.trace:
        return inf
    answer_s = best.predicted.ttft_s + load.mean[1] / best.predicted.single_tok_s
    enough = [DURATION_S, MIN_ANSWERS * (answer_s + load.think_s)]
    lowest = min(flags.get("rates", ()), default=load.rate)
    if no_load_given(flags):
        lowest = SHARES[0] * replica_capacity(best, load) * replicas
    if lowest:
        enough.append(MIN_REQUESTS / lowest)
    return float(f"{max(enough):.2g}")


def simulated_times(flags: dict[str, Any], load: SimulatedLoad, usual_s: float) -> MeasurementWindow:
    """Duration and warm-up; a trace has no warm-up by default."""
    duration_s = parse_duration(flags["duration"], "--duration") if "duration" in flags else usual_s
    warmup_s = 0.0 if load.trace else WARMUP * duration_s
    if "warmup" in flags:
        warmup_s = 0.0 if flags["warmup"].strip() in ("0", "0s") else parse_duration(flags["warmup"], "--warmup")
    if warmup_s >= duration_s:
        raise UsageError(
            f"--warmup is {warmup_s:g} s of {duration_s:g} s, which leaves no time to measure", code="warmup-too-long"
        )
    return MeasurementWindow(duration_s=duration_s, warmup_s=warmup_s)


def no_load_given(flags: dict[str, Any]) -> bool:
    """Return True if the flags give no load."""
    return not any(name in flags for name in ("rate", "rates", "users", "trace"))
