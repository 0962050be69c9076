"""The CPU of this machine: its model, its cores, its NUMA nodes, and what instructions it has for matrices."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import msgspec

# Instruction sets that matter to matrix products, as Linux calls them (x86, then Arm).
MATRIX_FEATURES = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "i8mm",
    "bf16",
)


class NumaNode(msgspec.Struct, frozen=True):
    """A part of the machine's memory, and the CPU numbers that are near it."""

    number: int
    cores: tuple[int, ...]
    memory_total_bytes: int
    memory_free_bytes: int


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine has, whatever this process may use of it. `threads` counts what the kernel numbers,
    `cores` what there is of hardware. `features` are those of MATRIX_FEATURES that it has."""

    model: str
    sockets: int
    cores: int
    threads: int
    features: tuple[str, ...] = ()
    nodes: tuple[NumaNode, ...] = ()


class CpuSpeed(msgspec.Struct, frozen=True):
    """What was measured of all cores together that a process may use: bytes per second that they read from memory, and
    operations per second of 32-bit matrix products (a multiplication and an addition are two). `busy`: others computed
    at the same time, and the figures may be too low."""

    bandwidth_Bps: float
    fp32_flops: float
    busy: bool = False


def look(root: Path = Path("/")) -> Cpu:
    """What the kernel's files below `root` tell; elsewhere what Python knows."""
    text = _read(root / "proc/cpuinfo")
    entries = [dict(_fields(part)) for part in text.split("\n\n") if "processor" in part]
    first = entries[0] if entries else {}
    flags = set((first.get("flags") or first.get("Features") or "").split())
    # Arm tells neither sockets nor cores there.
    sockets = {entry["physical id"] for entry in entries if "physical id" in entry}
    cores = {(entry.get("physical id"), entry["core id"]) for entry in entries if "core id" in entry}
    threads = len(entries) or os.cpu_count() or 1
    return Cpu(
        model=" ".join(first.get("model name", "").split()) or platform.processor() or platform.machine(),
        sockets=len(sockets) or 1,
        cores=len(cores) or threads,
        threads=threads,
        features=tuple(name for name in MATRIX_FEATURES if name in flags),
        nodes=numa_nodes(root),
    )


def numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    """Those that the kernel lists; none where it does not."""
    found = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda it: int(it.name[4:])):
        info = dict(re.findall(r"(\w+):\s+(\d+)", _read(folder / "meminfo")))
        found.append(
            NumaNode(
                number=int(folder.name[4:]),
                cores=numbers(_read(folder / "cpulist")),
                memory_total_bytes=int(info.get("MemTotal", 0)) * 1024,
                memory_free_bytes=int(info.get("MemFree", 0)) * 1024,
            )
        )
    return tuple(found)


def last_cache_bytes(root: Path = Path("/")) -> int:
    """The last level of cache, each of its parts once, which several cores share; 0 where the kernel does not tell."""
    parts: dict[str, int] = {}
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache"):
        levels = {_read(index / "level"): index for index in folder.glob("index[0-9]*")}
        last = levels.get(max(levels, default=""))
        if last is not None:
            size = re.fullmatch(r"(\d+)([KM]?)", _read(last / "size"))
            unit = {"": 1, "K": 1 << 10, "M": 1 << 20}
            if size:
                parts[_read(last / "shared_cpu_list")] = int(size[1]) * unit[size[2]]
    return sum(parts.values())


def numbers(ranges: str) -> tuple[int, ...]:
    """The kernel's lists: 0-3,8 is 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in ranges.split(","):
        low, _, high = part.strip().partition("-")
        if low.isdecimal():
            found += range(int(low), int(high or low) + 1)
    return tuple(found)


def _fields(entry: str) -> list[tuple[str, str]]:
    pairs = (line.partition(":") for line in entry.splitlines() if ":" in line)
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
