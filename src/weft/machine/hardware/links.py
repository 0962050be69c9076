"""Time of an all-reduce and of a transfer between stages, over NVLink, PCIe, shared memory or the network."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from math import log2
from typing import Literal

import msgspec

from weft.machine.hardware.gpus import GpuSpec

LinkKind = Literal["nvlink", "pcie", "memory", "network"]
RANKS = (2, 4, 8)  # numbers of ranks that the tables have figures for
# Bytes that a network carries within its one-way latency: 10 Gb/s and 50 us, or 1 Gb/s and 0.5 ms.
IN_FLIGHT_BYTES = 64 << 10
# Largest sum that CPU ranks on several nodes exchange in shots; gloo's ring is as fast there and better for larger ones
# (docs/benchmarks.md, sums over a slow link).
SHOT_BYTES = 512 << 10


class NvLinkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Measured all-reduce among GPUs of one capability whose NVLink carries `nvlink_GBps` in one direction."""

    capability: tuple[int, int]
    nvlink_GBps: float
    latency_us: tuple[float, float, float]
    kib64_us: tuple[float, float, float]
    mib_us: tuple[float, float, float]
    busbw_GBps: tuple[float, float, float]
    nccl_us: float
    source: str


class PcieFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduce over PCIe, as a share of the link's bandwidth. Cards whose name matches `without_peer` go through the
    host's memory."""

    latency_us: tuple[float, float, float]
    busbw_of_pcie: float
    without_peer: str
    nccl_us: float
    source: str


class MemoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduce among the ranks of one CPU through shared memory, as a share of a rank's memory bandwidth."""

    latency_us: tuple[float, float, float]
    share: float
    source: str


class NetworkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers between two nodes: for GPUs as a share of the network's bandwidth, for CPUs at the measured one.

    `latency_us` is the time of a small message from one node to another, one way, over RDMA, and `ethernet_us` over
    TCP. `inside_us` is its time between the GPUs of a node, as a step of an all-reduce over several nodes. `gloo_us` is
    the time of an exchange through gloo without the time of its messages.
    """

    latency_us: float
    ethernet_us: float
    inside_us: float
    gloo_us: float
    share: float
    source: str


class LinkTable(msgspec.Struct, frozen=True):
    """The whole of data/links.toml."""

    nvlink: tuple[NvLinkFigures, ...]
    pcie: PcieFigures
    memory: MemoryFigures
    network: NetworkFigures


class LinkCost(msgspec.Struct, frozen=True):
    """Time of an all-reduce or a transfer: b bytes take `latency_s` + b * `s_per_byte`.

    `measured` are (bytes, seconds) in ascending order. Up to the largest of them the time is interpolated linearly;
    beyond it, it grows with `s_per_byte`.
    """

    latency_s: float
    s_per_byte: float
    measured: tuple[tuple[float, float], ...] = ()

    def seconds(self, size: float) -> float:
        """Seconds for `size` bytes."""
        below, seconds_below = 0.0, self.latency_s
        for measured_size, seconds in self.measured:
            if size < measured_size:
                return seconds_below + (seconds - seconds_below) * (size - below) / (measured_size - below)
            below, seconds_below = measured_size, seconds
        return seconds_below + (size - below) * self.s_per_byte


@cache
def link_table() -> LinkTable:
    """The table of data/links.toml."""
    return msgspec.convert(tomllib.loads((files("weft.machine.hardware") / "data/links.toml").read_text()), LinkTable)


def nearest_nvlink(gpu: GpuSpec) -> NvLinkFigures:
    """Figures of the GPU generation that is nearest to this GPU's."""
    return min(link_table().nvlink, key=lambda link: abs(link.capability[0] - gpu.capability[0]))


@cache
def all_reduce_cost(
    gpu: GpuSpec,
    kind: LinkKind,
    ranks: int,
    network_Bps: float,
    graphs: bool,
    network_s: float | None = None,
    nodes: int | None = None,
) -> LinkCost:
    """Time of an all-reduce among `ranks` GPUs like `gpu`, on `nodes` nodes: if left out, a node each.

    `kind` is the slowest link between any two of them; `network_Bps` is bytes per second from one node to another.
    `network_s` is the measured time of a small message, one way, None for the table's time. With `graphs` the
    all-reduce is a kernel in a CUDA graph, without it a call of NCCL.
    """
    if ranks == 1:
        return LinkCost(0.0, 0.0)
    passes = 2 * (ranks - 1) / ranks
    if kind == "network":
        latency, nodes = _network_latency(network_s), nodes or ranks
        if gpu.kind == "cpu":
            return _gloo_cost(ranks, nodes, latency, 1 / network_Bps)
        return LinkCost(_tree_latency(ranks, nodes, latency), passes / (network_Bps * link_table().network.share))
    if kind == "nvlink":
        return _nvlink_cost(gpu, ranks, passes, graphs)
    if kind == "memory":
        memory = link_table().memory
        return LinkCost(_at(memory.latency_us, ranks) * 1e-6, passes / (gpu.bandwidth_Bps * memory.share))
    pcie = link_table().pcie
    crossings = 1 if has_peer(gpu) else 2
    latency = (_at(pcie.latency_us, ranks) + (0.0 if graphs else pcie.nccl_us)) * 1e-6
    return LinkCost(latency, passes * crossings / (gpu.pcie_Bps * pcie.busbw_of_pcie))


