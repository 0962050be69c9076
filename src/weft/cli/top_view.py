"""The page of `weft top`: tables that follow the terminal's size, redrawn in place."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weft.cli.tables import console, figures_table
from weft.cli.top_watch import each_gpu
from weft.formatting import format_bytes

if TYPE_CHECKING:
    from weft.cli.top import Look

BARS = "▁▂▃▄▅▆▇█"
POINTS = 24  # of a sparkline
UNKNOWN = "-"


class Sparks:
    """The last values of each figure, as lines of bars."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float]] = {}

    def line(self, name: str, value: float | None, most: float | None = None) -> str:
        """Add a value, and draw all; the highest bar stands for `most`, or for the largest value."""
        values = self._values.setdefault(name, deque(maxlen=POINTS))
        values.append(value or 0.0)
        top = max(most or 0.0, *values, 1e-9)
        return "".join(BARS[min(len(BARS) - 1, int(len(BARS) * one / top))] for one in values)


def page(look: Look, sparks: Sparks) -> RenderableType:
    """Everything that is known now."""
    return Group(*_tables(look, sparks), *_remarks(look))


def _tables(look: Look, sparks: Sparks) -> Iterator[RenderableType]:
    gpus = list(each_gpu(look.figures))
    if gpus:
        yield gpu_table(gpus, sparks)
    elif look.cores:
        yield core_line(look.cores)
    models, ranks = _rows_of_servers(look, "models"), _rows_of_servers(look, "ranks")
    if models:
        yield model_table(models, sparks)
    if ranks:
        yield rank_table(ranks)


def _rows_of_servers(look: Look, key: str) -> list[tuple[str, dict[str, Any]]]:
    """The rows under `key` of all servers, each with the URL of its server."""
    return [(url, row) for url, figures in look.servers for row in figures[key]]


def _remarks(look: Look) -> Iterator[Text]:
    """The lines below the tables: findings of the diagnosis, and servers that do not answer."""
    if not look.servers and not look.problems:
        yield Text("No server of this user runs here; --url names others.")
    for line in finding_lines(look.servers):
        yield Text(line, style="yellow")
    if look.servers and not look.figures["diagnosis"]:
        yield Text("Diagnosis: nothing found.")
    for problem in look.problems:
        yield Text(problem, style="red")


