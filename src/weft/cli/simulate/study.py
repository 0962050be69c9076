"""SimulatedLoad, deployment and duration of a simulation, from the flags of weft simulate."""

from __future__ import annotations

from math import inf

import msgspec

from weft.checkpoint.architectures.model import Model
from weft.cli import plot
from weft.cli.flags.plan_flags import PlannedEngine, Subject, WorkloadFlags
from weft.cli.flags.simulate_flags import Load, SimulateArguments
from weft.cli.parser import UsageError
from weft.cli.plan_question import build_question, repeated_flags
from weft.errors import ConfigError, PlanError
from weft.plan.limits import limits_of
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


def check_load_flags(arguments: SimulateArguments) -> None:
    """Raise UsageError for flags that contradict each other, before any file or model is read."""
    answer = arguments.answer
    _check_loads(arguments.given)
    _check_lengths(arguments.given)
    if answer.find is not None:
        _check_find(answer.find, arguments.given)
    if answer.plot is not None:
        plot.check_image_path(answer.plot)


def _check_loads(given: frozenset[str]) -> None:
    loads = [f"--{name}" for name in ("rate", "rates", "users") if name in given]
    if len(loads) > 1:
        raise UsageError(f"{loads[0]} and {loads[1]} are different loads; give one of them", code="two-loads")
    if "users" in given and "trace" in given:
        raise UsageError("--users and --trace are different loads; give one of them", code="two-loads")
    if "think" in given and "users" not in given:
        raise UsageError("--think is the time that users think; give --users too", code="think-without-users")


def _check_lengths(given: frozenset[str]) -> None:
    excluded = {"trace": ("input_len", "output_len", "prefix_len", "lengths"), "lengths": ("input_len", "output_len")}
    for file, names in excluded.items():
        twice = [name for name in names if name in given]
        if file in given and twice:
            raise UsageError(
                f"--{file} has lengths of its own; leave --{twice[0].replace('_', '-')} out", code="lengths-given-twice"
            )


def _check_find(wanted: str, given: frozenset[str]) -> None:
    if "slo" not in given:
        raise UsageError(
            f"--find {wanted} needs a promise, as in --slo ttft_p95=1s,tpot_p95=50ms", code="promise-missing"
        )
    if "users" in given:
        raise UsageError("--find needs a rate of requests or a trace, not --users", code="find-with-users")
    if wanted in given:
        raise UsageError(f"--find {wanted} finds that number; leave --{wanted} out", code="found-number-given")
    if wanted == "replicas" and not given & {"rate", "trace"}:
        raise UsageError("--find replicas needs the load, as in --rate 10 or --trace FILE", code="load-missing")
    if "rates" in given:
        raise UsageError(f"--find {wanted} takes one load; leave --rates out", code="find-with-several-rates")


