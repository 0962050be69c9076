"""Tables of `weft top` for models and for ranks, with a sign on the rows that a finding names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from weft.cli.top.cells import FAINT, UNKNOWN, VERY_WIDE, WIDE, dense_table, fitted, marked, share, used_of
from weft.cli.top.sparks import Sparks, model_key
from weft.cli.top.watch import TopSnapshot, rows_of_servers
from weft.formatting import format_bytes

STEP_BAR = 20  # characters of a rank's step
MIN_DELAYED = 0.005  # a smaller share of a step without a core is shown as 0 %
DELAYED = "no core"
# Columns of ranks; the first in this list is left out first
RANKS_DISPENSABLE = ("share of a step", "stage", "KV size", "weights", "layers", DELAYED, "▒ comm", "· wait")
NO_CORE = f"{DELAYED}: other programs had the rank's core; this time is part of the other shares"
# The parts of a step: name, its short form, character and style.
PARTS = (
    ("compute", "comp", "█", "green"),
    ("communication", "comm", "▒", "blue"),
    ("waiting", "wait", "·", "grey62"),
)
# The sizes of a layout, in the order in which they are written.
SIZES = (
    ("TP", "tensor_parallel"),
    ("PP", "pipeline_parallel"),
    ("DP", "data_parallel"),
    ("EP", "expert_parallel"),
)


def first_causes(snapshot: TopSnapshot) -> Iterator[tuple[str, dict[str, Any]]]:
    """The findings that follow from no other one, each with the URL of its server."""
    for url, finding in rows_of_servers(snapshot, "diagnosis"):
        if not finding.get("follows_from"):
            yield url, finding


def model_table(snapshot: TopSnapshot, sparks: Sparks, width: int) -> Table:
    """A row for each model of each server."""
    rows = rows_of_servers(snapshot, "models")
    faulty = {(url, finding.get("model")) for url, finding in first_causes(snapshot) if not finding.get("ranks")}
    wide, several = width >= WIDE, len({url for url, _ in rows}) > 1
    names = ["model", "running", "waiting", "KV cache used", "prefix hits", "TTFT p50/p95", "ITL p50/p95", "tok/s"]
    short = ["model", "run", "wait", "KV used", "hits", "TTFT p50/p95", "ITL p50/p95", "tok/s"]
    lines = width >= VERY_WIDE and any(sparks.line(model_key(*row)) for row in rows)
    more = [f"tok/s, {sparks.window}"] if lines else []
    table = dense_table(*(names if wide else short), *more)
    for url, row in rows:
        name = f"{row['name']} at {url.removeprefix('http://')}" if several else row["name"]
        table.add_row(
            _with_layout(marked(name, (url, row["name"]) in faulty, beside_faulty=bool(faulty)), row),
            str(row["running"]),
            Text(str(row["waiting"]), style="yellow" if row["waiting"] else ""),
            _cache(row, wide),
            share(row["prefix_hit_rate"], False, alarming=False),
            _pair(row["ttft_s"]),
            _pair(row["itl_s"]),
            UNKNOWN if row["tok_s"] is None else f"{row['tok_s']:,.0f}",
            *([_rates(sparks, model_key(url, row))] if lines else []),
        )
    return fitted(table, width, [*more, "prefix hits", "hits", "ITL p50/p95", "TTFT p50/p95", "waiting", "wait"])


def _with_layout(name: Text, row: Mapping[str, Any]) -> Text:
    """The name of a model, and below it the sizes of its layout as "TP2 PP1 DP1 EP1"."""
    layout = row.get("layout")
    if not layout:
        return name
    return Text.assemble(name, "\n", (" ".join(f"{short}{layout[size]}" for short, size in SIZES), FAINT))


def _cache(row: Mapping[str, Any], wide: bool) -> Text:
    """The share of the KV cache that is in use, and below it the bytes if they are known."""
    usage, used, size = share(row["kv_usage"], wide), row.get("kv_used_bytes"), row.get("kv_size_bytes")
    return usage if used is None or size is None else Text.assemble(usage, "\n", used_of(used, size))


def _rates(sparks: Sparks, key: str) -> str:
    """The sparkline of a model's tokens per second, and below it the scale."""
    line = sparks.line(key)
    return f"{line}\n0 to {max(sparks.values(key)):,.0f} tok/s" if line else ""


