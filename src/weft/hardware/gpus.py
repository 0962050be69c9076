"""GPUs: what the data sheet of each says, and what people and drivers call it."""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from weft.errors import ConfigError
from weft.hardware.calibration import Calibration
from weft.hardware.cpu import KernelSpeed
from weft.hardware.topology import Clocks, Gpu, MigSlice, multiprocessors

# Words that say who made a card, or that only one card of the name has.
NOISE = {"nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "radeon", "generation", "edition", "gpu", "hbm3"}
NOISE |= {"hbm3e", "hbm2e", "hbm2", "oam", "1x", "tensor", "core"}
PER_NODE = 16  # GPUs that machines are built with, at most: chassis of two boards of eight, or of PCIe cards
PCIE_BPS = 32e9  # of a card that nobody says it of: version 4, 16 lanes
# Dense 16-bit operations of one multiprocessor in a cycle, summed in 32 bits, by compute capability: data sheet FLOPS
# over multiprocessors and boost clock. GeForce cards of some generations sum at half the rate.
TENSOR_FLOPS = {
    (6, 0): 256,
    (7, 0): 1024,
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (12, 0): 1024,
}
HALF_RATE = ((8, 6), (8, 9), (12, 0))
# The oldest GPUs that compute in bfloat16, and those that have e4m3 numbers.
BF16_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One type of GPU. `memory_bytes` is what the driver reports; `flops` are dense operations per second by
    precision (bf16 fp16 fp8 int8 fp4, what it has); `nvlink_Bps` and `pcie_Bps` are bytes per second in one
    direction, NVLink 0 where there is none. `bridge`: its NVLink joins two cards only. `per_node` of them go into one
    machine at most. `gfx` is AMD's name of the architecture, whose `capability` is its version.

    Of a GPU that is here, `held_bytes` are other processes', and `peer` says whether cards without NVLink between
    them read each other's memory: None where only the name can tell. With `kind` "cpu" it is a machine's CPU, or a
    rank's share of one: `memory_bytes` are those that are free, and there is no capability. `limit_bytes` is the most
    that may be taken of it where the user says so, 0 for one that is not to be used. `calibration` is what our engine
    reaches on it, where that was measured, and `kernels` what its kernels alone do on a CPU."""

    name: str
    memory_bytes: int
    bandwidth_Bps: float
    flops: dict[str, float]
    nvlink_Bps: float
    pcie_Bps: float
    capability: tuple[int, int]
    source: str
    bridge: bool = False
    gfx: str = ""
    per_node: int = PER_NODE
    kind: Literal["gpu", "cpu"] = "gpu"
    held_bytes: int = 0
    peer: bool | None = None
    limit_bytes: int | None = None
    calibration: Calibration | None = None
    kernels: KernelSpeed | None = None

    @property
    def is_mig_slice(self) -> bool:
        """Whether it is a MIG slice, which its driver names after its board."""
        return "MIG" in self.name.split()

    def scaled(self, memory: float = 1.0, compute: float = 1.0) -> GpuSpec:
        """One whose memory is so many times as fast, and that computes so many times as fast, as far as that is known
        of this one: from its data sheet, and from what was measured of it."""
        return msgspec.structs.replace(
            self,
            bandwidth_Bps=self.bandwidth_Bps * memory,
            flops={precision: flops * compute for precision, flops in self.flops.items()},
            calibration=self.calibration and self.calibration.scaled(memory, compute),
            kernels=self.kernels and self.kernels.scaled(self.bandwidth_Bps, memory, compute),
        )

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.bandwidth_Bps))

    def usable_bytes(self, share: float) -> int:
        """Bytes that an engine gets with this share of the memory: less what others hold, and within the limit."""
        free = int(self.memory_bytes * share) - self.held_bytes
        return free if self.limit_bytes is None else min(free, self.limit_bytes)


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of data/gpus.toml, in its units."""

    name: str
    memory_mib: int
    bandwidth: float
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    int8: float | None = None
    fp4: float | None = None
    nvlink: float = 0
    bridge: bool = False
    pcie: float
    capability: tuple[int, int]
    gfx: str = ""
    per_node: int = PER_NODE
    source: str
    aliases: tuple[str, ...] = ()

    def spec(self) -> GpuSpec:
        given = {"bf16": self.bf16, "fp16": self.fp16 or self.bf16, "fp8": self.fp8, "int8": self.int8, "fp4": self.fp4}
        return GpuSpec(
            name=self.name,
            memory_bytes=self.memory_mib << 20,
            bandwidth_Bps=self.bandwidth * 1e9,
            flops={precision: tera * 1e12 for precision, tera in given.items() if tera is not None},
            nvlink_Bps=self.nvlink * 1e9,
            pcie_Bps=self.pcie * 1e9,
            capability=self.capability,
            source=self.source,
            bridge=self.bridge,
            gfx=self.gfx,
            per_node=self.per_node,
        )


@cache
def _rows() -> tuple[_Row, ...]:
    text = (files("weft.hardware") / "data/gpus.toml").read_text()
    return msgspec.convert(tomllib.loads(text)["gpu"], tuple[_Row, ...])


@cache
def known_gpus() -> tuple[GpuSpec, ...]:
    """Every GPU of the catalogue."""
    return tuple(row.spec() for row in _rows())


@cache
def _names() -> dict[str, GpuSpec]:
    found: dict[str, GpuSpec] = {}
    for row, spec in zip(_rows(), known_gpus(), strict=True):
        for name in (row.name, *row.aliases):
            for key in _keys(name):
                found.setdefault(key, spec)
    return found


def _keys(name: str) -> tuple[str, str]:
    """What a name is compared by: without case, spacing and noise; the second one whatever the words' order."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in NOISE]
    joined = re.sub(r"(?<=\d)\s+(?=gb\b)", "", " ".join(words)).split()
    return "".join(joined), " ".join(sorted(joined))


def find_gpu(name: str) -> GpuSpec:
    """The GPU that people or drivers call so. Raises ConfigError with the nearest names."""
    names = _names()
    for key in _keys(name):
        if key in names:
            return names[key]
    near = get_close_matches(_keys(name)[0], names, n=3, cutoff=0.7)
    nearest = ", ".join(dict.fromkeys(names[key].name for key in near))
    known = f"nearest: {nearest}" if near else "give a name as in RTX 4090, L40S, A100, H100 PCIe or MI300X"
    raise ConfigError(f"unknown GPU {name!r}; {known}; describe another card in a YAML file (docs/hardware.md)")


def is_gpu_name(name: str) -> bool:
    """True for a name in the catalogue of GPUs, as find_gpu takes them."""
    return any(key in _names() for key in _keys(name))


def gpu_spec(gpu: Gpu) -> GpuSpec:
    """The data sheet of a GPU that is here, with the memory that its driver reports; one that the catalogue does not
    know is made from its clocks, and a MIG slice from its board. Raises ConfigError where those are unknown too."""
    try:
        if gpu.slice:
            return _of_board(gpu, gpu.slice)
        return msgspec.structs.replace(find_gpu(gpu.name), memory_bytes=gpu.total_bytes)
    except ConfigError:
        if gpu.clocks is None:
            raise
        return _from_clocks(gpu, gpu.clocks)


def _of_board(gpu: Gpu, part: MigSlice) -> GpuSpec:
    """A slice has its own share of the multiprocessors, and whole eighths of the memory and of its bandwidth."""
    board = find_gpu(part.board)
    eighths = max(1, round(8 * gpu.total_bytes / board.memory_bytes))
    compute = eighths / 8 if part.compute is None else part.compute
    return msgspec.structs.replace(
        board,
        name=gpu.name.removeprefix("NVIDIA "),
        memory_bytes=gpu.total_bytes,
        bandwidth_Bps=board.bandwidth_Bps * eighths / 8,
        flops={precision: compute * flops for precision, flops in board.flops.items()},
        nvlink_Bps=0.0,
        source=f"{board.source}; {eighths}/8 of the memory, {100 * compute:.0f} % of the multiprocessors",
    )


def _from_clocks(gpu: Gpu, clocks: Clocks) -> GpuSpec:
    """The bandwidth of the bus at its clock, twice a cycle, and the FLOPS of the generation's tensor cores."""
    per_cycle = TENSOR_FLOPS.get(gpu.capability) or TENSOR_FLOPS.get((gpu.capability[0], 0), 1024)
    if "geforce" in gpu.name.lower() and gpu.capability in HALF_RATE:
        per_cycle //= 2
    flops = per_cycle * multiprocessors(clocks, gpu.capability) * clocks.cores_hz
    figures = {"fp16": flops}
    for precision, since, times in (("bf16", (8, 0), 1), ("fp8", (8, 9), 2), ("fp4", (10, 0), 4)):
        if gpu.capability >= since:
            figures[precision] = times * flops
    return GpuSpec(
        name=gpu.name,
        memory_bytes=gpu.total_bytes,
        bandwidth_Bps=2 * clocks.memory_hz * clocks.bus_bits / 8,
        flops=figures,
        nvlink_Bps=0,
        pcie_Bps=PCIE_BPS,
        capability=gpu.capability,
        source="bus width and clocks, as the driver says",
    )
