"""Text output of weft simulate: the deployment, a table of runs, plots against the load, and the result of --find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.cli.simulate.plots import METRICS, text_plots
from weft.cli.simulate.verdict import is_overloaded
from weft.cli.tables import console, figures_table
from weft.formatting import format_counts
from weft.planner.question import Question
from weft.planner.search.ranking import Candidate
from weft.study.simulate.capacity_search import CLOSE, CLOSE_REPLICAS, CapacityResult
from weft.study.simulate.lengths import FixedLength
from weft.study.simulate.load import SimulatedLoad
from weft.study.simulate.objective import format_duration
from weft.study.simulate.report import LatencySummary, Report, TargetVerdict
from weft.study.simulate.study import Study

if TYPE_CHECKING:
    from rich.table import Table

PERCENTILES = ("p50", "p90", "p95", "p99")


def hardware_text(question: Question) -> str:
    """The GPUs by type, and the number of nodes if there are several."""
    gpus = format_counts(gpu.name for gpu in question.cluster.gpus)
    nodes = len(question.cluster.nodes)
    return f"{gpus} on {nodes:,} nodes" if nodes > 1 else gpus


def heading(question: Question, best: Candidate, study: Study, load: SimulatedLoad) -> list[str]:
    """The simulated deployment and load."""
    count = len(study.specs)
    replicas = f"{count:,} replicas, each of" if count > 1 else "1 replica of"
    replicas += f" {devices(study.gpus_each, study)}"
    input_len, output_len = load.mean
    spec = study.specs[0]
    groups = len(spec.predictors)
    replicas += f" in {groups} attention groups" * (groups > 1)
    tokens = groups * spec.kv.tokens(spec.num_blocks, spec.scheduler.max_model_len)
    limits = f"{tokens:,} tokens of KV, {groups * spec.scheduler.max_num_seqs} requests at once"
    error = f"step times of {question.engine} from the planner (error up to {100 * best.predicted.error_band:.0f} %)"
    return [
        f"{deployment_title(question, best)}; {replicas}, {limits}; {study.policy}",
        f"requests of {input_len:,.0f} + {output_len:,.0f} tokens on average; {error}",
    ]


def deployment_title(question: Question, best: Candidate) -> str:
    """The model, its layout and the GPUs, as a title."""
    return f"{question.model}: {best.cut} on {hardware_text(question)}"


def devices(count: int, study: Study) -> str:
    """ "8 GPUs"."""
    return f"{count:,} {study.device}{'s' * (count > 1)}"


def print_runs(study: Study, load: SimulatedLoad, runs: Sequence[Report], capacity: CapacityResult | None) -> None:
    """Print everything after the heading on standard output."""
    out = console()
    report = capacity.report if capacity else runs[0] if len(runs) == 1 else None
    if len(runs) > 1:
        out.print(runs_table(runs))
        for lines in text_plots(runs):
            out.print("\n".join(["", *lines]), soft_wrap=True)
    if report:
        out.print(times_table(report))
        out.print("\n".join(figures(study, report)), soft_wrap=True)
    out.print("\n".join(["", *confidence(study, load, runs, report)]), soft_wrap=True)


def runs_table(runs: Sequence[Report]) -> Table:
    """A table with a line for each run."""
    by_replicas = len({run.replicas for run in runs}) > 1
    priced, promised = (any(getattr(run, name) is not None for run in runs) for name in ("dollars_per_hour", "met"))
    columns = ["replicas" if by_replicas else "requests/s", "tok/s", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "p99"]
    columns += ["KV", "refused", "preempted", *["good"] * promised, *["$/M"] * priced]
    table = figures_table(*columns, title="times in ms" + ", dollars per million generated tokens" * priced)
    for run in runs:
        table.add_row(
            f"{run.replicas:,}" if by_replicas else rate_text(run),
            f"{run.output_tok_s:,.0f}",
            *(milliseconds(spread, q) for spread in (run.ttft_s, run.tpot_s) for q in ("p50", "p95", "p99")),
            f"{100 * run.kv_utilisation:.0f} %",
            f"{run.refused:,}",
            f"{run.preemptions:,}",
            *[goodput(run)] * promised,
            *[money(run)] * priced,
        )
    return table


def rate_text(run: Report) -> str:
    """Requests per second of a run, "-" for users."""
    return "-" if run.rate is None else f"{run.rate:.4g}"


def times_table(report: Report) -> Table:
    """A table of the percentiles of one run."""
    table = figures_table("", "mean", *PERCENTILES)
    for name, field in METRICS.items():
        spread: LatencySummary | None = getattr(report, field)
        if spread:
            table.add_row(name, *(format_duration(getattr(spread, q)) for q in ("mean", *PERCENTILES)))
    return table


def figures(study: Study, report: Report) -> list[str]:
    """The rates, cache use, rent and targets of one run."""
    lines = [
        f"{report.request_rate:,.4g} requests/s answered; {report.output_tok_s:,.0f} tok/s generated, "
        f"{report.input_tok_s:,.0f} tok/s of prompts read; {report.running:,.1f} requests at once in each replica",
        f"KV cache {100 * report.kv_utilisation:.0f} % in use, busy {100 * report.busy:.0f} % of the time; "
        f"{report.refused:,} refused, {report.preemptions:,} preempted",
    ]
    if report.too_long:
        lines.append(f"{report.too_long:,} requests have prompts that do not fit into any replica")
    if report.prefix_hit_share is not None:
        lines.append(f"{100 * report.prefix_hit_share:.0f} % of the prompts' tokens were in the prefix cache")
    rent = f"{report.gpu_hours:,.4g} {study.device}-hours "
    rent += f"({devices(report.gpus, study)}, {format_duration(report.window_s)})"
    if report.dollars_per_hour is not None:
        rent += f", ${report.dollars_per_hour:,.2f} an hour, ${money(report)} per million generated tokens"
    lines.append(rent)
    if report.met is not None:
        lines.append(f"goodput {goodput(report)}: {report.goodput_rate:,.4g} requests/s meet all limits of the promise")
        lines += [f"  {target_line(target)}" for target in report.objective]
    return lines


def target_line(judged: TargetVerdict) -> str:
    """One target of the promise, with its value and the verdict."""
    interval = "" if judged.plus_minus_s is None else f" (± {format_duration(judged.plus_minus_s)})"
    verdict = "met" if judged.met else "missed"
    value, limit = format_duration(judged.value_s), format_duration(judged.limit_s)
    return f"{judged.target} {value}{interval}, {limit} promised: {verdict}"


def verdict(study: Study, capacity: CapacityResult) -> list[str]:
    """The result of --find."""
    if capacity.value is None or capacity.report is None:
        return [f"nothing keeps the promise: {capacity.reason}"]
    report = capacity.report
    if isinstance(capacity.value, int):
        near = f" (search accuracy {100 * CLOSE_REPLICAS:.0f} %)" if CLOSE_REPLICAS * capacity.value > 1 else ""
        needed = "1 replica" if capacity.value == 1 else f"{capacity.value:,} replicas"
        return [f"found: you need {needed} ({devices(report.gpus, study)}) to keep the promise{near}"]
    each = f"{capacity.value / report.replicas:.3g} per replica; " if report.replicas > 1 else ""
    return [
        f"found: up to {capacity.value:.4g} requests/s keep the promise ({each}search accuracy {100 * CLOSE:.0f} %)"
    ]


def _sampled_lines(runs: Sequence[Report]) -> list[str]:
    """A line for each run that simulated only a part of its replicas."""
    return [sampled_text(run) for run in runs if run.sampled < run.replicas]


def _has_intervals(report: Report) -> bool:
    return any(target.plus_minus_s is not None for target in report.objective)


def confidence(study: Study, load: SimulatedLoad, runs: Sequence[Report], report: Report | None) -> list[str]:
    """The amount that was simulated, and notes on how far to trust the figures."""
    lines = [measured_text(study, load, runs, report), *growing_text(study, report or runs[-1])]
    if equal_answers(load) and any(run.replicas > 1 for run in runs):
        lines.append(
            "all answers have the same length, so requests start and end in groups, which makes waits look worse; "
            "lengths that vary (--output-len 512:1536) are closer to real use"
        )
    lines += _sampled_lines([report] if report else runs)[-1:]
    # Only a single run is printed with its targets.
    if report and _has_intervals(report):
        lines.append("± is the 95 % confidence interval (the time cut into ten blocks)")
    return lines


def growing_text(study: Study, run: Report) -> list[str]:
    """A note if the warm-up was too short for the load to be steady."""
    answer_s = run.e2e_s.mean if run.e2e_s else 0.0
    if run.users or is_overloaded(study, run) or not 0 < study.times.warmup_s < answer_s:
        return []
    return [
        f"an answer takes {format_duration(answer_s)}, longer than the warm-up: the load was still growing; use a "
        "longer --duration"
    ]


def sampled_text(run: Report) -> str:
    """The number of replicas that were simulated in place of all."""
    return (
        f"sampled: {run.sampled:,} of {run.replicas:,} equal replicas with their share of the requests "
        "(--sample-replicas all simulates every one)"
    )


def measured_text(study: Study, load: SimulatedLoad, runs: Sequence[Report], report: Report | None) -> str:
    """The number of requests and the virtual time that were measured."""
    one = report or runs[-1]
    measured = f"{one.requests:,} requests in {format_duration(one.window_s)}"
    if len(runs) > 1 and report is None:
        measured = f"{min(run.requests for run in runs):,} to {max(run.requests for run in runs):,} requests a run"
    warmup_s = study.times.warmup_s
    start = f"after {format_duration(warmup_s)} of warm-up" if warmup_s else "from an idle start"
    return f"measured: {measured} of virtual time, {start}; seed {load.seed}"


def equal_answers(load: SimulatedLoad) -> bool:
    """Return True if all answers have the same length."""
    rows, lengths = load.trace or load.distribution.rows, load.distribution.output_len
    if rows:
        return len({row.request.output_len for row in rows}) == 1
    return isinstance(lengths, FixedLength) and lengths.tokens > 1


def milliseconds(spread: LatencySummary | None, name: str) -> str:
    """A percentile in ms, "-" without a measurement."""
    if spread is None:
        return "-"
    value = 1000 * getattr(spread, name)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def goodput(run: Report) -> str:
    """Share of the requests that meet every limit of the promise."""
    return "-" if run.goodput_share is None else f"{100 * run.goodput_share:.1f} %"


def money(run: Report) -> str:
    """Dollars per million generated tokens."""
    return "-" if run.dollars_per_million_tokens is None else f"{run.dollars_per_million_tokens:,.2f}"
