"""Links between the devices of this machine, and their meaning for tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from weft.errors import ConfigError
from weft.machine.hardware.cluster import Cluster
from weft.machine.hardware.gpu_figures import NvLinkState
from weft.machine.hardware.host import Host
from weft.machine.hardware.links import all_reduce_cost, send_cost
from weft.machine.hardware.topology import Gpu, GpuPair, NvLinks, Pcie, link_name
from weft.planner.note import Note, create_note
from weft.probes.machine import host_cluster
from weft.probes.stored_speeds import PairSpeed, Speeds

# The model whose traffic the advice counts: Llama-3.3-70B has 80 layers, each with two sums of 8,192 values of 16 bits.
HIDDEN_BYTES = 8192 * 2
SUMS = 2 * 80


class TopologyDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or the CPU of a machine without GPUs. Figures that are not known are None."""

    name: str
    model: str
    node: str
    numa_node: int | None = None
    memory_bytes: int
    pcie: Pcie | None = None
    nvlinks: NvLinks | None = None
    nvlink_states: tuple[NvLinkState, ...] = ()


class DeviceLink(msgspec.Struct, frozen=True, kw_only=True):
    """The link between two devices.

    - `kind`: as nvidia-smi topo writes it (NV18, PIX, PXB, PHB, NODE, SYS), "memory" between ranks of a CPU, "" if
      unknown.
    - `bandwidth_Bps`: measured bytes per second of a copy in the slower direction; None if not measured.
    - `latency_s`: the planner's time of a transfer without bytes.
    - `peer_to_peer`: the measured verdict ("works", "broken", "hung"), "through the host" if copies arrive but not
      directly, else the driver's report ("reported", "unsupported"), or "unknown".
    """

    a: str
    b: str
    kind: str
    bandwidth_Bps: float | None
    latency_s: float | None
    peer_to_peer: str


class TopologyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `weft topo` shows."""

    devices: tuple[TopologyDevice, ...]
    links: tuple[DeviceLink, ...]
    advice: tuple[Note, ...]


def report_topology(host: Host, speeds: Speeds, states: Sequence[NvLinkState] = ()) -> TopologyReport:
    """Report the links of this machine.

    Devices without figures (a GPU that is not in the catalogue, a CPU that was not measured) have no advice.
    """
    try:
        cluster = host_cluster(host, speeds) if host.gpus or speeds.cpu else None
    except ConfigError:
        cluster = None
    if not host.gpus:
        return TopologyReport(devices=(_cpu_device(host),), links=(), advice=tuple(_cpu_advice(cluster)))
    devices = tuple(_gpu_device(host, gpu, states) for gpu in host.gpus)
    links = tuple(_device_link(host, pair, speeds, cluster) for pair in host.pairs)
    advice = (*_faults(host, links, states), *(_gpu_advice(cluster) if cluster else ()))
    return TopologyReport(devices=devices, links=links, advice=advice)


def report_json(report: TopologyReport) -> dict[str, Any]:
    """The report as JSON; each piece of advice has its code, values and text."""
    fields: dict[str, Any] = msgspec.to_builtins(report)
    fields["advice"] = [
        {"code": note.code, "values": msgspec.to_builtins(note.values), "text": str(note)} for note in report.advice
    ]
    return fields


def _cpu_device(host: Host) -> TopologyDevice:
    model = host.cpu.model if host.cpu else "CPU"
    return TopologyDevice(name="cpu", model=model, node=host.hostname, memory_bytes=host.memory_total_bytes)


def _gpu_device(host: Host, gpu: Gpu, states: Sequence[NvLinkState]) -> TopologyDevice:
    return TopologyDevice(
        name=f"cuda:{gpu.index}",
        model=gpu.name,
        node=host.hostname,
        numa_node=gpu.numa_node,
        memory_bytes=gpu.total_bytes,
        pcie=gpu.pcie,
        nvlinks=gpu.nvlinks,
        nvlink_states=tuple(state for state in states if state.gpu == gpu.index),
    )


def _device_link(host: Host, pair: GpuPair, speeds: Speeds, cluster: Cluster | None) -> DeviceLink:
    measured = speeds.pair(host.gpus[pair.first].uuid, host.gpus[pair.second].uuid)
    latency = None
    if cluster is not None:
        spec = cluster.gpus[pair.first]
        kind = "nvlink" if pair.nvlinks and spec.nvlink_Bps else "pcie"
        latency = send_cost(spec, kind, cluster.network_Bps).latency_s
    return DeviceLink(
        a=f"cuda:{pair.first}",
        b=f"cuda:{pair.second}",
        kind=link_name(pair),
        bandwidth_Bps=(measured.Bps or None) if measured else None,
        latency_s=latency,
        peer_to_peer=peer_verdict(pair, measured),
    )


def peer_verdict(pair: GpuPair, measured: PairSpeed | None) -> str:
    """Verdict on peer-to-peer copies of a pair: the test's, or else the driver's."""
    if measured is None:
        return {True: "reported", False: "unsupported", None: "unknown"}[pair.peer]
    if measured.verdict == "works" and not measured.peer:
        return "through the host"
    return measured.verdict


def _cpu_advice(cluster: Cluster | None) -> Iterator[Note]:
    yield create_note("topo_no_gpu")
    if cluster is None:
        return
    spec = cluster.gpus[0]
    seconds = all_reduce_cost(spec, "memory", 2, cluster.network_Bps, graphs=False).seconds(HIDDEN_BYTES)
    yield create_note("topo_cpu_sums", sum_us=seconds * 1e6, sums=SUMS, token_ms=seconds * SUMS * 1e3)


def _faults(host: Host, links: Sequence[DeviceLink], states: Sequence[NvLinkState]) -> Iterator[Note]:
    """Advice about links that do not work as they should."""
    for link in links:
        if link.peer_to_peer in ("broken", "hung"):
            yield create_note("topo_faulty_pair", a=link.a, b=link.b, verdict=link.peer_to_peer)
    for gpu in host.gpus:
        if gpu.pcie and gpu.pcie.lanes < gpu.pcie.most_lanes:
            yield create_note("topo_narrow_slot", gpu=gpu.index, lanes=gpu.pcie.lanes, most=gpu.pcie.most_lanes)
        yield from _nvlink_faults(gpu.index, [state for state in states if state.gpu == gpu.index])


def _nvlink_faults(gpu: int, states: Sequence[NvLinkState]) -> Iterator[Note]:
    """Advice about the NVLinks of a GPU that are down or have errors."""
    down = [state.link for state in states if not state.active]
    if down and len(down) < len(states):
        yield create_note("topo_links_down", gpu=gpu, down=down, count=len(states))
    for state in states:
        if any(state.errors.values()):
            yield create_note("topo_link_errors", gpu=gpu, link=state.link, errors=sum(state.errors.values()))


def _gpu_advice(cluster: Cluster) -> Iterator[Note]:
    """The planner's figures for tensor and pipeline parallelism over the GPUs of this machine."""
    (node,) = cluster.nodes
    count = len(node.gpus)
    if count == 1:
        yield create_note("topo_one_gpu")
        return
    spec, network = min(node.gpus, key=lambda gpu: gpu.pcie_Bps), cluster.network_Bps
    for domain in node.bridged:
        seconds = all_reduce_cost(spec, "nvlink", len(domain), network, graphs=True).seconds(HIDDEN_BYTES)
        yield create_note("topo_domain", gpus=list(domain), token_ms=seconds * SUMS * 1e3)
    kind = node.link
    seconds = all_reduce_cost(spec, kind, count, network, graphs=True).seconds(HIDDEN_BYTES)
    yield create_note(
        "topo_tensor_parallel", ranks=count, link=kind, sum_us=seconds * 1e6, sums=SUMS, token_ms=seconds * SUMS * 1e3
    )
    handover = send_cost(spec, kind, network).seconds(HIDDEN_BYTES)
    yield create_note("topo_pipeline", stages=count, send_us=handover * 1e6, token_ms=handover * (count - 1) * 1e3)
