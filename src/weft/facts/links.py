"""Links: how fast the ranks of a layer sum what they hold, over NVLink, PCIe or the network."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from math import log2
from typing import Literal

import msgspec

Kind = Literal["nvlink", "pcie", "network"]
RANKS = (2, 4, 8)  # that the tables are for


class NvLink(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduce among GPUs of one capability whose NVLink carries `nvlink_GBps` in one direction."""

    capability: tuple[int, int]
    nvlink_GBps: float
    latency_us: tuple[float, float, float]
    busbw_GBps: tuple[float, float, float]
    nccl_us: float
    source: str


class Pcie(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduce through the host, as a share of the PCIe link."""

    latency_us: tuple[float, float, float]
    busbw_of_pcie: float
    nccl_us: float
    source: str


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """What crosses between two nodes."""

    latency_us: float
    share: float
    source: str


class Links(msgspec.Struct, frozen=True):
    """The whole table."""

    nvlink: tuple[NvLink, ...]
    pcie: Pcie
    network: Network


class AllReduce(msgspec.Struct, frozen=True):
    """A sum of b bytes among its ranks takes `latency_s` + b * `s_per_byte`."""

    latency_s: float
    s_per_byte: float

    def seconds(self, size: float) -> float:
        return self.latency_s + size * self.s_per_byte


@cache
def table() -> Links:
    return msgspec.convert(tomllib.loads((files("weft.facts") / "data/links.toml").read_text()), Links)


@cache
def all_reduce(
    kind: Kind, ranks: int, *, capability: tuple[int, int], peer_Bps: float, network_Bps: float, graphs: bool
) -> AllReduce:
    """Among `ranks` GPUs of this capability. `kind` is the slowest link between any two of them and `peer_Bps` what
    their NVLink or PCIe carries in one direction; `network_Bps` is a node's. With `graphs` the sum is a kernel of a
    CUDA graph, without it a call of NCCL."""
    if ranks == 1:
        return AllReduce(0.0, 0.0)
    passes = 2 * (ranks - 1) / ranks
    match kind:
        case "network":
            link = table().network
            return AllReduce(link.latency_us * 1e-6 * log2(ranks), passes / (network_Bps * link.share))
        case "nvlink":
            nvlink = min(table().nvlink, key=lambda link: abs(link.capability[0] - capability[0]))
            bandwidth = _at(nvlink.busbw_GBps, ranks) / nvlink.nvlink_GBps * peer_Bps
            latency, nccl = _at(nvlink.latency_us, ranks), nvlink.nccl_us
        case "pcie":
            pcie = table().pcie
            bandwidth = peer_Bps * pcie.busbw_of_pcie
            latency, nccl = _at(pcie.latency_us, ranks), pcie.nccl_us
    return AllReduce((latency + (0.0 if graphs else nccl)) * 1e-6, passes / bandwidth)


def _at(figures: tuple[float, float, float], ranks: int) -> float:
    """Between the tabled ranks in a straight line over log2, beyond them on as between the nearest two."""
    x = log2(ranks) - 1
    left = 0 if x < 1 else 1
    slope = figures[left + 1] - figures[left]
    return max(figures[left] + (x - left) * slope, min(figures) / 2)