def rank_table(snapshot: TopSnapshot, width: int) -> Table:
    """A row for each rank: its part of the model, its memory, and the parts of its steps.

    Ranks of several servers have a row with the server's URL above them.
    """
    ranks = rows_of_servers(snapshot, "ranks")
    faulty = {(url, rank) for url, finding in first_causes(snapshot) for rank in finding.get("ranks") or ()}
    several, wide = len({url for url, _ in ranks}) > 1, width >= WIDE
    nodes = len({row.get("node", "") for _, row in ranks} - {""})  # a replica that starts has not told its own yet
    delayed = any((row.get("delayed") or 0.0) >= MIN_DELAYED for _, row in ranks)
    table = _rank_columns(width, delayed)
    above = ""
    for url, row in ranks:
        if several and url != above:
            table.add_row(Text(url.removeprefix("http://"), style=FAINT))
        above = url
        name = f"{row['rank']} on {row['node'] + ' ' if nodes > 1 and row['node'] else ''}{row['device']}"
        table.add_row(
            marked(name, (url, row["rank"]) in faulty, beside_faulty=bool(faulty)),
            str(row.get("stage", UNKNOWN)),
            _layers(row, wide),
            format_bytes(row.get("weight_bytes", 0)),
            format_bytes(row.get("kv_bytes", 0)),
            *(share(row[name], False, alarming=False) for name, *_ in PARTS),
            *([share(row.get("delayed"), False, alarming=False)] if delayed else []),
            *([step_bar(row)] if wide else []),
        )
    table = fitted(table, width, RANKS_DISPENSABLE)
    if not any(str(column.header) == DELAYED for column in table.columns):
        table.caption = None
    return table


def _layers(row: Mapping[str, Any], wide: bool) -> str:
    """The first and the last layer of a rank, with their number if the page is wide."""
    first, number = row.get("first_layer", 0), row["layers"]
    return f"{first}-{first + number - 1}" + (f" ({number})" if wide else "")


def _rank_columns(width: int, delayed: bool) -> Table:
    """The empty table of ranks; `delayed`: a rank waits for its core."""
    wide, whole = width >= WIDE, width >= VERY_WIDE
    parts = [Text.assemble((bar, style), f" {name if whole else short}") for name, short, bar, style in PARTS]
    table = dense_table("rank", "stage", "layers", "weights", "KV size", *parts, *([DELAYED] if delayed else []))
    if wide:
        table.add_column("share of a step", no_wrap=True)
    if delayed:
        table.caption, table.caption_justify, table.caption_style = f" {NO_CORE}", "left", FAINT
    return table


def step_bar(row: Mapping[str, Any]) -> Text:
    """The parts of a rank's steps as a bar; "idle" if it had none in the last seconds."""
    parts = [row[name] or 0.0 for name, *_ in PARTS]
    if not sum(parts):
        return Text("idle".ljust(STEP_BAR), style=FAINT)
    bar, until, drawn = Text(), 0.0, 0
    for part, (*_, character, style) in zip(parts, PARTS, strict=True):
        until += part / sum(parts)
        bar.append(character * (round(STEP_BAR * until) - drawn), style=style)
        drawn = round(STEP_BAR * until)
    return bar


def _pair(seconds: Mapping[str, float | None]) -> str:
    """Two percentiles in one unit."""
    known = [one for one in (seconds["p50"], seconds["p95"]) if one is not None]
    if not known:
        return UNKNOWN
    factor, digits, unit = (1000, 0, "ms") if max(known) < 9.9995 else (1, 1, "s")
    words = (UNKNOWN if one is None else f"{factor * one:.{digits}f}" for one in (seconds["p50"], seconds["p95"]))
    return f"{'/'.join(words)} {unit}"
