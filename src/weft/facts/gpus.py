"""GPUs: what the data sheet of each says, and what people and drivers call it."""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

import msgspec

from weft.errors import ConfigError
from weft.facts.host import Clocks, Gpu

# Words that say who made a card, or that only one card of the name has.
NOISE = {"nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "radeon", "generation", "edition", "gpu", "hbm3"}
NOISE |= {"hbm3e", "hbm2e", "hbm2", "oam", "1x", "tensor", "core"}
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
HALVED = ((8, 6), (8, 9), (12, 0))
# CUDA cores of one multiprocessor where they are not 128. Source: CUDA programming guide, compute capabilities.
CORES = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One type of GPU. `memory_bytes` is what the driver reports; `flops` are dense operations per second by
    precision (bf16 fp16 fp8 int8 fp4, what it has); `nvlink_Bps` and `pcie_Bps` are bytes per second in one
    direction, NVLink 0 where there is none. `bridge`: its NVLink joins two cards only. `gfx` is AMD's name of the
    architecture, whose `capability` is its version."""

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

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.bandwidth_Bps))


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
        )


@cache
def _rows() -> tuple[_Row, ...]:
    text = (files("weft.facts") / "data/gpus.toml").read_text()
    return msgspec.convert(tomllib.loads(text)["gpu"], tuple[_Row, ...])


@cache
def gpus() -> tuple[GpuSpec, ...]:
    """Every GPU of the catalogue."""
    return tuple(row.spec() for row in _rows())


@cache
def _names() -> dict[str, GpuSpec]:
    found: dict[str, GpuSpec] = {}
    for row, spec in zip(_rows(), gpus(), strict=True):
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
    near = get_close_matches(_keys(name)[0], names, n=3, cutoff=0.4)
    nearest = ", ".join(dict.fromkeys(names[key].name for key in near))
    known = f"nearest: {nearest}" if near else "give a name as in RTX 4090, L40S, A100, H100 PCIe or MI300X"
    raise ConfigError(f"unknown GPU {name!r}; {known}")


def spec_of(gpu: Gpu) -> GpuSpec:
    """The data sheet of a GPU that is here, with the memory that its driver reports; one that the catalogue does not
    know is made from its clocks. Raises ConfigError where those are unknown too."""
    try:
        return msgspec.structs.replace(find_gpu(gpu.name), memory_bytes=gpu.total_bytes)
    except ConfigError:
        if gpu.clocks is None:
            raise
        return _from_clocks(gpu, gpu.clocks)


def _from_clocks(gpu: Gpu, clocks: Clocks) -> GpuSpec:
    """The bandwidth of the bus at its clock, twice a cycle, and the FLOPS of the generation's tensor cores."""
    multiprocessors = clocks.cores / CORES.get(gpu.capability, 128)
    per_cycle = TENSOR_FLOPS.get(gpu.capability) or TENSOR_FLOPS.get((gpu.capability[0], 0), 1024)
    if "geforce" in gpu.name.lower() and gpu.capability in HALVED:
        per_cycle //= 2
    flops = per_cycle * multiprocessors * clocks.cores_hz
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
