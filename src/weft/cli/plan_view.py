"""A plan as a person reads it: what each GPU holds, the best candidates, what was rejected, what to change."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from weft.facts.model import Model
from weft.facts.precision import weight_bytes
from weft.planner.advice import advice, binding
from weft.planner.answer import dollars_per_million, ranks_json
from weft.planner.cost import Prediction
from weft.planner.notes import notes
from weft.planner.objections import not_run
from weft.planner.question import Question
from weft.planner.search import Answer, Candidate, Rejected, output_tok_s
from weft.planner.words import gigabytes

if TYPE_CHECKING:
    from rich.table import Table

BEST = 3  # candidates in the table
REJECTED = 4  # layouts of which the reason is told
MOST_RANKS = 16  # rows of the table of ranks; a large cluster shows a replica of each kind
WIDE = 120  # columns of a pipe, which has no width of its own


def print_answer(answer: Answer, model: Model, out: TextIO | None = None) -> None:
    """Everything, on standard output."""
    from rich.console import Console

    out = out or sys.stdout
    console = Console(file=out, width=None if out.isatty() else WIDE, highlight=False, markup=False)
    best, question = answer.best, answer.question
    console.print(heading(question, model), soft_wrap=True)
    for note in notes(question, best):
        console.print(f"note: {note}", soft_wrap=True)
    if best:
        console.print(f"\nbest for {question.objective}: {best.cut}")
        console.print(ranks(question, best))
        console.print(comparison(question, answer.candidates[:BEST]))
        console.print(speeds(question, best.predicted), soft_wrap=True)
    else:
        console.print("\nnothing fits")
    reasons, binds = rejections(answer.rejected), binding(answer).text
    for line in reasons:
        console.print(line, soft_wrap=True)
    if f"  {binds}" not in reasons:
        console.print(f"\nwhat binds: {binds}", soft_wrap=True)
    changes = advice(answer)
    if changes:
        console.print("what would help:" if best else "\nwhat would help:")
        for change in changes:
            console.print(f"  {change}", soft_wrap=True)


def heading(question: Question, model: Model) -> str:
    """The model, the hardware, and whether the engine runs the one on the other."""
    shape, cluster = question.shape, question.cluster
    names = [gpu.name for gpu in cluster.gpus]
    there = " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    links = "/".join(dict.fromkeys({"nvlink": "NVLink", "pcie": "PCIe"}[node.link] for node in cluster.nodes))
    where = there
    if len(cluster.nodes) > 1:
        where += f" on {len(cluster.nodes)} nodes ({links}, {cluster.network_Bps * 8 / 1e9:g} Gb/s between them)"
    elif len(names) > 1:
        where += f" ({links})"
    sizes = ", ".join(f"{it} {gigabytes(weight_bytes(shape, it))}" for it in question.precisions)
    lines = [f"{model.name}: {model.params / 1e9:,.2f} billion parameters, {sizes}; {where}; engine {question.engine}"]
    for missing in not_run(shape, question.precisions[0]) if question.engine == "weft" else []:
        lines.append(f"Weft plans this but does not run it yet: {missing}")
    if model.note:
        lines.append(f"note: {model.note}")
    return "\n".join(lines)


def table(*columns: str, title: str = "") -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD)
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    return made


def ranks(question: Question, best: Candidate) -> Table:
    """Which GPU holds which layers and heads, and how its memory is used."""
    rows = ranks_json(question, best)
    shown = rows if len(rows) <= MOST_RANKS else unlike(rows, best.layout.size)[:MOST_RANKS]
    title = "" if shown == rows else f"{len(shown)} of {len(rows)} ranks"
    experts = any(row["experts"] for row in rows)
    columns = [
        "GPU",
        "rank",
        "layers",
        "heads",
        "KV heads",
        *(["experts"] if experts else []),
        "weights",
        "KV",
        "other",
    ]
    made = table(*columns, "free", title=title)
    for row in shown:
        last = row["first_layer"] + row["layers"] - 1
        made.add_row(
            f"{row['gpu_index']} {row['gpu']}",
            str(row["rank"]),
            f"{row['first_layer']}-{last}",
            str(row["q_heads"]),
            str(row["kv_heads"]),
            *([str(row["experts"])] if experts else []),
            *(gigabytes(row[f"{kind}_bytes"]) for kind in ("weight", "kv", "other", "free")),
        )
    return made


def unlike(rows: Sequence[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Of replicas of `size` ranks that hold the same on the same GPUs, the first."""
    replicas = [rows[start : start + size] for start in range(0, len(rows), size)]
    found = {tuple((row["gpu"], row["weight_bytes"], row["kv_bytes"]) for row in it): it for it in reversed(replicas)}
    return sorted((row for it in found.values() for row in it), key=lambda row: row["rank"])


def comparison(question: Question, candidates: Sequence[Candidate]) -> Table:
    """The best candidates, side by side."""
    length = question.workload.longest
    columns = ["layout", "fullest GPU", "KV tokens", f"x {length:,} tokens", "TTFT", "tok/s, one", "tok/s, all"]
    made = table(*columns, *([] if question.price is None else ["$/M tokens"]))
    for candidate in candidates:
        memory, predicted = candidate.memory, candidate.predicted
        rank = memory.ranks[memory.fullest]
        dollars = dollars_per_million(question, candidate)
        made.add_row(
            str(candidate.cut),
            f"{gigabytes(rank.usable_bytes)} of {gigabytes(rank.memory_bytes)}",
            f"{memory.kv_tokens:,}",
            f"{memory.max_concurrency(length):,.1f}",
            f"{predicted.ttft_s:.2f} s",
            f"{predicted.single_tok_s:,.1f}",
            f"{predicted.saturated_tok_s:,.0f}",
            *([] if dollars is None else [f"{dollars:,.2f}"]),
        )
    return made


def speeds(question: Question, predicted: Prediction) -> str:
    """How fast the best one is at the concurrency that was asked for."""
    work = question.workload
    requests = "one request" if predicted.concurrency < 1.5 else f"{predicted.concurrency:,.0f} requests"
    return (
        f"with {requests} of {work.input_len:,} + {work.output_len:,} tokens at once: "
        f"{1000 * predicted.tpot_s:.1f} ms per token of each, {output_tok_s(question, predicted):,.0f} tok/s; "
        f"predictions are within {100 * predicted.error_band:.0f} %"
    )


def rejections(rejected: Sequence[Rejected]) -> list[str]:
    """The layouts that lack least, and how many more there are."""
    if not rejected:
        return []
    nearest = sorted(rejected, key=lambda it: it.short_bytes)
    lines = ["\nrejected:", *(f"  {it.cut}: {it.reason}" for it in nearest[:REJECTED])]
    rest = len(rejected) - REJECTED
    return [*lines, f"  and {rest} more"] if rest > 0 else lines
