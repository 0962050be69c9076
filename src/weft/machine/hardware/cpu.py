"""The CPU of this machine: model, cores, NUMA nodes, instruction sets for matrices, and measured speeds."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

# Instruction sets that matter to matrix products, by their names in Linux (x86, then Arm).
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
    """A part of the machine's memory, and the numbers of the CPUs near it."""

    number: int
    cores: tuple[int, ...]
    memory_total_bytes: int
    memory_free_bytes: int


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's CPU, including what this process may not use. `threads` counts logical CPUs, `cores` physical ones.
    `features` are the MATRIX_FEATURES that the CPU has."""

    model: str
    sockets: int
    cores: int
    threads: int
    features: tuple[str, ...] = ()
    nodes: tuple[NumaNode, ...] = ()


TOKENS = (1, 4, 8, 32)  # numbers of tokens in a step for which products are measured one by one


class ProductSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of matrix products with weights of `bits` bits that come from memory. `weights_Bps` is bytes of weights per
    second, one figure for each of TOKENS; `matmul_flops` is operations per second for the tokens beyond the last of
    these. `source` as in `KernelSpeed`, "" if it is the same."""

    bits: int
    weights_Bps: Annotated[tuple[float, ...], Meta(min_length=len(TOKENS), max_length=len(TOKENS))]
    matmul_flops: float
    source: str = ""


class KernelSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of Weft's own kernels on all cores together that a process may use.

    `products` by their bits; `cache_Bps`: bytes of keys and values per second in decode; `attention_flops`: operations
    per second of attention in prefill; `rows_Bps`: bytes per second of activations that SiLU reads and writes. `source`
    is the origin of the figures, "" if they were measured here. `measured` is True if nothing else computed during the
    measurement; `products` with a source of their own are excepted.
    """

    products: tuple[ProductSpeed, ...]
    cache_Bps: float
    attention_flops: float
    rows_Bps: float
    source: str = ""
    measured: bool = False

    def scaled(self, bandwidth_Bps: float, memory: float, compute: float) -> KernelSpeed:
        """This speed scaled to a CPU with `memory` times the bandwidth and `compute` times the FLOPS.

        `bandwidth_Bps` is the bandwidth of this CPU. The time of streaming is split into the part that the bandwidth
        takes and the rest, which computing takes.
        """

        def streaming(rate: float) -> float:
            least = min(1 / bandwidth_Bps, 1 / rate)
            return 1 / (least / memory + (1 / rate - least) / compute)

        products = (
            msgspec.structs.replace(
                product,
                weights_Bps=tuple(map(streaming, product.weights_Bps)),
                matmul_flops=product.matmul_flops * compute,
            )
            for product in self.products
        )
        return msgspec.structs.replace(
            self,
            products=tuple(products),
            cache_Bps=streaming(self.cache_Bps),
            attention_flops=self.attention_flops * compute,
            rows_Bps=self.rows_Bps * compute,
        )


class CpuSpeed(msgspec.Struct, frozen=True):
    """Measured speed of all cores together that a process may use.

    `bandwidth_Bps` is bytes per second read from memory; `fp32_flops` is operations per second of 32-bit matrix
    products (a multiplication and an addition are two). `busy`: other processes computed at the same time, so the
    figures may be too low. `library` is the file name of Weft's compiled kernels at the time, "" if they were not built
    yet, None without a compiler. `kernels` are known only if that library existed and ran.
    """

    bandwidth_Bps: float
    fp32_flops: float
    busy: bool = False
    library: str | None = ""
    kernels: KernelSpeed | None = None

    @property
    def runs_own(self) -> bool:
        """True if Weft's own kernels run here: they did, or have yet to be built."""
        return self.kernels is not None or self.library == ""


