"""The sections of `weft top`: what is wrong, GPUs or cores, models and ranks, as tables that follow a width."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from weft.cli.top_watch import Look, each_gpu
from weft.formatting import format_bytes

SPARKS = "▁▂▃▄▅▆▇█"
POINTS = 24  # of a sparkline
FULL, EMPTY = "█", "░"
FIRST = 8  # least characters of a table's first column
BAR = 10  # characters of a share's bar
STEP_BAR = 20  # characters of a rank's step
UNKNOWN = "-"
WIDE, VERY_WIDE = 110, 132  # columns from which on there are bars, and sparklines
NEARLY_FULL, BUSY = 0.9, 0.7  # shares from which on a bar is red, and yellow
# The parts of a step: name, its short form, character and style.
PARTS = (
    ("compute", "comp", "█", "green"),
    ("communication", "comm", "▒", "blue"),
    ("waiting", "wait", "·", "grey62"),
)
BAD, GOOD, WARN, FAINT = "bold red", "green", "bold yellow", "grey62"


class Section(NamedTuple):
    """A part of the page: its name, and what it shows; `faulty`: it is about something wrong."""

    name: str
    content: RenderableType
    faulty: bool = False


class Sparks:
    """The last values of each figure, as lines of bars."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float]] = {}

    def add(self, look: Look) -> None:
        """Take the figures of one look."""
        for node, gpu in each_gpu(look.figures):
            self._add(gpu_key(node, gpu), gpu["utilization"])
        for url, row in rows_of_servers(look, "models"):
            self._add(model_key(url, row), row["tok_s"])

    def _add(self, name: str, value: float | None) -> None:
        self._values.setdefault(name, deque(maxlen=POINTS)).append(value or 0.0)

    def line(self, name: str, most: float | None = None) -> str:
        """All values of a figure, none before the second; the highest bar stands for `most`, or the largest value."""
        values = self._values.get(name, ())
        if len(values) < 2:
            return ""
        top = max(most or 0.0, *values, 1e-9)
        return "".join(SPARKS[min(len(SPARKS) - 1, int(len(SPARKS) * one / top))] for one in values)


def gpu_key(node: str, gpu: Mapping[str, Any]) -> str:
    return f"gpu {node} {gpu['index']}"


def model_key(url: str, row: Mapping[str, Any]) -> str:
    return f"tok {url} {row['name']}"


def sections(look: Look, sparks: Sparks, width: int) -> list[Section]:
    """Everything that is known now, for a page with so many columns."""
    return [*_machine(look, sparks, width), *_servers(look, sparks, width), verdict(look)]


def _machine(look: Look, sparks: Sparks, width: int) -> Iterator[Section]:
    gpus = list(each_gpu(look.figures))
    if gpus:
        yield Section("GPUs", gpu_table(gpus, sparks, width))
        yield Section("Memory of GPUs", memory_table(gpus, look, width))
    elif look.cores:
        yield Section("Cores (no GPU)", core_table(look.cores, width))


def _servers(look: Look, sparks: Sparks, width: int) -> Iterator[Section]:
    models, ranks = rows_of_servers(look, "models"), rows_of_servers(look, "ranks")
    if models:
        yield Section("Models", model_table(models, sparks, width))
    if ranks:
        yield Section("Ranks", rank_table(ranks, width))


def rows_of_servers(look: Look, key: str) -> list[tuple[str, dict[str, Any]]]:
    """The rows under `key` of all servers, each with the URL of its server."""
    return [(url, row) for url, figures in look.servers for row in figures[key]]


def page(look: Look, sparks: Sparks, width: int) -> RenderableType:
    """All sections below each other, what is wrong at the end."""
    parts: list[RenderableType] = [Text(headline(look), style=FAINT), Text()]
    for section in sections(look, sparks, width):
        parts += [Text(section.name, style=BAD if section.faulty else "bold"), section.content, Text()]
    return Group(*parts[:-1])


def headline(look: Look) -> str:
    """Time, servers, GPUs and tokens per second in a line."""
    gpus, models = list(each_gpu(look.figures)), look.figures["models"]
    rates = [model["tok_s"] for model in models if model["tok_s"] is not None]
    parts = [
        time.strftime("%H:%M:%S", time.localtime(look.figures["time"])),
        look.servers[0][0] if len(look.servers) == 1 else _count(len(look.servers), "server"),
        _count(len(look.figures["ranks"]), "rank"),
        _count(len(gpus), "GPU") if gpus else "no GPU",
        *([f"{sum(rates):,.0f} tok/s"] if rates else []),
    ]
    return "  ·  ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- what is wrong ---


def verdict(look: Look) -> Section:
    """The findings of the diagnosis, and servers that do not answer."""
    findings = list(_findings(look.servers))
    problems = [Text(f"✗ {problem}", style="red") for problem in look.problems]
    if findings or problems:
        return Section("Diagnosis", Padding(Group(*findings, *problems), (0, 0, 0, 1)), faulty=True)
    if not look.servers:
        return Section("Diagnosis", Text(" No server of this user runs here; --url names others.", style=FAINT))
    return Section("Diagnosis", Text(" ✓ Nothing found.", style=GOOD))