def _tree_latency(ranks: int, nodes: int, latency_s: float) -> float:
    """Seconds of NCCL's tree for a small all-reduce: up and down again, through the GPUs of a node and then the nodes.

    Source: NCCL's own model, src/graph/tuning.cc. Its ring takes 2 (nodes - 1) messages between nodes, which is never
    less.
    """
    return 2 * (log2(nodes) * latency_s + (ranks / nodes - 1) * link_table().network.inside_us * 1e-6)


def sums_in_one_shot(size: float, ranks: int) -> bool:
    """Return True if ranks that gloo joins send all of their parts, of `size` bytes, to all others (comm.gloo).

    One shot saves the second latency of two shots, and sends n / 2 times their bytes. It pays as long as the
    additional bytes, (n - 1) (1 - 2 / n) times the size, take less time than a latency; for two ranks there are none.
    """
    return (ranks - 1) * (ranks - 2) * size <= ranks * IN_FLIGHT_BYTES


def _gloo_cost(ranks: int, nodes: int, latency_s: float, byte_s: float) -> LinkCost:
    """Time of a sum of `ranks.comm.gloo`; all ranks of a node send through the same link.

    Beyond SHOT_BYTES, where gloo's ring was measured to be as fast, the bytes of the ring are added.
    """
    shot_s = latency_s + link_table().network.gloo_us * 1e-6
    own = ranks / nodes
    crossing = own * (ranks - own)  # parts that leave a node
    one = LinkCost(shot_s, crossing * byte_s)
    if ranks == 2:
        return one
    most = ranks * IN_FLIGHT_BYTES // ((ranks - 1) * (ranks - 2))
    two = LinkCost(2 * shot_s, 2 / ranks * crossing * byte_s)
    times = (most, one.seconds(most)), (most + 1, two.seconds(most + 1)), (SHOT_BYTES, two.seconds(SHOT_BYTES))
    return LinkCost(shot_s, 2 * (ranks - 1) / ranks * byte_s, times)


def _nvlink_cost(gpu: GpuSpec, ranks: int, passes: float, graphs: bool) -> LinkCost:
    """Time over NVLink, with the measured times of 64 KiB and 1 MiB scaled to this GPU's links."""
    nearest = nearest_nvlink(gpu)
    speed = gpu.nvlink_Bps / (nearest.nvlink_GBps * 1e9)
    latency = (_at(nearest.latency_us, ranks) + (0.0 if graphs else nearest.nccl_us)) * 1e-6
    measured = []
    for size, times_us in ((1 << 16, nearest.kib64_us), (1 << 20, nearest.mib_us)):
        beyond_latency = (_at(times_us, ranks) - _at(nearest.latency_us, ranks)) * 1e-6 / speed
        measured.append((size, latency + beyond_latency))
    return LinkCost(latency, passes / (_at(nearest.busbw_GBps, ranks) * 1e9 * speed), tuple(measured))


def has_peer(gpu: GpuSpec) -> bool:
    """Return True if such cards read each other's memory over PCIe: as probed on this machine, else by their name."""
    if gpu.peer is not None:
        return gpu.peer
    return not re.fullmatch(link_table().pcie.without_peer, gpu.name)


@cache
def send_cost(gpu: GpuSpec, kind: LinkKind, network_Bps: float, network_s: float | None = None) -> LinkCost:
    """Time of a transfer from one stage to the next; an all-reduce of two ranks carries every byte once, too."""
    if kind == "network":
        network, latency = link_table().network, _network_latency(network_s)
        if gpu.kind == "cpu":
            return LinkCost(latency + network.gloo_us * 1e-6, 1 / network_Bps)
        return LinkCost(latency, 1 / (network_Bps * network.share))
    return all_reduce_cost(gpu, kind, 2, network_Bps, graphs=False)


def _network_latency(measured_s: float | None) -> float:
    """Seconds of a small message from one node to another: as measured, else the table's."""
    return link_table().network.latency_us * 1e-6 if measured_s is None else measured_s


def _at(figures: tuple[float, float, float], ranks: int) -> float:
    """Interpolate figures for RANKS linearly over log2 of the ranks; extrapolate from the nearest two beyond them."""
    position = log2(ranks) - 1
    left = 0 if position < 1 else 1
    slope = figures[left + 1] - figures[left]
    return max(figures[left] + (position - left) * slope, min(figures) / 2)
