"""The catalogue of GPUs: data sheet figures of each type, found by the names that people and drivers use."""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from weft.errors import ConfigError
from weft.machine.hardware.calibration import Calibration
from weft.machine.hardware.cpu import KernelSpeed
from weft.machine.hardware.topology import Clocks, Gpu, MigSlice, multiprocessors

# Words of a name that tell nothing: makers, product lines, and additions that only one card of the name has.
NOISE = {"nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "radeon", "generation", "edition", "gpu", "hbm3"}
NOISE |= {"hbm3e", "hbm2e", "hbm2", "oam", "1x", "tensor", "core"}
PER_NODE = 16  # the most GPUs in one machine: chassis with two boards of eight, or with PCIe cards
PCIE_BPS = 32e9  # default: version 4, 16 lanes
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
# A size of memory in a name. Other makers' consumer cards, none of which Weft has kernels for.
_SIZE = r"[1-9]\d{0,3}(?:\.\d+)?\s*gi?b(?:\s*vram)?"
_OTHER_MAKERS = {
    "a consumer card of AMD": r"(amd\s*)?(radeon\s*)?(rx\s*\d{3,4}\s*\w*|vega\s*\w*|vii|"
    r"(ai\s*)?(pro\s*)?[wr][5-9]\d00\w*|(5[5-7]|6[4-9]|7[6-9]|90)\d0\s*(xtx?|gre|m|s)?)(\s*\d+\s*gb)?",
    "a GPU of Apple": r"(apple\s*)?m[1-9]([\s-]*(pro|max|ultra))?(\s*\d+\s*gb)?",
    "a GPU of Intel": r"(intel\s*)?((arc\s*)(pro\s*)?\w*|[ab]([357]\d0|60)m?)(\s*\d+\s*gb)?",
}
# The oldest GPUs that compute in bfloat16, and the oldest that have e4m3 numbers.
BF16_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One type of GPU, or one GPU of this machine.

    `memory_bytes` is what the driver reports. `flops` are dense operations per second by precision (bf16 fp16 fp8 int8
    fp4, as far as the GPU has them). `nvlink_Bps` and `pcie_Bps` are bytes per second in one direction; `nvlink_Bps` is
    0 without NVLink. `bridge`: its NVLink joins two cards only. At most `per_node` of them go into one machine. `gfx`
    is AMD's name of the architecture; `capability` is then its version.

    For a GPU of this machine, `held_bytes` are taken by other processes. `peer`: cards without NVLink read each other's
    memory; None if only the name can tell. `kind` "cpu" is a machine's CPU, or a rank's share of it: `memory_bytes` is
    then the free memory, and there is no capability. `limit_bytes` is the most that the user allows to be taken (0: the
    device is not to be used). `calibration` holds the engine's measured speeds on it, `kernels` the speeds of Weft's
    kernels alone on a CPU.
    """

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
        """True for a MIG slice; the driver puts MIG into its name."""
        return "MIG" in self.name.split()

    def scaled(self, memory: float = 1.0, compute: float = 1.0) -> GpuSpec:
        """This GPU with `memory` times the bandwidth and `compute` times the FLOPS, in the data sheet's and in the
        measured figures."""
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
        """Bytes that an engine gets with this share of the memory: less what others hold, and within `limit_bytes`."""
        free = int(self.memory_bytes * share) - self.held_bytes
        return free if self.limit_bytes is None else min(free, self.limit_bytes)


class _GpuRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of data/gpus.toml: MiB, GB/s (10^9), and 10^12 operations per second."""

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
def _rows() -> tuple[_GpuRow, ...]:
    text = (files("weft.machine.hardware") / "data/gpus.toml").read_text()
    return msgspec.convert(tomllib.loads(text)["gpu"], tuple[_GpuRow, ...])


@cache
def known_gpus() -> tuple[GpuSpec, ...]:
    """All GPUs of the catalogue."""
    return tuple(row.spec() for row in _rows())


@cache
def _specs_by_key() -> dict[str, GpuSpec]:
    specs: dict[str, GpuSpec] = {}
    for row, spec in zip(_rows(), known_gpus(), strict=True):
        for name in (row.name, *row.aliases):
            for key in _keys(name):
                specs.setdefault(key, spec)
    return specs


def _keys(name: str) -> tuple[str, str]:
    """Two keys to compare names by, without case, spacing and NOISE; the second one ignores the order of words."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in NOISE]
    joined = re.sub(r"(?<=\d)\s+(?=gb\b)", "", " ".join(words)).split()
    return "".join(joined), " ".join(sorted(joined))


def find_gpu(name: str) -> GpuSpec:
    """Find a GPU by the name that people or drivers use. Raises ConfigError with the nearest names."""
    specs = _specs_by_key()
    for key in _keys(name):
        if key in specs:
            return specs[key]
    card, size = _card_and_size(name)
    if card is not None and _has_size(card, size):
        return card
    raise _unknown_gpu(name)


def _unknown_gpu(name: str) -> ConfigError:
    """The error for a name that no card of the catalogue has, with what was probably meant."""
    if re.fullmatch(_SIZE, name.strip(), re.IGNORECASE):
        with_size = [spec.name for spec in known_gpus() if not spec.gfx and _has_size(spec, name)]
        hint = f"cards with it: {', '.join(with_size)}" if with_size else "no card of the catalogue has it"
        return ConfigError(
            f"GPUs {name!r} is a size of memory, and the speed depends on the card; {hint}; describe another card in "
            'a YAML file (docs/hardware.md), or ask if a model fits: weft plan --check "Qwen3-8B int4 on 24GB"',
            code="memory-without-gpu",
        )
    maker = next((maker for maker, names in _OTHER_MAKERS.items() if re.fullmatch(names, name.strip(), re.I)), None)
    if maker is not None:
        return ConfigError(
            f"unknown GPU {name!r}; {maker}: Weft computes on NVIDIA's GPUs and on CPUs; to plan for this card all "
            "the same, describe it in a YAML file (docs/hardware.md)",
            code="gpu-of-other-maker",
        )
    near = get_close_matches(_keys(name)[0], _specs_by_key(), n=3, cutoff=0.7)
    alike, (other, size) = nearest_gpu(name), _card_and_size(name)
    if other is not None:
        of_size = f"; nearest with {size}: {alike.name}" if alike else ""
        return ConfigError(
            f"unknown GPU {name!r}: the {other.name} has {other.memory_bytes / 2**30:.0f} GB, and there is none with "
            f"{size}{of_size}",
            code="gpu-of-other-size",
        )
    names = dict.fromkeys([*([alike.name] if alike else []), *(_specs_by_key()[key].name for key in near)])
    hint = f"nearest: {', '.join(names)}" if names else "give a name as in RTX 4090, L40S, A100, H100 PCIe or MI300X"
    return ConfigError(
        f"unknown GPU {name!r}; {hint}; describe another card in a YAML file (docs/hardware.md)", code="unknown-gpu"
    )


def _card_and_size(name: str) -> tuple[GpuSpec | None, str]:
    """The card of a name that ends in a size, as in "5090 32GB", and the size, whatever the card's memory is."""
    match = re.fullmatch(rf"(.+?)[\s-]+({_SIZE})", name.strip(), re.IGNORECASE)
    return (_specs_by_key().get(_keys(match[1])[1]), match[2]) if match else (None, "")


def nearest_gpu(name: str) -> GpuSpec | None:
    """The card that has the memory in a name, as in "RTX 6000 Pro 48GB", and most of its words; None without any."""
    sizes = re.findall(_SIZE, name, re.IGNORECASE)
    if len(sizes) != 1:
        return None
    words = set(_keys(name)[1].split())
    shared = {spec: len(words & set(_keys(spec.name)[1].split())) for spec in known_gpus() if _has_size(spec, sizes[0])}
    best = max(shared, key=lambda spec: shared[spec], default=None)
    return best if best is not None and shared[best] else None


def generic_gpu(text: str) -> GpuSpec | None:
    """A card of which only the memory is known, as in "16GB"; None for another text.

    Cards are sold in units of 2^30 bytes. Its bandwidth is 0: nothing can be said about its speed.
    """
    if not re.fullmatch(_SIZE, text.strip(), re.IGNORECASE):
        return None
    gib = _gib(text)
    return GpuSpec(
        name=f"{gib:g} GB card",
        memory_bytes=int(gib * 2**30),
        bandwidth_Bps=0.0,
        flops={},
        nvlink_Bps=0.0,
        pcie_Bps=PCIE_BPS,
        capability=BF16_CAPABILITY,
        source="a size of memory only",
    )


def _has_size(spec: GpuSpec, size: str) -> bool:
    """Return True for a card that is sold with this memory; the driver reports up to a tenth less."""
    return 0.9 <= spec.memory_bytes / 2**30 / _gib(size) <= 1.02


def _gib(size: str) -> float:
    return float(re.sub(r"[^\d.]", "", size))


def is_gpu_name(name: str) -> bool:
    """Return True if `find_gpu` knows the name."""
    return any(key in _specs_by_key() for key in _keys(name))


def gpu_spec(gpu: Gpu) -> GpuSpec:
    """Data sheet of a GPU of this machine, with the memory that its driver reports.

    A GPU that is not in the catalogue is described from its clocks, a MIG slice from its board. Raises ConfigError if
    these are unknown too.
    """
    try:
        if gpu.slice:
            return _slice_of_board(gpu, gpu.slice)
        return msgspec.structs.replace(find_gpu(gpu.name), memory_bytes=gpu.total_bytes)
    except ConfigError:
        if gpu.clocks is None:
            raise
        return _from_clocks(gpu, gpu.clocks)


def _slice_of_board(gpu: Gpu, part: MigSlice) -> GpuSpec:
    """Describe a MIG slice: its share of the multiprocessors, and whole eighths of memory and bandwidth."""
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
    """Describe a GPU from its bus width at its clock (two transfers a cycle) and its generation's tensor cores."""
    per_cycle = TENSOR_FLOPS.get(gpu.capability) or TENSOR_FLOPS.get((gpu.capability[0], 0), 1024)
    if "geforce" in gpu.name.lower() and gpu.capability in HALF_RATE:
        per_cycle //= 2
    flops = per_cycle * multiprocessors(clocks, gpu.capability) * clocks.cores_hz
    flops_of = {"fp16": flops}
    for precision, since, factor in (("bf16", (8, 0), 1), ("fp8", (8, 9), 2), ("fp4", (10, 0), 4)):
        if gpu.capability >= since:
            flops_of[precision] = factor * flops
    return GpuSpec(
        name=gpu.name,
        memory_bytes=gpu.total_bytes,
        bandwidth_Bps=2 * clocks.memory_hz * clocks.bus_bits / 8,
        flops=flops_of,
        nvlink_Bps=0,
        pcie_Bps=PCIE_BPS,
        capability=gpu.capability,
        source="bus width and clocks, as the driver says",
    )
