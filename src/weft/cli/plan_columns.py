"""The table of a plan's candidates, as data: the same columns on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Told = Mapping[str, Any]  # as `planner.plan_json.plan_json` has it

MARK = " *"  # behind the head of the column that decided
ROWS = 3  # candidates in the table, and more if more precisions are compared


class Cell(NamedTuple):
    """A figure as the JSON has it, as a person reads it, and its range; the last is empty for what is exact."""

    value: float
    text: str
    band: str = ""


class Column(NamedTuple):
    """`head` is broken into lines for a narrow table, `title` says the same in full; `decides`: the candidates are
    ranked by it."""

    head: str
    title: str
    cell: Callable[[Told], Cell]
    decides: bool = False


def rows(told: Told) -> tuple[list[Told], list[Told]]:
    """The candidates that are shown and the others, each the best first: with several precisions the best of each is
    shown."""
    candidates = list(told["candidates"])
    first = {candidate["precision"]: number for number, candidate in reversed(list(enumerate(candidates)))}
    numbers = sorted(first.values())
    numbers += [number for number in range(len(candidates)) if number not in numbers][: max(0, ROWS - len(numbers))]
    shown = [candidates[number] for number in sorted(numbers)]
    return shown, [candidate for number, candidate in enumerate(candidates) if number not in numbers]


def columns(told: Told) -> list[Column]:
    """Every column after the layout's name; speeds and prices of a row are at the same load."""
    work, objective = told["workload"], told["objective"]
    load, at_load = work["concurrency"], "as many at once as fit"
    head = "tok/s\nall"
    if load != "max":
        head, at_load = f"tok/s\nat {load:,}", f"with {load:,} at once"
    priced = told["hardware"]["dollars_per_gpu_hour"] is not None
    length = f"{work['max_model_len']:,}"
    found = [
        Column("context,\ntokens", "context that fits, tokens of all requests together", _context),
        Column(f"requests\nof {length}", f"requests of {length} tokens that fit at once", _requests),
        Column("TTFT,\nidle", "TTFT, idle", lambda it: _seconds(it, "ttft_s")),
        Column("tok/s\none", "tok/s for one user", lambda it: _rate(it, "single_tok_s", 1)),
        Column(
            head, f"tok/s of all requests, {at_load}", lambda it: _rate(it, "output_tok_s"), objective == "throughput"
        ),
    ]
    if objective == "latency":
        found.append(Column("s per\nrequest", "seconds of a whole request", _request, decides=True))
    if objective == "cost" and not priced:
        found.append(Column("tok/s\nper GPU", f"tok/s of each GPU, {at_load}", _per_gpu, decides=True))
    if priced:
        found.append(Column("$/M\ntokens", f"$ per million tokens, {at_load}", _dollars, objective == "cost"))
    return found


def fullest(candidate: Told) -> str:
    """ "23.2 of 25.8 GB" of the GPU that is used most."""
    gpu = candidate["fullest"]
    return f"{gpu['usable_bytes'] / 1e9:,.1f} of {gpu['memory_bytes'] / 1e9:,.1f} GB"


def tokens(count: int) -> str:
    """482,864, or 448.7 M"""
    return f"{count:,}" if count < 1e7 else f"{count / 1e6:,.1f} M"


def _context(candidate: Told) -> Cell:
    return Cell(candidate["kv_tokens"], tokens(candidate["kv_tokens"]))


def _requests(candidate: Told) -> Cell:
    return Cell(candidate["max_concurrency"], f"{int(candidate['max_concurrency']):,}")


def _rate(candidate: Told, name: str, digits: int = 0) -> Cell:
    value = candidate["predicted"][name]
    return Cell(value, f"{value:,.{digits}f}", between(candidate["predicted"]["bands"][name]))


def _seconds(candidate: Told, name: str) -> Cell:
    value, (low, high) = candidate["predicted"][name], candidate["predicted"]["bands"][name]
    if value < 0.01:
        return Cell(value, f"{1000 * value:.1f} ms", between((1000 * low, 1000 * high), 1))
    return Cell(value, f"{value:.2f} s", between((low, high), 2))


def _request(candidate: Told) -> Cell:
    value, band = candidate["predicted"]["request_s"], candidate["predicted"]["error_band"]
    return Cell(value, f"{value:,.1f}", between((value * (1 - band), value * (1 + band)), 1))


def _per_gpu(candidate: Told) -> Cell:
    value, band = candidate["output_tok_s_per_gpu"], candidate["predicted"]["error_band"]
    return Cell(value, f"{value:,.0f}", between((value * (1 - band), value * (1 + band))))


def _dollars(candidate: Told) -> Cell:
    value = candidate["dollars_per_million_tokens"]
    return Cell(value, f"{value:,.2f}", between(candidate["dollars_per_million_tokens_band"], 2))


def between(band: Sequence[float], digits: int = 0) -> str:
    """ "31-72"."""
    low, high = (f"{value:,.{digits}f}" for value in band)
    return f"{low}-{high}"
