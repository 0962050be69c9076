"""The sections of `weft top`: what is wrong, GPUs or cores, models and ranks, as tables that follow a width."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from weft.cli.top.cells import (
    BAD,
    FAINT,
    GOOD,
    NEARLY_FULL,
    SIGN,
    UNKNOWN,
    VERY_WIDE,
    WARN,
    WIDE,
    dense_table,
    fitted,
    share,
)
from weft.cli.top.models import model_table, rank_table
from weft.cli.top.sparks import Sparks, gpu_key
from weft.cli.top.watch import TopSnapshot, each_gpu, rows_of_servers
from weft.monitor.finding import RuleLimits

FOLLOWS = "└ "  # before a finding that follows from another one


class Section(NamedTuple):
    """A part of the page: its name, and what it shows; `faulty`: it is about something wrong."""

    name: str
    content: RenderableType
    faulty: bool = False


def sections(snapshot: TopSnapshot, sparks: Sparks, width: int) -> list[Section]:
    """Everything that is known now, for a page of `width` columns."""
    return [*_machine(snapshot, sparks, width), *_servers(snapshot, sparks, width), verdict(snapshot)]


def _machine(snapshot: TopSnapshot, sparks: Sparks, width: int) -> Iterator[Section]:
    gpus = list(each_gpu(snapshot.figures))
    if gpus:
        yield Section("GPUs", gpu_table(gpus, sparks, width))
        yield Section("Memory of GPUs", memory_table(gpus, snapshot, width))
    elif snapshot.cores:
        yield Section("Cores (no GPU)", core_table(snapshot.cores, width))


def _servers(snapshot: TopSnapshot, sparks: Sparks, width: int) -> Iterator[Section]:
    if rows_of_servers(snapshot, "models"):
        yield Section("Models", model_table(snapshot, sparks, width))
    if rows_of_servers(snapshot, "ranks"):
        yield Section("Ranks", rank_table(snapshot, width))


def page(snapshot: TopSnapshot, sparks: Sparks, width: int) -> RenderableType:
    """All sections below each other, what is wrong at the end."""
    parts: list[RenderableType] = [Text(headline(snapshot), style=FAINT), Text()]
    for section in sections(snapshot, sparks, width):
        parts += [Text(section.name, style=BAD if section.faulty else "bold"), section.content, Text()]
    return Group(*parts[:-1])


def headline(snapshot: TopSnapshot) -> str:
    """Time, servers, GPUs and tokens per second in a line."""
    gpus, models = list(each_gpu(snapshot.figures)), snapshot.figures["models"]
    rates = [model["tok_s"] for model in models if model["tok_s"] is not None]
    parts = [
        time.strftime("%H:%M:%S", time.localtime(snapshot.figures["time"])),
        snapshot.servers[0][0] if len(snapshot.servers) == 1 else _count(len(snapshot.servers), "server"),
        _count(len(snapshot.figures["ranks"]), "rank"),
        _count(len(gpus), "GPU") if gpus else "no GPU",
        *([f"{sum(rates):,.0f} tok/s"] if rates else []),
    ]
    return "  ·  ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- what is wrong ---


def verdict(snapshot: TopSnapshot) -> Section:
    """The findings of the diagnosis, and servers that do not answer."""
    findings = list(_findings(snapshot.servers))
    problems = [Text(f"✗ {problem}", style="red") for problem in snapshot.problems]
    if findings or problems:
        return Section("Diagnosis", Padding(Group(*findings, *problems), (0, 0, 0, 1)), faulty=True)
    if not snapshot.servers:
        return Section("Diagnosis", Text(" No server of this user runs here; --url names others.", style=FAINT))
    if watched := list(_watched(snapshot)):
        return Section("Diagnosis", Text(f" watching: {'; '.join(watched)}. It becomes a finding if it lasts.", WARN))
    return Section("Diagnosis", Text(" ✓ Nothing found.", style=GOOD))


def _watched(snapshot: TopSnapshot) -> Iterator[str]:
    """Faults that the tables show, and that the diagnosis may find once they have lasted."""
    ranks = [row for _, row in rows_of_servers(snapshot, "ranks")]
    if (most := max((row.get("delayed") or 0.0 for row in ranks), default=0.0)) > RuleLimits().delayed:
        yield f"ranks without a core for up to {most:.0%} of a step"
    for _, row in rows_of_servers(snapshot, "models"):
        if (row["kv_usage"] or 0.0) >= NEARLY_FULL:
            yield f"the KV cache of {row['name']} is {row['kv_usage']:.0%} full"


def _findings(servers: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[RenderableType]:
    """Two paragraphs for each finding; if there are several servers, with the URL of its server.

    Findings that follow from another one come after all others of their server.
    """
    for url, figures in servers:
        where = f"{url}: " if len(servers) > 1 else ""
        for finding in sorted(figures["diagnosis"], key=lambda one: bool(one.get("follows_from"))):
            cause = finding.get("follows_from")
            sign, when = (FOLLOWS, " if it remains") if cause else (SIGN, "")
            code = Text.assemble((finding["code"], WARN), f" follows from {cause}" if cause else "", ": ")
            yield Text.assemble(sign, where, code, finding["text"])
            yield Padding(Text.assemble((f"remedy{when}: ", "bold"), (finding["remedy"], "cyan")), (0, 0, 0, 4))


# --- GPUs and cores ---


def gpu_table(gpus: Sequence[tuple[str, dict[str, Any]]], sparks: Sparks, width: int) -> Table:
    """A row for each GPU."""
    wide = width >= WIDE
    names = ["GPU", "ranks", "use", "power", "clock", "temp", "PCIe GB/s", "NVLink GB/s"]
    lines = width >= VERY_WIDE and any(sparks.line(gpu_key(*gpu)) for gpu in gpus)
    more = [f"use 0 to 100%, {sparks.window}"] if lines else []
    table = dense_table(*names, *more)
    for node, gpu in gpus:
        table.add_row(
            gpu_name(node, gpu) + (f" {gpu['name'].removeprefix('NVIDIA ')}" if wide else ""),
            ",".join(map(str, gpu["ranks"])) or UNKNOWN,
            share(None if gpu["utilization"] is None else gpu["utilization"] / 100, wide, alarming=False),
            _unit(gpu["power_w"], "W"),
            _unit(gpu["sm_clock_mhz"], "MHz"),
            _unit(gpu["temperature_c"], "°C"),
            _traffic(gpu["pcie_tx_Bps"], gpu["pcie_rx_Bps"]),
            _traffic(gpu["nvlink_tx_Bps"], gpu["nvlink_rx_Bps"]),
            *(sparks.line(gpu_key(node, gpu), 100.0) for _ in more),
        )
    return fitted(table, width, [*more, "NVLink GB/s", "PCIe GB/s", "clock", "temp", "power", "ranks"])


def gpu_name(node: str, gpu: Mapping[str, Any]) -> str:
    return f"{node}:{gpu['index']}"


def memory_table(gpus: Sequence[tuple[str, dict[str, Any]]], snapshot: TopSnapshot, width: int) -> Table:
    """A row for each GPU: its memory, what the ranks on it hold for weights and KV cache, and each process by name."""
    held = memory_of_ranks(snapshot)
    table = dense_table("GPU", "in use", "of", "", "weights", "KV cache")
    table.add_column("processes", overflow="fold")
    for node, gpu in gpus:
        used, whole = gpu["memory_used_bytes"], gpu["memory_total_bytes"]
        weights, cache = held.get((node, gpu["index"]), (None, None))
        table.add_row(
            gpu_name(node, gpu),
            _gib(used),
            _gib(whole),
            share(None if used is None or not whole else used / whole, width >= WIDE, alarming=False),
            _gib(weights),
            _gib(cache),
            ", ".join(map(_holder, gpu["processes"])) or UNKNOWN,
        )
    return fitted(table, width, ["", "KV cache", "weights", "of"])


def memory_of_ranks(snapshot: TopSnapshot) -> dict[tuple[str, int], tuple[int, int]]:
    """Bytes of weights and of KV cache that the ranks on each GPU hold, by node and index."""
    held: dict[tuple[str, int], tuple[int, int]] = {}
    for _, row in rows_of_servers(snapshot, "ranks"):
        kind, _, index = row["device"].partition(":")
        if kind == "cuda" and index.isdigit():
            place = row.get("node", ""), int(index)
            weights, cache = held.get(place, (0, 0))
            held[place] = weights + row.get("weight_bytes", 0), cache + row.get("kv_bytes", 0)
    return held


def _holder(process: Mapping[str, Any]) -> str:
    number = "" if process["pid"] is None else f" ({process['pid']})"
    return f"{process['name'] or 'process'}{number} {_gib(process['used_bytes'])}"


def core_table(cores: Mapping[int, float], width: int) -> Table:
    """The use of this machine's cores, several in a row."""
    columns = max(1, min(len(cores), width // 24))
    table = Table.grid(padding=(0, 3))
    cells = [Text.assemble(f" {core:>3}  ", share(used, True, alarming=False)) for core, used in sorted(cores.items())]
    for first in range(0, len(cells), columns):
        table.add_row(*cells[first : first + columns])
    return table


def _unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f} {unit}"


def _gib(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / 2**30:.1f} GiB"


def _traffic(sent: float | None, received: float | None) -> str:
    if sent is None or received is None:
        return UNKNOWN
    return f"{sent / 1e9:.1f}/{received / 1e9:.1f}"
