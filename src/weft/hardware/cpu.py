"""The CPU of this machine: its model, its cores, its NUMA nodes, and what instructions it has for matrices."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

# Instruction sets that matter to matrix products, as Linux calls them (x86, then Arm).
MATRIX_FEATURES = (
    "avx2",
    "fma",
    "avx_vnni",
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


TOKENS = (1, 4, 8, 32)  # of a step, for which products are told of one by one


class ProductSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Matrix products with weights of so many bits, which come from memory: bytes of them per second with so many
    tokens as TOKENS says, and what each token beyond the last of these takes, as operations per second. `source` as in
    `KernelSpeed`, "" where it is the same."""

    bits: int
    weights_Bps: Annotated[tuple[float, ...], Meta(min_length=len(TOKENS), max_length=len(TOKENS))]
    matmul_flops: float
    source: str = ""


class KernelSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's own kernels reach on all cores together that a process may use: `products` by their bits; bytes
    per second of keys and values in decode, operations per second of a prompt's attention, bytes per second of
    activations that SiLU reads and writes. `source` tells where the figures are from, "" of those that were measured
    here. `measured`: they all were, but for `products` that say otherwise, while nothing else computed."""

    products: tuple[ProductSpeed, ...]
    cache_Bps: float
    attention_flops: float
    rows_Bps: float
    source: str = ""
    measured: bool = False

    def scaled(self, bandwidth_Bps: float, memory: float, compute: float) -> KernelSpeed:
        """That of a CPU whose memory, of this bandwidth, is so many times as fast, and that computes so many times as
        fast: of what comes from memory the bandwidth takes its time, and computing the rest."""

        def streaming(rate: float) -> float:
            least = min(1 / bandwidth_Bps, 1 / rate)
            return 1 / (least / memory + (1 / rate - least) / compute)

        products = (
            msgspec.structs.replace(
                it, weights_Bps=tuple(map(streaming, it.weights_Bps)), matmul_flops=it.matmul_flops * compute
            )
            for it in self.products
        )
        return msgspec.structs.replace(
            self,
            products=tuple(products),
            cache_Bps=streaming(self.cache_Bps),
            attention_flops=self.attention_flops * compute,
            rows_Bps=self.rows_Bps * compute,
        )


class CpuSpeed(msgspec.Struct, frozen=True):
    """What was measured of all cores together that a process may use: bytes per second that they read from memory, and
    operations per second of 32-bit matrix products (a multiplication and an addition are two). `busy`: others computed
    at the same time, and the figures may be too low. `library` is the name of that of our own kernels at the time, ""
    where it was not built yet, None where there was no compiler; only of one that is there, and runs, `kernels` are
    known."""

    bandwidth_Bps: float
    fp32_flops: float
    busy: bool = False
    library: str | None = ""
    kernels: KernelSpeed | None = None

    @property
    def runs_own(self) -> bool:
        """Whether our own kernels run here: they did, or are still to be built."""
        return self.kernels is not None or self.library == ""


def probe_cpu(root: Path = Path("/")) -> Cpu:
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
                cores=parse_cpu_list(_read(folder / "cpulist")),
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


def load_average() -> float:
    """The share of the machine's cores that were wanted in the last minute, as a mean; it may be above 1."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


def busy_seconds(cores: Collection[int], root: Path = Path("/")) -> float | None:
    """Seconds that these cores have been at work since the machine's start, or taken by others on its host; None where
    the kernel does not tell."""
    lines = (line.split() for line in _read(root / "proc/stat").splitlines())
    found = [list(map(int, words[1:])) for words in lines if words and words[0] in {f"cpu{core}" for core in cores}]
    # user nice system idle iowait irq softirq steal; the rest is in the first two.
    ticks = sum(sum(times[:8]) - sum(times[3:5]) for times in found)
    return ticks / os.sysconf("SC_CLK_TCK") if found else None


def parse_cpu_list(ranges: str) -> tuple[int, ...]:
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