def probe_cpu(root: Path = Path("/")) -> Cpu:
    """Read the CPU from the kernel's files below `root`, or from Python on other systems."""
    entries = _cpuinfo(root)
    first = entries[0] if entries else {}
    threads = len(entries) or os.cpu_count() or 1
    # On Arm the file lists neither sockets nor cores.
    return Cpu(
        model=_model_name(first),
        sockets=_count_sockets(entries) or 1,
        cores=_count_cores(entries) or threads,
        threads=threads,
        features=_matrix_features(first),
        nodes=numa_nodes(root),
    )


def _count_sockets(entries: Sequence[Mapping[str, str]]) -> int:
    return len({entry["physical id"] for entry in entries if "physical id" in entry})


def _count_cores(entries: Sequence[Mapping[str, str]]) -> int:
    return len({(entry.get("physical id"), entry["core id"]) for entry in entries if "core id" in entry})


def _matrix_features(entry: Mapping[str, str]) -> tuple[str, ...]:
    """The names in MATRIX_FEATURES that the CPU of this entry has."""
    flags = (entry.get("flags") or entry.get("Features") or "").split()
    return tuple(name for name in MATRIX_FEATURES if name in flags)


def _cpuinfo(root: Path) -> list[dict[str, str]]:
    """Fields of each logical CPU."""
    text = _read_file(root / "proc/cpuinfo")
    return [dict(_fields(part)) for part in text.split("\n\n") if "processor" in part]


def _model_name(fields: dict[str, str]) -> str:
    return " ".join(fields.get("model name", "").split()) or platform.processor() or platform.machine()


def numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    """NUMA nodes that the kernel lists; empty if it lists none."""
    nodes = []
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    for folder in sorted(folders, key=lambda folder: int(folder.name[4:])):
        info = dict(re.findall(r"(\w+):\s+(\d+)", _read_file(folder / "meminfo")))
        nodes.append(
            NumaNode(
                number=int(folder.name[4:]),
                cores=parse_cpu_list(_read_file(folder / "cpulist")),
                memory_total_bytes=int(info.get("MemTotal", 0)) * 1024,
                memory_free_bytes=int(info.get("MemFree", 0)) * 1024,
            )
        )
    return tuple(nodes)


def last_cache_bytes(root: Path = Path("/")) -> int:
    """Bytes of the last level of cache, each shared part counted once; 0 if the kernel does not report them."""
    parts: dict[str, int] = {}
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache"):
        levels = {_read_file(index / "level"): index for index in folder.glob("index[0-9]*")}
        last = levels.get(max(levels, default=""))
        if last is not None:
            size = re.fullmatch(r"(\d+)([KM]?)", _read_file(last / "size"))
            unit = {"": 1, "K": 1 << 10, "M": 1 << 20}
            if size:
                parts[_read_file(last / "shared_cpu_list")] = int(size[1]) * unit[size[2]]
    return sum(parts.values())


def load_average() -> float:
    """Mean share of the machine's cores that were in demand in the last minute; it may be above 1."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


def busy_seconds(cores: Collection[int], root: Path = Path("/")) -> float | None:
    """Seconds that these cores have worked since boot, including time stolen by other guests of the host; None if the
    kernel does not report them."""
    wanted = {f"cpu{core}" for core in cores}
    lines = (line.split() for line in _read_file(root / "proc/stat").splitlines())
    counters = [list(map(int, words[1:])) for words in lines if words and words[0] in wanted]
    # Fields: user nice system idle iowait irq softirq steal; guest times after these are part of the first two.
    ticks = sum(sum(times[:8]) - sum(times[3:5]) for times in counters)
    return ticks / os.sysconf("SC_CLK_TCK") if counters else None


def parse_cpu_list(ranges: str) -> tuple[int, ...]:
    """Parse the kernel's list format: 0-3,8 is 0, 1, 2, 3, 8."""
    numbers: list[int] = []
    for part in ranges.split(","):
        low, _, high = part.strip().partition("-")
        if low.isdecimal():
            numbers += range(int(low), int(high or low) + 1)
    return tuple(numbers)


def _fields(entry: str) -> list[tuple[str, str]]:
    pairs = (line.partition(":") for line in entry.splitlines() if ":" in line)
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def _read_file(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
