"""Claims about links: what a card is connected with, and what NVLink gains."""

from __future__ import annotations

import re

import msgspec

from weft.machine.hardware.cluster import Cluster, default_link
from weft.machine.hardware.gpus import GpuSpec
from weft.planner.note import Note, create_note
from weft.planner.question import Question
from weft.planner.search.search import search

NEAR = 0.15  # guides round bandwidths: 600 GB/s, 112 or 112.5, 63 for 64
# PCIe's bandwidth with 16 lanes in one direction, by version, in bytes per second.
PCIE_BPS = {3: 16e9, 4: 32e9, 5: 64e9, 6: 128e9}


class LinkVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a card's links, with the catalogue's figures in one direction."""

    possible: bool
    nvlink_Bps: float
    pcie_Bps: float
    note: Note


class GainVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on what NVLink gains: the planner's factors above 0 for one user, and for all together."""

    possible: bool
    single: float
    all: float
    note: Note


def judge_link(gpu: GpuSpec, links: str, link_Bps: float | None) -> LinkVerdict:
    """The verdict on `links`, as in "PCIe 4.0 + NVLink bridge"; bandwidths are often told for both directions."""
    names, version = links.lower(), re.search(r"pcie\D{0,8}(\d)", links, re.IGNORECASE)
    denied = re.search(r"\b(no|without|not)\b", names) is not None
    wants_nvlink = "nv" in names and not denied
    pcie = _pcie_version(gpu)
    values = {
        "gpu": gpu.name,
        "pcie": pcie,
        "pcie_bytes": gpu.pcie_Bps,
        "nvlink_bytes": gpu.nvlink_Bps,
        "link_bytes": link_Bps or 0.0,
        "version": int(version[1]) if version else 0,
    }
    if denied and gpu.nvlink_Bps:
        code = "claim_has_nvlink"
    elif wants_nvlink and not gpu.nvlink_Bps:
        code = "claim_no_nvlink"
    elif wants_nvlink and link_Bps and not _is_near(link_Bps, gpu.nvlink_Bps, 2 * gpu.nvlink_Bps):
        code = "claim_other_nvlink"
    elif not wants_nvlink and version and int(version[1]) != pcie:
        code = "claim_other_pcie"
    elif not wants_nvlink and link_Bps and not _is_near(link_Bps, gpu.pcie_Bps, 2 * gpu.pcie_Bps):
        code = "claim_other_pcie_speed"
    else:
        code = "claim_link_right"
    note = create_note(code, **values)
    return LinkVerdict(possible=code == "claim_link_right", nvlink_Bps=gpu.nvlink_Bps, pcie_Bps=gpu.pcie_Bps, note=note)


def _pcie_version(gpu: GpuSpec) -> int:
    return min(PCIE_BPS, key=lambda version: abs(PCIE_BPS[version] - gpu.pcie_Bps))


def _is_near(figure: float, *known: float) -> bool:
    return any(abs(figure / other - 1) <= NEAR for other in known)


def judge_gain(question: Question, low: float, high: float) -> GainVerdict | None:
    """The verdict on a gain of `low` to `high` by NVLink, for the model and the GPUs of a question.

    It is possible if the planner's gain, for one user or for all together, is in the range or on both sides of it.
    None if the model does not fit these GPUs.
    """
    alone, together = [], []
    for link in ("pcie", "nvlink"):
        linked = msgspec.structs.replace(question, cluster=_linked(question.cluster, link))
        by_latency = search(msgspec.structs.replace(linked, objective="latency")).best
        by_throughput = search(msgspec.structs.replace(linked, objective="throughput")).best
        if by_latency is None or by_throughput is None:
            return None
        alone.append(by_latency.predicted.single_tok_s)
        together.append(by_throughput.predicted.output_tok_s)
    single, every = alone[1] / alone[0] - 1, together[1] / together[0] - 1
    possible = min(single, every) <= high and max(single, every) >= low
    note = create_note(
        "claim_gain",
        single=100 * single,
        all=100 * every,
        model=question.model,
        gpus=f"{len(question.cluster.gpus)} x {question.cluster.gpus[0].name}",
    )
    return GainVerdict(possible=possible, single=single, all=every, note=note)


def has_nvlink(cluster: Cluster) -> bool:
    """Return True if NVLink may join the GPUs of every node."""
    return all(
        len(node.gpus) > 1 and (default_link(node.gpus) == "nvlink" or node.link == "nvlink") for node in cluster.nodes
    )


def _linked(cluster: Cluster, link: str) -> Cluster:
    nodes = tuple(msgspec.structs.replace(node, link=link, bridged=()) for node in cluster.nodes)
    return msgspec.structs.replace(cluster, nodes=nodes)
