"""weft plan without a model: the well-known models that fit the hardware, and their speeds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weft.checkpoint.architectures.model import Model
from weft.checkpoint.names import catalogue
from weft.cli import tables
from weft.cli.flags.declared import flags_of
from weft.cli.flags.plan_flags import PlanArguments, Promise, Subject
from weft.cli.parser import UsageError
from weft.cli.plan import columns, plan_text
from weft.cli.plan_question import NOTHING_FITS, build_question, planned_cluster
from weft.errors import WeftError
from weft.formatting import format_bytes, weft_command
from weft.machine.hardware.cluster import Cluster
from weft.planner.report.advice import WEFT_SCHEMES
from weft.planner.report.overview import (
    CONTEXT,
    FETCHED,
    for_one_person,
    is_comfortable,
    layout_name,
    search_best_precision,
    short_bytes,
)
from weft.planner.report.plan_json import candidate_json, hardware_json, missing_support
from weft.planner.search.search import SearchResult, closest_miss, search

if TYPE_CHECKING:
    from rich.table import Table

# Flags that need a model.
OF_ONE_MODEL = (
    "html",
    "emit",
    "revision",
    "refresh",
    "device_map",
    "pipeline_split",
    "speculative_config",
    "deterministic",
)
RANGED = 100  # columns of a table with ranges
MUCH_FASTER = 1.5  # from here a smaller model is worth a line for its speed
SLOW = 10  # tokens per second, below which a decimal is shown


def main(arguments: PlanArguments) -> int:
    """Print the table, or its JSON; 3 if none of the models fits."""
    check_model_flags(arguments)
    subject = arguments.subject
    cluster = planned_cluster(subject)
    models = catalogue.well_known()
    rows: list[dict[str, Any]] = []
    answers: list[SearchResult] = []
    refusals: list[WeftError] = []
    with progress(len(models)) as advance:
        for model in models:
            advance(model.name)
            answer = plan_model(subject, model, cluster)
            if isinstance(answer, SearchResult):
                rows.append(row_json(answer, model))
                answers.append(answer)
            else:
                rows.append(refused_json(model, answer))
                refusals.append(answer)
    if not answers:
        raise UsageError(f"{rows[0]['name']}: {rows[0]['reason']}", code=refusals[0].code)
    overview = {**head_json(answers[0]), "models": rows, "advice": advice_json(subject, cluster, rows)}
    if arguments.answer.json:
        print(json.dumps(overview))
    else:
        print_overview(overview)
    return 0 if any(row["fits"] for row in rows) else NOTHING_FITS


def check_model_flags(arguments: PlanArguments) -> None:
    """Raise UsageError for a flag that needs a model."""
    promised = [flag.dest for flag in flags_of(Promise)]
    for name in (*promised, *OF_ONE_MODEL):
        if name in arguments.given:
            raise UsageError(
                f"which model? --{name.replace('_', '-')} needs one; for example: weft plan Qwen3-8B --gpus 1xRTX4090",
                code="model-missing",
            )


def plan_model(subject: Subject, model: Model, cluster: Cluster) -> SearchResult | WeftError:
    """The answer for one model in the precision of the flags or the best one, or the error if the flags exclude it."""
    try:
        question = build_question(subject.with_model(model.name), model, cluster)
        if not (subject.layout.precision is None and subject.layout.quantization is None):
            return search(question)
        return search_best_precision(question)
    except WeftError as error:
        return error


@contextmanager
def progress(count: int) -> Iterator[Any]:
    """Show the name of the model in work on a terminal; yields a function that takes the next name."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console

    with Console(stderr=True).status("planning") as status:
        number = iter(range(1, count + 1))
        yield lambda name: status.update(f"planning {next(number)} of {count}: {name}")


def head_json(answer: SearchResult) -> dict[str, Any]:
    """The hardware and the question, which are the same for all models."""
    question = answer.question
    work = question.workload
    return {
        "hardware": hardware_json(question),
        "engine": question.engine,
        "objective": question.objective,
        "concurrency": work.concurrency or "max",
        "command": weft_command("plan", [("", "MODEL"), *question.flags[1:]]),
    }


