"""weft plan without a model: the well known models that the hardware can run, and how fast."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weft.architectures.model import Model
from weft.cli import plan_columns, plan_flags, plan_text, tables
from weft.cli.parser import UsageError
from weft.cli.plan import NOTHING_FITS, ask, described
from weft.errors import WeftError
from weft.formats import catalogue
from weft.formatting import format_bytes, weft_command
from weft.hardware.cluster import Cluster
from weft.planner.advice import WEFT_SCHEMES
from weft.planner.overview import layout_name, search_best_precision, short_bytes
from weft.planner.plan_json import candidate_json, hardware_json, missing_support
from weft.planner.search import SearchResult, closest_miss, search

if TYPE_CHECKING:
    from rich.table import Table

# Flags that are about one model, or about a plan's files.
OF_ONE_MODEL = ("html", "emit", "revision", "refresh", "device_map", "pipeline_split", "speculative_config")
RANGED = 100  # columns that a table with ranges takes
SLOW = 10  # tokens per second, below which a decimal counts


def main(arguments: Namespace) -> int:
    """Print the table, or its JSON; 3 if none of the models fits."""
    check(arguments)
    cluster = described(vars(arguments))
    models, rows, answers = catalogue.well_known(), [], []
    with progress(len(models)) as advance:
        for model in models:
            advance(model.name)
            answer = planned(arguments, model, cluster)
            rows.append(row_json(answer, model) if isinstance(answer, SearchResult) else refused_json(model, answer))
            answers += [answer] if isinstance(answer, SearchResult) else []
    if not answers:
        raise UsageError(f"{rows[0]['name']}: {rows[0]['reason']}")
    told = {**head_json(answers[0]), "models": rows}
    if getattr(arguments, "json", False):
        print(json.dumps(told))
    else:
        show(told)
    return 0 if any(row["fits"] for row in rows) else NOTHING_FITS


def check(arguments: Namespace) -> None:
    """Raises UsageError for a flag that needs a model."""
    promised = [flag.dest for flag in plan_flags.PROMISE]
    for name in (*promised, *OF_ONE_MODEL):
        if hasattr(arguments, name):
            raise UsageError(
                f"which model? --{name.replace('_', '-')} is for one; for example: weft plan Qwen3-8B --gpus 1xRTX4090"
            )


def planned(arguments: Namespace, model: Model, cluster: Cluster) -> SearchResult | WeftError:
    """The answer for one model, in the precision that was asked for or the best; an error for flags that it cannot
    be planned with."""
    try:
        named = Namespace(**{**vars(arguments), "model": model.name})
        question = ask(named, model, cluster)
        if hasattr(arguments, "precision") or hasattr(arguments, "quantization"):
            return search(question)
        return search_best_precision(question)
    except WeftError as error:
        return error


@contextmanager
def progress(count: int) -> Iterator[Any]:
    """A line on a terminal that names the model that is being planned."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console

    with Console(stderr=True).status("planning") as status:
        number = iter(range(1, count + 1))
        yield lambda name: status.update(f"planning {next(number)} of {count}: {name}")


def head_json(answer: SearchResult) -> dict[str, Any]:
    """What is the same for all models."""
    question = answer.question
    work = question.workload
    return {
        "hardware": hardware_json(question),
        "engine": question.engine,
        "objective": question.objective,
        "concurrency": work.concurrency or "max",
        "command": weft_command("plan", [("", "MODEL"), *question.flags[1:]]),
    }


def row_json(answer: SearchResult, model: Model) -> dict[str, Any]:
    """One model: its best layout, or what it lacks."""
    question, best = answer.question, answer.best
    row: dict[str, Any] = {"name": model.name, "params": model.params, "fits": best is not None}
    if best is None:
        lacks = short_bytes(answer)
        reason = answer.obstacle
        return {**row, "precision": closest_precision(answer), "short_bytes": lacks or None, "reason": reason}
    lacking = missing_support(question, best.layout.precision)
    told = candidate_json(question, best)
    shown = ("precision", "kv_tokens", "max_concurrency", "predicted")
    return {
        **row,
        **{name: told[name] for name in shown},
        "layout": layout_name(best),
        "gpus": len(set(best.layout.gpus)),
        "runs": not lacking,
        "missing": [str(note) for note in lacking],
    }


