"""The table of a plan's candidates as data: the same columns on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PlanJson = Mapping[str, Any]  # as `planner.report.plan_json.plan_json` builds it; also one of its candidates

MARK = " *"  # behind the head of the column that decided
ROWS = 3  # candidates in the table, and more if more precisions are compared


class Cell(NamedTuple):
    """A figure as in the JSON, as text, and its range; the range of an exact figure is empty."""

    value: float
    text: str
    band: str = ""


class Column(NamedTuple):
    """A column of the table.

    `head` has line breaks for a narrow table, `title` is the long form. If `decides`, candidates are ranked by it.
    """

    head: str
    title: str
    cell: Callable[[PlanJson], Cell]
    decides: bool = False


def shown_and_others(plan: PlanJson) -> tuple[list[PlanJson], list[PlanJson]]:
    """The candidates in the table and the others, each with the best first.

    If several precisions are compared, the best candidate of each is in the table.
    """
    candidates = list(plan["candidates"])
    first = {candidate["precision"]: number for number, candidate in reversed(list(enumerate(candidates)))}
    numbers = sorted(first.values())
    numbers += [number for number in range(len(candidates)) if number not in numbers][: max(0, ROWS - len(numbers))]
    shown = [candidates[number] for number in sorted(numbers)]
    return shown, [candidate for number, candidate in enumerate(candidates) if number not in numbers]


def columns(plan: PlanJson) -> list[Column]:
    """Every column after the layout's name; speeds and prices of a row are at the same load."""
    work, objective = plan["workload"], plan["objective"]
    load, at_load = work["concurrency"], "as many at once as fit"
    head = "tok/s\nall"
    if load != "max":
        head, at_load = f"tok/s\nat {load:,}", f"with {load:,} at once"
    priced = plan["hardware"]["dollars_per_gpu_hour"] is not None
    length = f"{work['max_model_len']:,}"
    listed = [
        Column("context,\ntokens", "context that fits, tokens of all requests together", _context),
        Column(f"requests\nof {length}", f"requests of {length} tokens that fit at once", _requests),
        Column("TTFT,\nidle", "TTFT, idle", lambda candidate: _seconds(candidate, "ttft_s")),
        Column("tok/s\none", "tok/s for one user", lambda candidate: _rate(candidate, "single_tok_s", 1)),
        Column(
            head,
            f"tok/s of all requests, {at_load}",
            lambda candidate: _rate(candidate, "output_tok_s"),
            objective == "throughput",
        ),
    ]
    if objective == "latency":
        listed.append(Column("s per\nrequest", "seconds of a whole request", _request, decides=True))
    if objective == "cost" and not priced:
        listed.append(Column("tok/s\nper GPU", f"tok/s of each GPU, {at_load}", _per_gpu, decides=True))
    if priced:
        listed.append(Column("$/M\ntokens", f"$ per million tokens, {at_load}", _dollars, objective == "cost"))
    return listed


def fullest(candidate: PlanJson) -> str:
    """ "23.2 of 25.8 GB" of the GPU with the largest used share."""
    gpu = candidate["fullest"]
    return f"{gpu['usable_bytes'] / 1e9:,.1f} of {gpu['memory_bytes'] / 1e9:,.1f} GB"


def tokens(count: int) -> str:
    """482,864, or 448.7 M."""
    return f"{count:,}" if count < 1e7 else f"{count / 1e6:,.1f} M"


def _context(candidate: PlanJson) -> Cell:
    return Cell(candidate["kv_tokens"], tokens(candidate["kv_tokens"]))


def _requests(candidate: PlanJson) -> Cell:
    return Cell(candidate["max_concurrency"], f"{int(candidate['max_concurrency']):,}")


def _rate(candidate: PlanJson, name: str, digits: int = 0) -> Cell:
    value = candidate["predicted"][name]
    return Cell(value, f"{value:,.{digits}f}", between(candidate["predicted"]["bands"][name]))


def _seconds(candidate: PlanJson, name: str) -> Cell:
    value, (low, high) = candidate["predicted"][name], candidate["predicted"]["bands"][name]
    if value < 0.01:
        return Cell(value, f"{1000 * value:.1f} ms", between((1000 * low, 1000 * high), 1))
    return Cell(value, f"{value:.2f} s", between((low, high), 2))


def _request(candidate: PlanJson) -> Cell:
    value, band = candidate["predicted"]["request_s"], candidate["predicted"]["error_band"]
    return Cell(value, f"{value:,.1f}", between((value * (1 - band), value * (1 + band)), 1))


def _per_gpu(candidate: PlanJson) -> Cell:
    value, band = candidate["output_tok_s_per_gpu"], candidate["predicted"]["error_band"]
    return Cell(value, f"{value:,.0f}", between((value * (1 - band), value * (1 + band))))


def _dollars(candidate: PlanJson) -> Cell:
    value = candidate["dollars_per_million_tokens"]
    return Cell(value, f"{value:,.2f}", between(candidate["dollars_per_million_tokens_band"], 2))


def between(band: Sequence[float], digits: int = 0) -> str:
    """ "31-72"."""
    low, high = (f"{value:,.{digits}f}" for value in band)
    return f"{low}-{high}"