def finding_lines(servers: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Two lines for each finding; of several servers with the URL of the one that has it."""
    return [
        f"{f'{url}: ' if len(servers) > 1 else ''}{finding['code']}: {finding['text']}\n    try {finding['remedy']}"
        for url, figures in servers
        for finding in figures["diagnosis"]
    ]


def gpu_table(gpus: Sequence[tuple[str, dict[str, Any]]], sparks: Sparks) -> Table:
    """A row for each GPU."""
    table = figures_table("GPU", "use", "", "memory", "power", "clock", "temp", "PCIe", "NVLink", "ranks")
    for node, gpu in gpus:
        table.add_row(
            f"{node}:{gpu['index']} {gpu['name']}",
            _percent(gpu["utilization"]),
            sparks.line(f"gpu {node} {gpu['index']}", gpu["utilization"], 100.0),
            f"{_gib(gpu['memory_used_bytes'])} of {_gib(gpu['memory_total_bytes'])}",
            _unit(gpu["power_w"], "W"),
            _unit(gpu["sm_clock_mhz"], "MHz"),
            _unit(gpu["temperature_c"], "°C"),
            _traffic(gpu["pcie_tx_Bps"], gpu["pcie_rx_Bps"]),
            _traffic(gpu["nvlink_tx_Bps"], gpu["nvlink_rx_Bps"]),
            ",".join(map(str, gpu["ranks"])) or UNKNOWN,
        )
        for process in gpu["processes"]:
            held = UNKNOWN if process["used_bytes"] is None else _gib(process["used_bytes"])
            number = "" if process["pid"] is None else f" ({process['pid']})"
            table.add_row(f"    {process['name'] or 'process'}{number}", "", "", held)
    return table


def core_line(cores: dict[int, float]) -> Text:
    """The use of this machine's cores; no GPU is visible."""
    shares = "  ".join(f"{core}: {share:.0%}" for core, share in sorted(cores.items()))
    return Text(f"No GPU. Cores in use: {shares}")


def model_table(rows: Sequence[tuple[str, dict[str, Any]]], sparks: Sparks) -> Table:
    """A row for each model of each server."""
    table = figures_table(
        "model", "running", "waiting", "KV", "prefix hits", "TTFT p50/p95", "ITL p50/p95", "tok/s", ""
    )
    for url, row in rows:
        table.add_row(
            f"{row['name']} at {url}",
            str(row["running"]),
            str(row["waiting"]),
            _share(row["kv_usage"]),
            _share(row["prefix_hit_rate"]),
            _pair(row["ttft_s"]),
            _pair(row["itl_s"]),
            UNKNOWN if row["tok_s"] is None else f"{row['tok_s']:,.0f}",
            sparks.line(f"tok {url} {row['name']}", row["tok_s"]),
        )
    return table


def rank_table(ranks: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """A row for each rank: its part of the model, its memory, and the parts of its steps.

    Ranks of several servers have a row with the server's URL above them.
    """
    several = len({url for url, _ in ranks}) > 1
    table = figures_table("rank", "stage", "layers", "weights", "KV", "compute", "communication", "waiting")
    above = ""
    for url, row in ranks:
        if several and url != above:
            table.add_row(url)
        above = url
        first = row.get("first_layer", 0)
        table.add_row(
            f"{row['rank']} on {row.get('node', '')} {row['device']}",
            str(row.get("stage", UNKNOWN)),
            f"{first} to {first + row['layers'] - 1}",
            format_bytes(row.get("weight_bytes", 0)),
            format_bytes(row.get("kv_bytes", 0)),
            _share(row["compute"]),
            _share(row["communication"]),
            _share(row["waiting"]),
        )
    return table


class LiveView:
    """The page in the place of the terminal's contents, which come back at the end. `q` sets `stop`."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop, self._sparks = stop, Sparks()
        self._stack = ExitStack()
        self._live = Live(console=console(), screen=True, auto_refresh=False)

    def __enter__(self) -> LiveView:
        self._stack.enter_context(self._live)
        self._stack.callback(self._watch_keys())
        loop = asyncio.get_running_loop()
        if hasattr(signal, "SIGWINCH"):
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(signal.SIGWINCH, self._live.refresh)
                self._stack.callback(loop.remove_signal_handler, signal.SIGWINCH)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def show(self, look: Look) -> None:
        """Draw a look; what does not fit is cut at the bottom."""
        self._live.update(page(look, self._sparks), refresh=True)

    def _watch_keys(self) -> Any:
        """Have `q` end the view; returns the function that gives the keyboard back."""
        if not sys.stdin.isatty():
            return lambda: None
        import termios
        import tty

        descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
        before = termios.tcgetattr(descriptor)
        tty.setcbreak(descriptor)

        def pressed() -> None:
            if sys.stdin.read(1) in ("q", "Q", ""):
                self._stop.set()

        loop.add_reader(descriptor, pressed)

        def restore() -> None:
            loop.remove_reader(descriptor)
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

        return restore


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f} %"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def _unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f} {unit}"


def _gib(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / 2**30:.1f} GiB"


def _traffic(sent: float | None, received: float | None) -> str:
    if sent is None or received is None:
        return UNKNOWN
    return f"{sent / 1e9:.1f} / {received / 1e9:.1f} GB/s"


def _pair(seconds: dict[str, float | None]) -> str:
    return " / ".join(UNKNOWN if one is None else f"{1000 * one:.0f} ms" for one in (seconds["p50"], seconds["p95"]))