def parse_load(arguments: SimulateArguments, model: Model) -> tuple[SimulatedLoad, int | None]:
    """The load of the flags, and the tokens of its longest request, None if that has no limit.

    Raises ConfigError for requests that are longer than the model's context.
    """
    flags, most = arguments.load, arguments.layout.max_model_len or model.shape.longest
    trace = () if flags.trace is None else read_trace(flags.trace)
    drawn = parse_drawn(flags, model, most)
    load = SimulatedLoad(
        distribution=drawn,
        rate=flags.rate,
        burstiness=flags.burstiness,
        users=flags.users,
        think_s=0.0 if flags.think is None else parse_duration(flags.think, "--think"),
        trace=trace,
        seed=flags.seed,
    )
    if trace and trace_rate(trace) == inf:
        raise ConfigError(
            f"trace {flags.trace}: all its requests arrive at the same time, so it has no duration",
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


def parse_drawn(flags: Load, model: Model, most: int) -> RequestDistribution:
    """The distribution of the requests' tokens; no request has more than `most`."""
    rows = () if flags.lengths is None else read_trace(flags.lengths)
    input_len, output_len = drawn_lengths(flags, most)
    prefix_len = flags.prefix_len or 0
    if prefix_len >= most:
        raise ConfigError(
            f"--prefix-len is {prefix_len:,}; {model.name} goes up to {most:,} tokens", code="prefix-above-model"
        )
    return RequestDistribution(
        input_len=input_len,
        output_len=output_len,
        rows=rows,
        prefixes=flags.prefixes,
        prefix_len=prefix_len,
        most=most,
    )


def drawn_lengths(flags: Load, most: int) -> tuple[Lengths, Lengths]:
    """Distributions of the tokens of prompts and answers; together they do not exceed `most` by default.

    Without flags, the mean lengths are weft plan's, and answers have from half to one and a half of the mean. If all
    answers had the same length, requests that begin together would end together, and so would those after them.
    """
    input_len = None if flags.input_len is None else parse_lengths(flags.input_len, "--input-len")
    output_len = None if flags.output_len is None else parse_lengths(flags.output_len, "--output-len")
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


def build_simulation_question(
    arguments: SimulateArguments, model: Model, load: SimulatedLoad, longest: int | None
) -> Question:
    """The question for the planner: the load's mean request, the spread of its answers, and room for its longest."""
    input_len, output_len = (max(1, round(mean)) for mean in load.mean)
    subject = Subject(
        model=arguments.model,
        source=arguments.source,
        hardware=arguments.hardware,
        layout=arguments.layout,
        counted=PlannedEngine(**limits_of(arguments.limits)),
        aim=arguments.aim,
        workload=WorkloadFlags(input_len=input_len, output_len=output_len),
    )
    question = build_question(subject, model)
    work = question.workload
    work = msgspec.structs.replace(work, max_model_len=work.max_model_len or longest, output_spread=load.output_spread)
    # A command for a similar question has the lengths of the flags, not their means.
    flags = tuple(repeated_flags(arguments.model, arguments.values()))
    return msgspec.structs.replace(question, workload=work, flags=flags)


def build_study(arguments: SimulateArguments, question: Question, best: Candidate, load: SimulatedLoad) -> Study:
    """The simulation of the best layout. Raises PlanError for a number of replicas that the layout cannot have."""
    answer, service, sample = arguments.answer, arguments.service, arguments.answer.sample_replicas
    replicas = study_replicas(arguments, question, best)
    return Study(
        specs=replicas,
        gpus_each=best.layout.parallelism.engine_ranks,
        device="CPU" if question.cluster.on_cpu else "GPU",
        capacity=replica_capacity(best, load),
        times=simulated_times(arguments.load, load, usual_duration(arguments, load, best, len(replicas))),
        policy=service.policy,
        price=question.price,
        objective=None if answer.slo is None else parse_objective(answer.slo),
        sample=len(replicas) if sample == 0 else sample,
        runs=expected_runs(arguments),
        prefix_caching=service.enable_prefix_caching,
        stretches=answer.stretches,
    )


def study_replicas(arguments: SimulateArguments, question: Question, best: Candidate) -> list[ReplicaSpec]:
    """The replicas of the layout, or as many as --replicas says."""
    service, queued = arguments.service, arguments.queue.max_num_queued_reqs
    limits = SchedulerLimits(max_num_seqs=arguments.limits.max_num_seqs, lookahead=service.async_scheduling)
    if queued is not None:
        limits = msgspec.structs.replace(limits, max_num_queued=queued)
    replicas = replica_specs(question, best, limits)
    other_count = service.replicas is not None or arguments.answer.find == "replicas"
    if other_count and best.layout.parallelism.shares_experts:
        raise PlanError(
            f"{best.cut}: its replicas share one set of experts, so their number is part of the layout; describe "
            "other hardware, or give --no-enable-expert-parallel",
            code="replicas-share-experts",
        )
    if service.replicas is not None:
        return [replicas[number % len(replicas)] for number in range(service.replicas)]
    return replicas


def expected_runs(arguments: SimulateArguments) -> int:
    """Number of runs that the flags will need, about."""
    if arguments.answer.find is not None:
        return FINDING_RUNS
    return len(SHARES if no_load_given(arguments.load) else arguments.load.rates or (1,))


def replica_capacity(best: Candidate, load: SimulatedLoad) -> float:
    """Predicted requests per second of one saturated replica."""
    return best.predicted.saturated_tok_s / best.layout.parallelism.engines / load.mean[1]


def usual_duration(arguments: SimulateArguments, load: SimulatedLoad, best: Candidate, replicas: int) -> float:
    """Seconds of virtual time without --duration, long enough for slow answers and low rates; inf for a trace."""
    if load.trace:
        return inf
    answer_s = best.predicted.ttft_s + load.mean[1] / best.predicted.single_tok_s
    enough = [DURATION_S, MIN_ANSWERS * (answer_s + load.think_s)]
    lowest = min(arguments.load.rates, default=load.rate)
    if no_load_given(arguments.load):
        lowest = SHARES[0] * replica_capacity(best, load) * replicas
    if lowest:
        enough.append(MIN_REQUESTS / lowest)
    return float(f"{max(enough):.2g}")


def simulated_times(flags: Load, load: SimulatedLoad, usual_s: float) -> MeasurementWindow:
    """Duration and warm-up; a trace has no warm-up by default."""
    duration_s = usual_s if flags.duration is None else parse_duration(flags.duration, "--duration")
    warmup_s = 0.0 if load.trace else WARMUP * duration_s
    if flags.warmup is not None:
        warmup_s = 0.0 if flags.warmup.strip() in ("0", "0s") else parse_duration(flags.warmup, "--warmup")
    if warmup_s >= duration_s:
        raise UsageError(
            f"--warmup is {warmup_s:g} s of {duration_s:g} s, which leaves no time to measure", code="warmup-too-long"
        )
    return MeasurementWindow(duration_s=duration_s, warmup_s=warmup_s)


def no_load_given(flags: Load) -> bool:
    """Return True if the flags give no load."""
    return flags.rate is None and not flags.rates and flags.users is None and flags.trace is None
