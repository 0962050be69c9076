"""Topology: the GPUs of this machine and their pairwise connections, as the driver reports them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

# Closest common ancestor of two GPUs, the nearest first, in the driver's words: one PCIe bridge, several, the host
# bridge of a CPU, the same NUMA node, or only the link between sockets.
Ancestor = Literal["PIX", "PXB", "PHB", "NODE", "SYS"]
# Bytes per second of one PCIe lane in one direction by generation, after coding. Source: PCI-SIG's rates in GT/s.
LANE_BPS = {1: 0.25e9, 2: 0.5e9, 3: 1e9, 4: 2e9, 5: 4e9, 6: 8e9, 7: 16e9}
# CUDA cores of one multiprocessor, if not 128. Source: CUDA programming guide, compute capabilities.
CORES = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}
# Memory that a driver counts as used on an idle card: its own tables, ECC, the display.
DRIVER_BYTES = 1 << 30


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """Width of a GPU's memory bus, its number of CUDA cores, and its highest clocks, as the driver reports them.

    The current clocks (`*_now_hz`) fall when a card is idle; None if the driver does not report them.
    """

    bus_bits: int
    memory_hz: float
    cores: int
    cores_hz: float
    memory_now_hz: float | None = None
    cores_now_hz: float | None = None


def multiprocessors(clocks: Clocks, capability: tuple[int, int]) -> float:
    """Number of multiprocessors of a GPU."""
    return clocks.cores / CORES.get(capability, 128)


class Pcie(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's PCIe link to the host. An idle card lowers its generation; `most_*` is the limit of card and slot."""

    generation: int
    lanes: int
    most_generation: int
    most_lanes: int

    @property
    def Bps(self) -> float:
        """Bytes per second in one direction under load: the current lanes at the highest generation."""
        return self.lanes * LANE_BPS.get(self.most_generation, LANE_BPS[max(LANE_BPS)])


class NvLinks(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's active NVLinks; `each_Bps` is bytes per second of one link in one direction. `switched`: the links lead
    to a switch, and through it to every GPU on that switch."""

    count: int
    version: str
    each_Bps: float
    switched: bool

    @property
    def Bps(self) -> float:
        """Bytes per second of all links in one direction."""
        return self.count * self.each_Bps


class Holder(msgspec.Struct, frozen=True):
    """A process that holds a GPU's memory. In a container the driver may hide its name ("") and its bytes (None)."""

    pid: int
    name: str
    nbytes: int | None

    def __str__(self) -> str:
        held = "" if self.nbytes is None else f" {self.nbytes / 1e9:.1f} GB"
        return f"{self.name.rpartition('/')[2] or 'a process'} (pid {self.pid}){held}"


class MigSlice(msgspec.Struct, frozen=True):
    """The board that a MIG slice is a part of, and the slice's share of the board's multiprocessors (None if the driver
    does not report it)."""

    board: str
    compute: float | None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One visible GPU, or the one MIG slice that CUDA shows to a process.

    `index` is N of "cuda:N" in this process: the position in CUDA_VISIBLE_DEVICES, or else in the order of the PCI bus,
    which workers ask CUDA for too, or in the user's own CUDA_DEVICE_ORDER (`machine/hardware/cuda.py`). `capability`
    is (major,
    minor). `bus` is the PCI address as /sys writes it. `clocks` is None for a slice. `clocks` and the fields after it
    are None or empty if the driver does not report them.
    """

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
        """Bytes of its memory that other processes hold."""
        return max(0, self.total_bytes - self.free_bytes - DRIVER_BYTES)


class GpuPair(msgspec.Struct, frozen=True, kw_only=True):
    """Connection of two GPUs, by their index, the lower first.

    `ancestor` is the closest common one on the bus, `nvlinks` the number of NVLinks between them. `peer`: the driver
    lets each read and write the other's memory; `reason` says why not. None if the driver does not report it.
    """

    first: int
    second: int
    ancestor: Ancestor | None = None
    nvlinks: int = 0
    peer: bool | None = None
    reason: str = ""


def interconnect_domains(count: int, joined: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Interconnect domains: groups in which each of `count` GPUs is joined to every other, the largest first.

    `joined` are the pairs with a direct link. Each GPU is in exactly one group.
    """
    neighbours = {number: {number} for number in range(count)}
    for first, second in joined:
        neighbours[first].add(second)
        neighbours[second].add(first)
    groups: list[tuple[int, ...]] = []
    remaining = set(range(count))
    while remaining:
        groups.append(max((_grow_group(number, neighbours, remaining) for number in sorted(remaining)), key=len))
        remaining -= set(groups[-1])
    return tuple(groups)


def _grow_group(number: int, neighbours: dict[int, set[int]], remaining: set[int]) -> tuple[int, ...]:
    """Grow a group around a GPU greedily: add each remaining GPU that is joined to all members, in order."""
    group = [number]
    for other in sorted(remaining - {number}):
        if all(other in neighbours[member] for member in group):
            group.append(other)
    return tuple(sorted(group))


def link_name(pair: GpuPair) -> str:
    """The link in the notation of nvidia-smi topo, "" if unknown."""
    return f"NV{pair.nvlinks}" if pair.nvlinks else pair.ancestor or ""
