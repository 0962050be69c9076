"""Topology: the GPUs of this machine as their driver tells of them, each by itself and every two together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

# The closest thing that two GPUs have in common, the nearest first, in the driver's words: one PCIe bridge, several,
# the host bridge of a CPU, the same NUMA node, or only the link between sockets.
Ancestor = Literal["PIX", "PXB", "PHB", "NODE", "SYS"]
# Bytes per second of one lane in one direction by generation, after its coding. Source: PCI-SIG's rates in GT/s.
LANE_BPS = {1: 0.25e9, 2: 0.5e9, 3: 1e9, 4: 2e9, 5: 4e9, 6: 8e9, 7: 16e9}
# CUDA cores of one multiprocessor where they are not 128. Source: CUDA programming guide, compute capabilities.
CORES = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}
# What a driver counts as used on a card that nobody uses: its own tables, ECC, the display.
DRIVER_BYTES = 1 << 30


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver says of a GPU's speed: the width of its memory bus, its CUDA cores, and its highest clocks.
    Those of this moment fall when a card is idle; None where the driver does not tell."""

    bus_bits: int
    memory_hz: float
    cores: int
    cores_hz: float
    memory_now_hz: float | None = None
    cores_now_hz: float | None = None


def multiprocessors(clocks: Clocks, capability: tuple[int, int]) -> float:
    """How many a GPU has."""
    return clocks.cores / CORES.get(capability, 128)


class Pcie(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's way to the host. An idle card lowers its generation; what card and slot can do together is `most_*`."""

    generation: int
    lanes: int
    most_generation: int
    most_lanes: int

    @property
    def Bps(self) -> float:
        """Bytes per second in one direction, under load: the lanes that there are, at the highest generation."""
        return self.lanes * LANE_BPS.get(self.most_generation, LANE_BPS[max(LANE_BPS)])


class NvLinks(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's active NVLinks; `each_Bps` is one link's, in bytes per second and one direction. `switched`: they lead to
    a switch, and over it to any GPU that hangs on it too."""

    count: int
    version: str
    each_Bps: float
    switched: bool

    @property
    def Bps(self) -> float:
        """Of all of them."""
        return self.count * self.each_Bps


class Holder(msgspec.Struct, frozen=True):
    """A process that holds a GPU's memory. In a container the driver may tell neither name ("") nor bytes (None)."""

    pid: int
    name: str
    nbytes: int | None

    def __str__(self) -> str:
        held = "" if self.nbytes is None else f" {self.nbytes / 1e9:.1f} GB"
        return f"{self.name.rpartition('/')[2] or 'a process'} (pid {self.pid}){held}"


class MigSlice(msgspec.Struct, frozen=True):
    """What a MIG slice is a part of: the board's name, and the share of its multiprocessors, None where the driver
    does not tell."""

    board: str
    compute: float | None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One visible GPU (or the one MIG slice that CUDA shows a process). `index` is N of "cuda:N" in this process: its
    place in CUDA_VISIBLE_DEVICES, or else in the order of the PCI bus, which workers ask CUDA for too, or in the one
    that the user asks it for (CUDA_DEVICE_ORDER; `hardware/cuda.py`). `capability` is (major, minor). `bus` is its PCI
    address as /sys writes it. `clocks` is None for a slice; this and what follows also where the driver does not
    tell."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    bus: str = ""
    clocks: Clocks | None = None
    pcie: Pcie | None = None
    nvlinks: NvLinks | None = None
    numa_node: int | None = None
    holders: tuple[Holder, ...] = ()
    slice: MigSlice | None = None

    @property
    def held_bytes(self) -> int:
        """What others hold of its memory."""
        return max(0, self.total_bytes - self.free_bytes - DRIVER_BYTES)


class GpuPair(msgspec.Struct, frozen=True, kw_only=True):
    """How two GPUs (by their index, the lower first) reach each other: their closest common ancestor on the bus, the
    NVLinks between them, and whether the driver lets one read and write the other's memory; `reason` is why not.
    None where the driver does not tell."""

    first: int
    second: int
    ancestor: Ancestor | None = None
    nvlinks: int = 0
    peer: bool | None = None
    reason: str = ""


def interconnect_domains(count: int, joined: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """The groups in which each of `count` GPUs is joined to every other, the largest first; a GPU is in one of them."""
    with_ = {number: {number} for number in range(count)}
    for first, second in joined:
        with_[first].add(second)
        with_[second].add(first)
    groups: list[tuple[int, ...]] = []
    left = set(range(count))
    while left:
        groups.append(max((_grown(number, with_, left) for number in sorted(left)), key=len))
        left -= set(groups[-1])
    return tuple(groups)


def _grown(number: int, joined: dict[int, set[int]], left: set[int]) -> tuple[int, ...]:
    """A group around a GPU, each that fits taken in its order."""
    group = [number]
    for other in sorted(left - {number}):
        if all(other in joined[member] for member in group):
            group.append(other)
    return tuple(sorted(group))
