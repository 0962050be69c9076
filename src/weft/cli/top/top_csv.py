"""The figures of GPUs as CSV, with nvidia-smi's names of columns and units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from weft.cli.top.top_watch import each_gpu

MIB = 1 << 20
MISSING = "[N/A]"  # as nvidia-smi writes it


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
    """The first line."""
    return ", ".join(("timestamp", "host", *(name for name, _, _ in COLUMNS)))


def csv_lines(figures: dict[str, Any]) -> Iterator[str]:
    """A line for each GPU."""
    time = datetime.fromtimestamp(figures["time"]).strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
    for node, gpu in each_gpu(figures):
        values = (MISSING if gpu[field] is None else write(gpu[field]) for _, field, write in COLUMNS)
        yield ", ".join((time, node, *(value.replace(",", " ") for value in values)))