def closest_precision(answer: SearchResult) -> str:
    """The precision of the layout that lacks least."""
    lacking = closest_miss(answer.rejected)
    return lacking.cut.precision if lacking else answer.question.precisions[0]


def refused_json(model: Model, error: WeftError) -> dict[str, Any]:
    """A model that cannot be planned with these flags."""
    return {
        "name": model.name,
        "params": model.params,
        "fits": False,
        "precision": None,
        "short_bytes": None,
        "reason": str(error),
    }


def show(told: dict[str, Any]) -> None:
    """The hardware, the table, how it is to be read, and what does not fit."""
    shown = tables.console()
    fitting = [row for row in told["models"] if row["fits"]]
    lines = []
    shown.print(plan_text.hardware_line(told), soft_wrap=True)
    if fitting:
        ranged = shown.width >= RANGED
        shown.print(table(told, fitting, ranged=ranged))
        band = f"Ranges (+-{100 * fitting[0]['predicted']['error_band']:.0f} %): " if ranged else ""
        band += "at least 8 of 10 measurements should lie within. " if ranged else ""
        lines.append(f"{band}Context: tokens of all requests together")
    shown.print("\n".join([*lines, *left_out(told["models"]), next_step(told, fitting)]), soft_wrap=True)


def table(told: dict[str, Any], rows: Sequence[dict[str, Any]], *, ranged: bool) -> Table:
    """A line for each model that fits."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    load = told["concurrency"]
    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    made.add_column("model", overflow="fold")
    made.add_column("precision")
    made.add_column("layout")
    every = "tok/s all" if load == "max" else f"tok/s at {load:,}"
    for head in ("context", "tok/s one", every, "runs in Weft"):
        made.add_column(head, justify="right")
    for row in rows:
        predicted = row["predicted"]
        alone = rate(predicted["single_tok_s"])
        if ranged:
            low, high = predicted["bands"]["single_tok_s"]
            alone += f" ({rate(low)}-{rate(high)})"
        figures = (plan_columns.tokens(row["kv_tokens"]), alone, rate(predicted["output_tok_s"]))
        made.add_row(
            short_name(row), word(row["precision"]), row["layout"], *figures, "yes" if row["runs"] else "not yet"
        )
    return made


def rate(tok_s: float) -> str:
    """Tokens per second."""
    return f"{tok_s:,.0f}" if tok_s >= SLOW else f"{tok_s:.1f}"


def word(precision: str) -> str:
    """A precision that Weft makes by itself as -q names it, else the precision."""
    return WEFT_SCHEMES.get(precision, precision)


def next_step(told: dict[str, Any], fitting: Sequence[dict[str, Any]]) -> str:
    """The command that plans one of the models."""
    made = sorted({word(row["precision"]) for row in fitting} & set(WEFT_SCHEMES.values()))
    asked = " -q " in told["command"] or " --precision " in told["command"]
    rounded = f"; with {' or '.join(f'-q {name}' for name in made)} as the table says" if made and not asked else ""
    return f"{told['command']} for one of them{rounded if told['engine'] == 'weft' else ''}"


def left_out(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The models that do not fit with what the closest layout lacks, and those that the flags rule out."""
    short = [row for row in rows if not row["fits"] and row["short_bytes"]]
    if short:
        listed = ", ".join(
            f"{short_name(row)} ({format_bytes(row['short_bytes'])} short in {word(row['precision'])})" for row in short
        )
        yield f"do not fit, with what the fullest device lacks at best: {listed}"
    for row in rows:
        if not row["fits"] and not row["short_bytes"]:
            yield f"not possible so: {short_name(row)}: {row['reason']}"


def short_name(row: dict[str, Any]) -> str:
    """A model's name without its owner."""
    return str(row["name"]).rpartition("/")[2]
