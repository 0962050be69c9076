"""weft top: GPUs, models, ranks and their diagnosis, live, over all servers of a user or behind a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from typing import Any

from weft.cli.flags.command_flags import TopArguments
from weft.cli.parser import UsageError
from weft.cli.top.watch import LocalMachine, ServerWatch, TopSnapshot, each_gpu
from weft.monitor.figures import join_figures

BETWEEN_S = 0.5  # the two samples of --once, of which rates are made
MIB = 1 << 20
MISSING = "[N/A]"  # as nvidia-smi writes it


def main(arguments: TopArguments) -> int:
    """Print figures once or again and again until Ctrl-C; return 1 if URLs were given and none answered at the end."""
    urls = arguments.url
    if arguments.interval <= 0:
        raise UsageError(f"--interval is {arguments.interval:g}; give seconds above 0", code="invalid-flag-value")
    form = "json" if arguments.json else arguments.format
    api_key = arguments.api_key or os.environ.get("VLLM_API_KEY")
    watch = ServerWatch(urls, api_key, os.environ.get("WEFT_ADMIN_KEY"))
    machine = None if urls else LocalMachine()
    try:
        last = asyncio.run(show(watch, machine, form, arguments.interval, once=arguments.once or arguments.json))
    finally:
        if machine is not None:
            machine.close()
    return 1 if urls and _none_answered(last) else 0


def _none_answered(last: TopSnapshot | None) -> bool:
    return last is not None and not last.servers


async def show(
    watch: ServerWatch, machine: LocalMachine | None, form: str, interval_s: float, *, once: bool
) -> TopSnapshot | None:
    """Print snapshots in a format until a signal, or only one; return the last."""
    stop = asyncio.Event()
    last: TopSnapshot | None = None
    with contextlib.closing(watch), stopped_by_signals(stop):
        # Textual reads keys from standard input, and draws on standard error.
        if form == "table" and not once and all(one.isatty() for one in (sys.stdin, sys.stdout, sys.stderr)):
            return await show_live(snapshots(watch, machine, interval_s, stop, once=False), stop)
        if form == "csv":
            print(csv_header(), flush=True)
        async for last in snapshots(watch, machine, interval_s, stop, once=once):
            print_snapshot(last, form)
    return last


async def show_live(snapshots: AsyncIterator[TopSnapshot], stop: asyncio.Event) -> TopSnapshot | None:
    """Show snapshots on the whole terminal until a signal or a key ends it; return the last."""
    from weft.cli.top.app import TopApp  # not for --once

    app = TopApp(snapshots, stop)
    # Without the mouse: the terminal's own selection copies what is shown.
    await app.run_async(mouse=False)
    if app.return_code:  # Textual has printed the error
        raise SystemExit(app.return_code)
    return app.last


async def snapshots(
    watch: ServerWatch, machine: LocalMachine | None, interval_s: float, stop: asyncio.Event, *, once: bool
) -> AsyncIterator[TopSnapshot]:
    """A snapshot every `interval_s` seconds until `stop` is set, or only one."""
    if once and machine is not None:
        await asyncio.to_thread(machine.sample)
        await asyncio.sleep(BETWEEN_S)
    while not stop.is_set():
        began = time.monotonic()
        yield await take_snapshot(watch, machine)
        if once:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), max(0.05, began + interval_s - time.monotonic()))


async def take_snapshot(watch: ServerWatch, machine: LocalMachine | None) -> TopSnapshot:
    """Ask all servers, and sample this machine at the same time."""
    if machine is None:
        local, (servers, problems) = None, await watch.snapshot()
    else:
        local, (servers, problems) = await asyncio.gather(asyncio.to_thread(machine.sample), watch.snapshot())
    figures = join_figures([figures for _, figures in servers], local, time.time())
    return TopSnapshot(servers, figures, problems, {} if machine is None else machine.cores)


def print_snapshot(snapshot: TopSnapshot, form: str) -> None:
    """Print a snapshot as a page, as one line of JSON, or as lines of CSV; problems go to standard error."""
    if form == "table":
        from weft.cli.tables import console
        from weft.cli.top.sparks import Sparks
        from weft.cli.top.tables import page

        out = console()
        out.print(page(snapshot, Sparks(), out.width))
        return
    for problem in snapshot.problems:
        print(f"weft top: {problem}", file=sys.stderr)
    if form == "json":
        print(json.dumps(snapshot.figures), flush=True)
        return
    for line in csv_lines(snapshot.figures):
        print(line, flush=True)


@contextlib.contextmanager
def stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` at Ctrl-C or SIGTERM, in place of what they do otherwise."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        for number in signals:
            loop.add_signal_handler(number, stop.set)
    except (NotImplementedError, RuntimeError, ValueError):  # not in the main thread, or not on this system
        yield
        return
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _in(unit: str, scale: float, digits: int = 0) -> Callable[[float], str]:
    return lambda value: f"{value * scale:.{digits}f} {unit}"


# Column of nvidia-smi --query-gpu, field of ours, and the way to write a value. The last two have no column there.
COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("index", "index", str),
    ("name", "name", str),
    ("utilization.gpu [%]", "utilization", _in("%", 1)),
    ("utilization.memory [%]", "memory_utilization", _in("%", 1)),
    ("memory.used [MiB]", "memory_used_bytes", _in("MiB", 1 / MIB)),
    ("memory.total [MiB]", "memory_total_bytes", _in("MiB", 1 / MIB)),
    ("temperature.gpu", "temperature_c", str),
    ("power.draw [W]", "power_w", _in("W", 1, 2)),
    ("clocks.current.sm [MHz]", "sm_clock_mhz", _in("MHz", 1)),
    ("pcie.tx [MB/s]", "pcie_tx_Bps", _in("MB/s", 1e-6, 1)),
    ("pcie.rx [MB/s]", "pcie_rx_Bps", _in("MB/s", 1e-6, 1)),
    ("nvlink.tx [MB/s]", "nvlink_tx_Bps", _in("MB/s", 1e-6, 1)),
    ("nvlink.rx [MB/s]", "nvlink_rx_Bps", _in("MB/s", 1e-6, 1)),
)


def csv_header() -> str:
    """The first line of the CSV: the names of the columns."""
    return ", ".join(("timestamp", "host", *(name for name, _, _ in COLUMNS)))


def csv_lines(figures: dict[str, Any]) -> Iterator[str]:
    """A line of the CSV for each GPU."""
    time = datetime.fromtimestamp(figures["time"]).strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
    for node, gpu in each_gpu(figures):
        values = (MISSING if gpu[field] is None else write(gpu[field]) for _, field, write in COLUMNS)
        yield ", ".join((time, node, *(value.replace(",", " ") for value in values)))
