"""Links: how fast the ranks of a layer sum what they hold, over NVLink, PCIe, shared memory or the network."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from math import log2
from typing import Literal

import msgspec

from weft.hardware.gpus import GpuSpec

LinkKind = Literal["nvlink", "pcie", "memory", "network"]
RANKS = (2, 4, 8)  # that the tables are for


class NvLinkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduce among GPUs of one capability whose NVLink carries `nvlink_GBps` in one direction."""

    capability: tuple[int, int]
    nvlink_GBps: float
    latency_us: tuple[float, float, float]
    kib64_us: tuple[float, float, float]
    mib_us: tuple[float, float, float]
    busbw_GBps: tuple[float, float, float]
    nccl_us: float
    source: str


class PcieFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduce without NVLink, as a share of the PCIe link. Cards whose name matches `without_peer` go through the
    host's memory."""

    latency_us: tuple[float, float, float]
    busbw_of_pcie: float
    without_peer: str
    nccl_us: float
    source: str


class MemoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduce among the ranks of one CPU, through memory that they share, as a share of a rank's bandwidth."""

    latency_us: tuple[float, float, float]
    share: float
    source: str


class NetworkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What crosses between two nodes."""

    latency_us: float
    share: float
    source: str


class LinkTable(msgspec.Struct, frozen=True):
    """The whole table."""

    nvlink: tuple[NvLinkFigures, ...]
    pcie: PcieFigures
    memory: MemoryFigures
    network: NetworkFigures


class LinkCost(msgspec.Struct, frozen=True):
    """A sum of b bytes among its ranks takes `latency_s` + b * `s_per_byte`; below the largest of `measured`, which
    are (bytes, seconds), it is a straight line between those, and above it goes on from there."""

    latency_s: float
    s_per_byte: float
    measured: tuple[tuple[float, float], ...] = ()

    def seconds(self, size: float) -> float:
        before, took = 0.0, self.latency_s
        for there, seconds in self.measured:
            if size < there:
                return took + (seconds - took) * (size - before) / (there - before)
            before, took = there, seconds
        return took + (size - before) * self.s_per_byte


@cache
def link_table() -> LinkTable:
    return msgspec.convert(tomllib.loads((files("weft.hardware") / "data/links.toml").read_text()), LinkTable)


def nearest_nvlink(gpu: GpuSpec) -> NvLinkFigures:
    """The figures of the generation that is nearest."""
    return min(link_table().nvlink, key=lambda link: abs(link.capability[0] - gpu.capability[0]))


@cache
def all_reduce_cost(gpu: GpuSpec, kind: LinkKind, ranks: int, network_Bps: float, graphs: bool) -> LinkCost:
    """Among `ranks` GPUs like `gpu`. `kind` is the slowest link between any two of them; `network_Bps` is what a
    node sends to another. With `graphs` the sum is a kernel of a CUDA graph, without it a call of NCCL."""
    if ranks == 1:
        return LinkCost(0.0, 0.0)
    passes = 2 * (ranks - 1) / ranks
    if kind == "network":
        network = link_table().network
        return LinkCost(network.latency_us * 1e-6 * log2(ranks), passes / (network_Bps * network.share))
    if kind == "nvlink":
        near = nearest_nvlink(gpu)
        speed = gpu.nvlink_Bps / (near.nvlink_GBps * 1e9)
        latency = (_at(near.latency_us, ranks) + (0.0 if graphs else near.nccl_us)) * 1e-6
        small = [(1 << 16, near.kib64_us), (1 << 20, near.mib_us)]
        beyond = [(size, (_at(took, ranks) - _at(near.latency_us, ranks)) * 1e-6 / speed) for size, took in small]
        measured = tuple((size, latency + more) for size, more in beyond)
        return LinkCost(latency, passes / (_at(near.busbw_GBps, ranks) * 1e9 * speed), measured)
    if kind == "memory":
        memory = link_table().memory
        return LinkCost(_at(memory.latency_us, ranks) * 1e-6, passes / (gpu.bandwidth_Bps * memory.share))
    pcie = link_table().pcie
    crossings = 1 if has_peer(gpu) else 2
    latency = (_at(pcie.latency_us, ranks) + (0.0 if graphs else pcie.nccl_us)) * 1e-6
    return LinkCost(latency, passes * crossings / (gpu.pcie_Bps * pcie.busbw_of_pcie))


def has_peer(gpu: GpuSpec) -> bool:
    """Whether such cards read each other's memory over PCIe: as was seen where they are here, else by their name."""
    return not re.fullmatch(link_table().pcie.without_peer, gpu.name) if gpu.peer is None else gpu.peer


@cache
def send_cost(gpu: GpuSpec, kind: LinkKind, network_Bps: float) -> LinkCost:
    """From one stage to the next: a sum of two ranks carries every byte over the link once."""
    if kind == "network":
        network = link_table().network
        return LinkCost(network.latency_us * 1e-6, 1 / (network_Bps * network.share))
    return all_reduce_cost(gpu, kind, 2, network_Bps, graphs=False)


def _at(figures: tuple[float, float, float], ranks: int) -> float:
    """Between the tabled ranks in a straight line over log2, beyond them on as between the nearest two."""
    x = log2(ranks) - 1
    left = 0 if x < 1 else 1
    slope = figures[left + 1] - figures[left]
    return max(figures[left] + (x - left) * slope, min(figures) / 2)