def _findings(servers: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[RenderableType]:
    """Two paragraphs for each finding; of several servers with the URL of the one that has it."""
    for url, figures in servers:
        for finding in figures["diagnosis"]:
            where = f"{url}: " if len(servers) > 1 else ""
            yield Text.assemble("▲ ", where, (finding["code"], WARN), ": ", finding["text"])
            yield Padding(Text.assemble(("remedy: ", "bold"), (finding["remedy"], "cyan")), (0, 0, 0, 4))


# --- GPUs and cores ---


def dense_table(*columns: str | Text) -> Table:
    """An empty table: words in the first column, which may be broken, and figures in the others, which may not."""
    table = Table(box=None, padding=(0, 1), header_style=FAINT)
    for number, name in enumerate(columns):
        table.add_column(
            name,
            justify="right" if number else "left",
            no_wrap=bool(number),
            overflow="fold",
            min_width=None if number else FIRST,
        )
    return table


def gpu_table(gpus: Sequence[tuple[str, dict[str, Any]]], sparks: Sparks, width: int) -> Table:
    """A row for each GPU."""
    wide = width >= WIDE
    names = ["GPU", "ranks", "use", "power", "clock", "temp", "PCIe GB/s", "NVLink GB/s"]
    more = _more(sparks, [gpu_key(*gpu) for gpu in gpus], width)
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
    return table


def _more(sparks: Sparks, keys: Iterable[str], width: int) -> list[str]:
    """A column without a name for sparklines, if there is room for it and anything to show."""
    return [""] if width >= VERY_WIDE and any(map(sparks.line, keys)) else []


def gpu_name(node: str, gpu: Mapping[str, Any]) -> str:
    return f"{node}:{gpu['index']}"


def memory_table(gpus: Sequence[tuple[str, dict[str, Any]]], look: Look, width: int) -> Table:
    """A row for each GPU: its memory, what the ranks on it hold for weights and KV cache, and each process by name."""
    held = memory_of_ranks(look)
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
    return table


def memory_of_ranks(look: Look) -> dict[tuple[str, int], tuple[int, int]]:
    """Bytes of weights and of KV cache that the ranks on each GPU hold, by node and index."""
    held: dict[tuple[str, int], tuple[int, int]] = {}
    for _, row in rows_of_servers(look, "ranks"):
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


# --- models and ranks ---


def model_table(rows: Sequence[tuple[str, dict[str, Any]]], sparks: Sparks, width: int) -> Table:
    """A row for each model of each server."""
    wide, several = width >= WIDE, len({url for url, _ in rows}) > 1
    names = ["model", "running", "waiting", "KV cache", "prefix hits", "TTFT p50/p95", "ITL p50/p95", "tok/s"]
    short = ["model", "run", "wait", "KV", "hits", "TTFT p50/p95", "ITL p50/p95", "tok/s"]
    more = _more(sparks, [model_key(*row) for row in rows], width)
    table = dense_table(*(names if wide else short), *more)
    for url, row in rows:
        table.add_row(
            f"{row['name']} at {url.removeprefix('http://')}" if several else row["name"],
            str(row["running"]),
            Text(str(row["waiting"]), style="yellow" if row["waiting"] else ""),
            share(row["kv_usage"], wide),
            share(row["prefix_hit_rate"], False, alarming=False),
            _pair(row["ttft_s"]),
            _pair(row["itl_s"]),
            UNKNOWN if row["tok_s"] is None else f"{row['tok_s']:,.0f}",
            *(sparks.line(model_key(url, row)) for _ in more),
        )
    return table


def rank_table(ranks: Sequence[tuple[str, dict[str, Any]]], width: int) -> Table:
    """A row for each rank: its part of the model, its memory, and the parts of its steps.

    Ranks of several servers have a row with the server's URL above them.
    """
    several, wide = len({url for url, _ in ranks}) > 1, width >= WIDE
    nodes = len({row.get("node", "") for _, row in ranks} - {""})  # a replica that starts has not told its own yet
    parts = [Text.assemble((bar, style), f" {name if wide else short}") for name, short, bar, style in PARTS]
    table = dense_table("rank", "stage", "layers", "weights", "KV cache", *parts)
    if wide:
        table.add_column("share of a step", no_wrap=True)
    above = ""
    for url, row in ranks:
        if several and url != above:
            table.add_row(Text(url.removeprefix("http://"), style=FAINT))
        above = url
        first = row.get("first_layer", 0)
        table.add_row(
            f"{row['rank']} on {row['node'] + ' ' if nodes > 1 and row['node'] else ''}{row['device']}",
            str(row.get("stage", UNKNOWN)),
            f"{first}-{first + row['layers'] - 1}" + (f" ({row['layers']})" if wide else ""),
            format_bytes(row.get("weight_bytes", 0)),
            format_bytes(row.get("kv_bytes", 0)),
            *(share(row[name], False, alarming=False) for name, *_ in PARTS),
            *([step_bar(row)] if wide else []),
        )
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


def share(value: float | None, wide: bool, *, alarming: bool = True) -> Text:
    """A share in percent, with a bar if the page is wide; `alarming`: a high one is red."""
    if value is None:
        return Text(UNKNOWN)
    style = "" if not alarming or value < BUSY else "yellow" if value < NEARLY_FULL else BAD
    percent = Text(f"{value:4.0%}", style=style)
    if not wide:
        return percent
    full = min(BAR, max(0, round(BAR * value)))
    return Text.assemble((FULL * full, style or GOOD), (EMPTY * (BAR - full), FAINT), " ", percent)


def _unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f} {unit}"


def _gib(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / 2**30:.1f} GiB"


def _traffic(sent: float | None, received: float | None) -> str:
    if sent is None or received is None:
        return UNKNOWN
    return f"{sent / 1e9:.1f}/{received / 1e9:.1f}"


def _pair(seconds: Mapping[str, float | None]) -> str:
    """Two percentiles in one unit."""
    known = [one for one in (seconds["p50"], seconds["p95"]) if one is not None]
    if not known:
        return UNKNOWN
    factor, digits, unit = (1000, 0, "ms") if max(known) < 9.9995 else (1, 1, "s")
    words = (UNKNOWN if one is None else f"{factor * one:.{digits}f}" for one in (seconds["p50"], seconds["p95"]))
    return f"{'/'.join(words)} {unit}"