def advice_json(subject: Subject, cluster: Cluster, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The model for one person, its format and speed, and a faster alternative; None if no model is comfortable."""
    fitting = [row for row in best_first(rows) if row["fits"] and row["runs"]]
    named = (subject.with_model(row["name"]) for row in fitting)
    fixed = subject.layout.quantization is not None
    questions = [build_question(one, catalogue.find(one.model), cluster) for one in named] if not fixed else []
    chosen = for_one_person(questions)
    if chosen is None:
        return None
    question, best = chosen
    precision, tok_s = best.layout.precision, best.predicted.single_tok_s
    flags = [("", short_name({"name": question.model})), *question.flags[1:]]
    command = weft_command("plan", flags, "--precision", precision, without=("--precision", "--objective"))
    params = next(row["params"] for row in fitting if row["name"] == question.model)
    faster = max(
        (row for row in fitting if 2 * row["params"] >= params and is_comfortable(*_speed(row))),
        key=lambda row: _speed(row)[0],
        default=None,
    )
    return {
        "model": question.model,
        "precision": precision,
        "format": FETCHED.get(precision, precision),
        "single_tok_s": tok_s,
        "kv_tokens": best.memory.kv_tokens,
        "command": f"{command} --objective latency",
        "faster": faster["name"] if faster and _speed(faster)[0] >= MUCH_FASTER * tok_s else None,
    }


def best_first(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows: first the models that are comfortable for one person, the largest first, then the fastest of the
    others."""

    def order(row: dict[str, Any]) -> tuple[int, float]:
        if not row["fits"]:
            return 2, -row["params"]
        return (0, -row["params"]) if is_comfortable(*_speed(row)) else (1, -_speed(row)[0])

    return sorted(rows, key=order)


def _speed(row: dict[str, Any]) -> tuple[float, int]:
    return row["predicted"]["single_tok_s"], row["kv_tokens"]


def row_json(answer: SearchResult, model: Model) -> dict[str, Any]:
    """One model: its best layout, or the memory that it lacks."""
    question, best = answer.question, answer.best
    row: dict[str, Any] = {"name": model.name, "params": model.params, "fits": best is not None}
    if best is None:
        lacks = short_bytes(answer)
        reason = str(answer.obstacle) if answer.obstacle else None
        return {**row, "precision": closest_precision(answer), "short_bytes": lacks or None, "reason": reason}
    lacking = missing_support(question, best.layout.precision)
    candidate = candidate_json(question, best)
    kept = ("precision", "kv_tokens", "max_concurrency", "predicted")
    return {
        **row,
        **{name: candidate[name] for name in kept},
        "layout": layout_name(best),
        "gpus": len(set(best.layout.gpus)),
        "runs": not lacking,
        "missing": [str(note) for note in lacking],
    }


def closest_precision(answer: SearchResult) -> str:
    """The precision of the layout that lacks the least memory."""
    lacking = closest_miss(answer.rejected)
    return lacking.cut.precision if lacking else answer.question.precisions[0]


def refused_json(model: Model, error: WeftError) -> dict[str, Any]:
    """One model that the flags exclude."""
    return {
        "name": model.name,
        "params": model.params,
        "fits": False,
        "precision": None,
        "short_bytes": None,
        "reason": str(error),
    }


def print_overview(overview: dict[str, Any]) -> None:
    """Print the hardware, the table with its legend, and the models that do not fit."""
    console = tables.console()
    fitting = [row for row in best_first(overview["models"]) if row["fits"]]
    lines = []
    console.print(plan_text.hardware_line(overview), soft_wrap=True)
    for line in advice_lines(overview):
        console.print(line, soft_wrap=True)
    if fitting:
        ranged = console.width >= RANGED
        console.print(models_table(overview, fitting, ranged=ranged))
        band = f"Ranges (±{100 * fitting[0]['predicted']['error_band']:.0f} %) " if ranged else ""
        band += "should hold 8 of 10 measurements. " if ranged else ""
        lines.append(f"{band}Context: tokens of all requests together")
    lines += [*not_fitting(overview["models"]), next_step(overview, fitting)]
    console.print("\n".join(lines), soft_wrap=True)


def advice_lines(overview: dict[str, Any]) -> Iterator[str]:
    """The model for one person, with the command that plans it, and a faster one."""
    advice = overview["advice"]
    if advice is None:
        fitting = best_first([row for row in overview["models"] if row["fits"] and row["runs"]])
        if fitting and not is_comfortable(*_speed(fitting[0])):
            row = fitting[0]
            fastest = f"{short_name(row)}, {precision_name(row['precision'])}, {rate(_speed(row)[0])} tok/s"
            yield f"for one person: none is fast with {CONTEXT:,} tokens of room; the fastest is {fastest}"
        return
    name, speed = short_name({"name": advice["model"]}), rate(advice["single_tok_s"])
    yield f"for one person: {name}, {advice['format']}, {speed} tok/s"
    yield f"  {advice['command']}"
    if advice["faster"]:
        row = next(row for row in overview["models"] if row["name"] == advice["faster"])
        form = FETCHED.get(row["precision"], precision_name(row["precision"]))
        yield f"faster, and smaller: {short_name(row)}, {form}, {rate(_speed(row)[0])} tok/s"


def models_table(overview: dict[str, Any], rows: Sequence[dict[str, Any]], *, ranged: bool) -> Table:
    """A line for each model that fits, with ranges of the speeds if `ranged`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    load = overview["concurrency"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    table.add_column("model", overflow="fold")
    table.add_column("precision")
    table.add_column("layout")
    every = "tok/s all" if load == "max" else f"tok/s at {load:,}"
    for head in ("context", "tok/s one", every, "runs in Weft"):
        table.add_column(head, justify="right")
    for row in rows:
        predicted = row["predicted"]
        alone = rate(predicted["single_tok_s"])
        if ranged:
            low, high = predicted["bands"]["single_tok_s"]
            alone += f" ({rate(low)}-{rate(high)})"
        figures = (columns.tokens(row["kv_tokens"]), alone, rate(predicted["output_tok_s"]))
        runs = "yes" if row["runs"] else "not yet"
        table.add_row(short_name(row), precision_name(row["precision"]), row["layout"], *figures, runs)
    return table


def rate(tok_s: float) -> str:
    """Tokens per second: "53", "7.4"."""
    return f"{tok_s:,.0f}" if tok_s >= SLOW else f"{tok_s:.1f}"


def precision_name(precision: str) -> str:
    """The name of the precision for -q if Weft can compress weights to it, else the precision."""
    return WEFT_SCHEMES.get(precision, precision)


def next_step(overview: dict[str, Any], fitting: Sequence[dict[str, Any]]) -> str:
    """A sentence with the command that plans one of the models."""
    line = f"Plan one of them: {overview['command']}"
    compressed = sorted({precision_name(row["precision"]) for row in fitting} & set(WEFT_SCHEMES.values()))
    fixed = " -q " in overview["command"] or " --precision " in overview["command"]
    if overview["engine"] != "weft" or fixed or not compressed:
        return line
    return f"{line}, with {' or '.join(f'-q {name}' for name in compressed)} if the table shows it"


def not_fitting(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines on models that do not fit, with the memory that the closest layout lacks, and on excluded models."""
    short = [row for row in rows if not row["fits"] and row["short_bytes"]]
    if short:
        listed = ", ".join(
            f"{short_name(row)} ({format_bytes(row['short_bytes'])} short in {precision_name(row['precision'])})"
            for row in short
        )
        yield f"These do not fit; at best the fullest device lacks: {listed}"
    for row in rows:
        if not row["fits"] and not row["short_bytes"]:
            yield f"These flags exclude {short_name(row)}: {row['reason']}"


def short_name(row: dict[str, Any]) -> str:
    """A model's name without its owner."""
    return str(row["name"]).rpartition("/")[2]
