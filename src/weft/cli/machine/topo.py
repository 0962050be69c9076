"""weft topo: the links between this machine's GPUs, and their cost for tensor and pipeline parallelism."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from weft.cli.flags.hardware_flags import TopologyArguments
from weft.cli.machine.hardware import machine_speeds
from weft.cli.machine.hardware_view import UNKNOWN, link_matrix
from weft.cli.tables import console
from weft.machine.hardware import host, nvml
from weft.machine.hardware.gpu_figures import GpuSampler, NvLinkState
from weft.machine.hardware.host import Host
from weft.monitor.topology import DeviceLink, TopologyDevice, TopologyReport, report_json, report_topology

NAMED = 6  # devices or links with the same figures that are still listed by name


def main(arguments: TopologyArguments) -> int:
    """Print the links of this machine as a page or as one JSON object."""
    here = host.probe_host()
    speeds = machine_speeds(here, measure=arguments.measure, refresh=arguments.refresh_hardware)
    report = report_topology(here, speeds, nvlink_states(here))
    if arguments.json:
        print(json.dumps(report_json(report)))
        return 0
    out = console()
    if here.pairs:
        out.print(link_matrix(here))
    for line in topology_lines(report):
        out.print(line, soft_wrap=True)
    return 0


def nvlink_states(here: Host) -> tuple[NvLinkState, ...]:
    """State and error counters of all NVLinks; empty without a driver."""
    with nvml.open_nvml() as driver:
        return GpuSampler(driver, here.gpus).nvlinks() if driver and here.gpus else ()


def topology_lines(report: TopologyReport) -> Iterator[str]:
    """Devices, links and advice as text; devices and links with the same figures share a line."""
    yield from shared_lines((device.name, describe_device(device)) for device in report.devices)
    yield from shared_lines((f"{link.a} - {link.b}", describe_link(link)) for link in report.links)
    yield ""
    yield from (f"- {note}" for note in report.advice)


def shared_lines(named: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Lines "NAMES: TEXT" from (name, text), in the order of the texts' first names."""
    names_of: dict[str, list[str]] = {}
    for name, text in named:
        names_of.setdefault(text, []).append(name)
    for text, names in names_of.items():
        yield f"{', '.join(names) if len(names) <= NAMED else f'{names[0]} to {names[-1]} ({len(names)})'}: {text}"


def describe_device(device: TopologyDevice) -> str:
    """Model, place, and links of one device."""
    parts = [f"{device.model} on {device.node}"]
    if device.numa_node is not None:
        parts.append(f"NUMA node {device.numa_node}")
    if device.pcie:
        parts.append(f"PCIe {device.pcie.most_generation} x{device.pcie.lanes}")
    if device.nvlink_states:
        active = [state for state in device.nvlink_states if state.active]
        each = f", {device.nvlinks.each_Bps / 1e9:.1f} GB/s each" if device.nvlinks else ""
        parts.append(f"{len(active)} of {len(device.nvlink_states)} NVLinks up{each}")
    return ", ".join(parts)


def describe_link(link: DeviceLink) -> str:
    """Kind, speed and verdict of one link."""
    speed = f"{link.bandwidth_Bps / 1e9:.3g} GB/s" if link.bandwidth_Bps else "not measured"
    latency = f", {link.latency_s * 1e6:.0f} µs (planned)" if link.latency_s is not None else ""
    return f"{link.kind or UNKNOWN}, {speed}{latency}, peer-to-peer: {link.peer_to_peer}"
