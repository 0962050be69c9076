"""What weft simulate prints: the deployment, a table of runs, plots against the load, and what was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.cli.simulate_plots import METRICS, on_terminal
from weft.cli.tables import console, table
from weft.formatting import format_counts
from weft.planner.question import Question
from weft.planner.ranking import Candidate
from weft.simulate.capacity_search import CLOSE, CLOSE_REPLICAS, CapacityResult
from weft.simulate.lengths import FixedLength
from weft.simulate.load import SimulatedLoad
from weft.simulate.objective import format_duration
from weft.simulate.report import LatencySummary, Report, TargetVerdict
from weft.simulate.study import Study

PERCENTILES = ("p50", "p90", "p95", "p99")


def hardware(question: Question) -> str:
    """The GPUs by type."""
    there = format_counts(gpu.name for gpu in question.cluster.gpus)
    nodes = len(question.cluster.nodes)
    return f"{there} on {nodes:,} nodes" if nodes > 1 else there


def heading(question: Question, best: Candidate, study: Study, load: SimulatedLoad) -> list[str]:
    """What is simulated."""
    count = len(study.specs)
    replicas = f"{count:,} replicas, each of" if count > 1 else "1 replica of"
    replicas += f" {devices(study.gpus_each, study)}"
    input_len, output_len = load.mean
    spec = study.specs[0]
    limits = f"{spec.num_blocks * spec.block_size:,} tokens of KV, {spec.max_num_seqs} requests at once"
    error = f"step times of {question.engine} from the planner (error up to {100 * best.predicted.error_band:.0f} %)"
    return [
        f"{deployed(question, best)}; {replicas}, {limits}; {study.policy}",
        f"requests of {input_len:,.0f} + {output_len:,.0f} tokens on average; {error}",
    ]


def deployed(question: Question, best: Candidate) -> str:
    """The model, its layout and the GPUs, as a title."""
    return f"{question.model}: {best.cut} on {hardware(question)}"


def devices(count: int, study: Study) -> str:
    return f"{count:,} {study.device}{'s' * (count > 1)}"


def show(study: Study, load: SimulatedLoad, runs: Sequence[Report], found: CapacityResult | None) -> None:
    """Everything after the heading, on standard output."""
    shown = console()
    report = found.report if found else runs[0] if len(runs) == 1 else None
    if len(runs) > 1:
        shown.print(loads(runs))
        for lines in on_terminal(runs):
            shown.print("\n".join(["", *lines]), soft_wrap=True)
    if report:
        shown.print(times(report))
        shown.print("\n".join(figures(study, report)), soft_wrap=True)
    if found:
        shown.print("\n".join(["", *verdict(study, found)]), soft_wrap=True)
    shown.print("\n".join(["", *confidence(study, load, runs, report)]), soft_wrap=True)


def loads(runs: Sequence[Report]) -> Any:
    """A line for each run."""
    by_replicas = len({run.replicas for run in runs}) > 1
    priced, promised = (any(getattr(run, name) is not None for run in runs) for name in ("dollars_per_hour", "met"))
    columns = ["replicas" if by_replicas else "requests/s", "tok/s", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "p99"]
    columns += ["KV", "refused", "preempted", *(["good"] if promised else []), *(["$/M"] if priced else [])]
    made = table(*columns, title="times in ms" + (", dollars per million tokens written" if priced else ""))
    for run in runs:
        made.add_row(
            f"{run.replicas:,}" if by_replicas else "-" if run.rate is None else f"{run.rate:.4g}",
            f"{run.output_tok_s:,.0f}",
            *(milliseconds(spread, q) for spread in (run.ttft_s, run.tpot_s) for q in ("p50", "p95", "p99")),
            f"{100 * run.kv_utilisation:.0f} %",
            f"{run.refused:,}",
            f"{run.preemptions:,}",
            *([goodput(run)] if promised else []),
            *([money(run)] if priced else []),
        )
    return made


def times(report: Report) -> Any:
    """Every percentile of one run."""
    made = table("", "mean", *PERCENTILES)
    for name, field in METRICS.items():
        spread: LatencySummary | None = getattr(report, field)
        if spread:
            made.add_row(name, *(format_duration(getattr(spread, it)) for it in ("mean", *PERCENTILES)))
    return made


def figures(study: Study, report: Report) -> list[str]:
    """What one run says beside its times."""
    lines = [
        f"{report.request_rate:,.4g} requests/s answered; {report.output_tok_s:,.0f} tok/s generated, "
        f"{report.input_tok_s:,.0f} tok/s of prompts read; {report.running:,.1f} requests at once in each replica",
        f"KV cache {100 * report.kv_utilisation:.0f} % in use, busy {100 * report.busy:.0f} % of the time; "
        f"{report.refused:,} refused, {report.preemptions:,} preempted",
    ]
    if report.too_long:
        lines.append(f"{report.too_long:,} requests have prompts that no replica can hold")
    if report.prefix_hit_share is not None:
        lines.append(f"{100 * report.prefix_hit_share:.0f} % of the prompts' tokens were in the prefix cache")
    rent = f"{report.gpu_hours:,.4g} {study.device}-hours "
    rent += f"({devices(report.gpus, study)}, {format_duration(report.window_s)})"
    if report.dollars_per_hour is not None:
        rent += f", ${report.dollars_per_hour:,.2f} an hour, ${money(report)} per million tokens written"
    lines.append(rent)
    if report.met is not None:
        lines.append(f"goodput {goodput(report)}: {report.goodput_rate:,.4g} requests/s meet the objective's limits")
        lines += [f"  {judged(it)}" for it in report.objective]
    return lines


def judged(it: TargetVerdict) -> str:
    interval = "" if it.plus_minus_s is None else f" (± {format_duration(it.plus_minus_s)})"
    verdict = "met" if it.met else "missed"
    return f"{it.target} {format_duration(it.value_s)}{interval}, {format_duration(it.limit_s)} promised: {verdict}"


def verdict(study: Study, found: CapacityResult) -> list[str]:
    """The answer to --find."""
    if found.value is None or found.report is None:
        return [f"nothing meets the objective: {found.reason}"]
    report = found.report
    if isinstance(found.value, int):
        near = f" (search accuracy {100 * CLOSE_REPLICAS:.0f} %)" if CLOSE_REPLICAS * found.value > 1 else ""
        needed = "1 replica" if found.value == 1 else f"{found.value:,} replicas"
        return [f"found: you need {needed} ({devices(report.gpus, study)}) to keep the promise{near}"]
    each = f"{found.value / report.replicas:.3g} per replica; " if report.replicas > 1 else ""
    return [f"found: up to {found.value:.4g} requests/s keep the promise ({each}search accuracy {100 * CLOSE:.0f} %)"]


def confidence(study: Study, load: SimulatedLoad, runs: Sequence[Report], report: Report | None) -> list[str]:
    """How much was simulated, and what the figures rest on."""
    one = report or runs[-1]
    measured = f"{one.requests:,} requests in {format_duration(one.window_s)}"
    if len(runs) > 1 and report is None:
        measured = f"{min(run.requests for run in runs):,} to {max(run.requests for run in runs):,} requests a run"
    lines = [
        f"measured: {measured} of virtual time, after {format_duration(study.times.warmup_s)} of warm-up; "
        f"seed {load.seed}"
    ]
    if not study.times.warmup_s:
        lines = [f"measured: {measured} of virtual time, from an idle start; seed {load.seed}"]
    grown = one.e2e_s is None or one.e2e_s.mean <= study.times.warmup_s
    if study.times.warmup_s and one.e2e_s and not grown and not one.users:
        lines.append(
            f"an answer takes {format_duration(one.e2e_s.mean)}, longer than the warm-up: the load was still growing; "
            "a longer --duration says more"
        )
    if equal_answers(load) and any(run.replicas > 1 for run in runs):
        lines.append(
            "all answers have the same length, so requests start and end in groups, which makes waits look worse; "
            "lengths that vary (--output-len 512:1536) are closer to real use"
        )
    sampled = [run for run in ([report] if report else runs) if run.sampled < run.replicas]
    if sampled:
        run = sampled[-1]
        lines.append(
            f"sampled: {run.sampled:,} of {run.replicas:,} equal replicas with their share of the requests "
            "(--sample-replicas all simulates every one)"
        )
    if any(it.plus_minus_s is not None for run in runs for it in run.objective):
        lines.append("± is the 95 % confidence interval (the time cut into ten blocks)")
    return lines


def equal_answers(load: SimulatedLoad) -> bool:
    """Whether they are all of one length."""
    rows, lengths = load.trace or load.distribution.rows, load.distribution.output_len
    return (
        len({row.request.output_len for row in rows}) == 1
        if rows
        else isinstance(lengths, FixedLength) and lengths.tokens > 1
    )


def milliseconds(spread: LatencySummary | None, name: str) -> str:
    if spread is None:
        return "-"
    value = 1000 * getattr(spread, name)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def goodput(run: Report) -> str:
    return "-" if run.goodput_share is None else f"{100 * run.goodput_share:.1f} %"


def money(run: Report) -> str:
    return "-" if run.dollars_per_million_tokens is None else f"{run.dollars_per_million_tokens:,.2f}"
