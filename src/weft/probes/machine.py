"""This machine as a cluster for the planner: its GPUs with their real links, or its CPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from weft.machine.hardware import host as hosts
from weft.machine.hardware.cluster import NETWORK, Cluster, Node, default_link
from weft.machine.hardware.cpu import CpuSpeed
from weft.machine.hardware.cpus import cpu_kernel_speed
from weft.machine.hardware.gpus import GpuSpec, gpu_spec
from weft.machine.hardware.host import Host
from weft.machine.hardware.quantities import parse_rate
from weft.machine.hardware.topology import Gpu, GpuPair, interconnect_domains
from weft.probes import stored_speeds
from weft.probes.stored_speeds import PairSpeed, Speeds

# Share of a data sheet's bandwidth, and of a PCIe link's, that copies reach on a sound card; a card that copies slower
# is slower in everything. Source: bandwidthTest and nvbandwidth on A100 to H200 and RTX cards, an estimate.
COPY_SHARE = 0.8
PCIE_SHARE = 0.85
# 16-bit matrix operations in the time of a 32-bit operation, by instruction set; the best one counts. A CPU with none
# of these converts, and multiplies in 32 bits. Source: the makers' manuals, operations per cycle; the figure of
# avx512_bf16 is measured on two cores of Zen 5.
BF16_OVER_FP32 = {"amx_bf16": 16.0, "avx512_bf16": 2.0, "bf16": 2.0}
FP16_OVER_FP32 = {"avx512_fp16": 2.0}


def probe_cluster(*, refresh: bool = False) -> Cluster:
    """Probe this machine. Without a GPU the CPU is measured, which takes a second the first time and with `refresh`.

    The copy speeds of GPUs are only loaded (`study.measure.links` measures them).
    """
    host = hosts.probe_host()
    if not host.gpus:
        cpu = stored_speeds.cpu_speed_of(host, refresh=refresh)
        return host_cluster(host, msgspec.structs.replace(stored_speeds.load_speeds(host), cpu=cpu))
    return host_cluster(host, stored_speeds.load_speeds(host))


def host_cluster(host: Host, speeds: Speeds) -> Cluster:
    """Cluster of one node with the GPUs that this process sees, or with the CPU as its only device.

    Raises ConfigError for a GPU that is not in the catalogue and whose driver reports too little.
    """
    if not host.gpus:
        assert speeds.cpu is not None, "a CPU is measured before it is planned for"
        node = Node((with_calibration(cpu_spec(host, speeds.cpu), speeds),), "memory")
    else:
        node = gpu_node(host, speeds)
    return Cluster((node,), parse_rate(NETWORK, "network"))


def add_cpu(cluster: Cluster, host: Host, speeds: Speeds) -> Cluster:
    """The cluster with the host's CPU next to its GPUs."""
    assert speeds.cpu is not None, "a CPU is measured before it is planned for"
    return cluster.with_cpu(with_calibration(cpu_spec(host, speeds.cpu), speeds))


def probe_cpu(*, refresh: bool = False) -> GpuSpec:
    """The CPU of this machine, measured: it takes a second the first time and with `refresh`."""
    host = hosts.probe_host()
    speed = stored_speeds.cpu_speed_of(host, refresh=refresh)
    return with_calibration(cpu_spec(host, speed), stored_speeds.load_speeds(host))


def gpu_node(host: Host, speeds: Speeds) -> Node:
    """Node of the GPUs with their observed links.

    NVLink counts only if it is there, PCIe is as wide as the slot, and peer-to-peer counts only if it works between all
    GPUs. A library uses the same way of summing for all of them.
    """
    gpus = host.gpus
    measured = [speeds.pair(gpus[pair.first].uuid, gpus[pair.second].uuid) for pair in host.pairs]
    has_fault = _has_fault(measured)
    peer = _common_peer(host, measured, has_fault)
    specs = tuple(observed_spec(gpu, speeds, peer) for gpu in gpus)
    if len(gpus) > 1 and not any(map(_is_reported, host.pairs)):
        return Node(specs, default_link(specs))
    domains = () if has_fault else _nvlink_domains(host)
    if len(domains) == 1 and len(domains[0]) == len(gpus):
        return Node(specs, "nvlink")
    return Node(specs, "pcie", domains)


def _has_fault(measured: Sequence[PairSpeed | None]) -> bool:
    return any(speed is not None and speed.verdict != "works" for speed in measured)


def _nvlink_domains(host: Host) -> tuple[tuple[int, ...], ...]:
    """The groups of two GPUs or more that NVLink joins."""
    joined = [(pair.first, pair.second) for pair in host.pairs if pair.nvlinks]
    domains = interconnect_domains(len(host.gpus), joined)
    return tuple(sorted(domain for domain in domains if len(domain) > 1))


def _is_reported(pair: GpuPair) -> bool:
    """Return True if the driver reports the connection of two GPUs; an old one reports none."""
    return bool(pair.ancestor or pair.nvlinks) or pair.peer is not None


def _common_peer(host: Host, measured: Sequence[PairSpeed | None], has_fault: bool) -> bool | None:
    """True if all pairs of GPUs reach each other's memory, False if one pair does not, None if that is unknown."""
    peers = [speed.peer if speed else pair.peer for pair, speed in zip(host.pairs, measured, strict=True)]
    if has_fault or False in peers:
        return False
    return True if peers and all(peers) else None


def observed_spec(gpu: Gpu, speeds: Speeds, peer: bool | None) -> GpuSpec:
    """Data sheet of a GPU, corrected by the observations of this one."""
    spec = gpu_spec(gpu)
    bandwidth, pcie, nvlink = spec.bandwidth_Bps, spec.pcie_Bps, spec.nvlink_Bps
    if gpu.pcie and gpu.pcie.Bps:
        pcie = gpu.pcie.Bps
    if gpu.nvlinks:
        # The driver's figure includes coding, so the data sheet's counts if all links are up.
        nvlink = min(nvlink or gpu.nvlinks.Bps, gpu.nvlinks.Bps)
    speed = next((measured for measured in speeds.gpus if measured.gpu == gpu.uuid), None)
    if speed:
        bandwidth = min(bandwidth, speed.copy_Bps / COPY_SHARE)
        pcie = min(pcie, min(speed.from_host_Bps, speed.to_host_Bps) / PCIE_SHARE)
    spec = msgspec.structs.replace(
        spec, bandwidth_Bps=bandwidth, pcie_Bps=pcie, nvlink_Bps=nvlink, held_bytes=gpu.held_bytes, peer=peer
    )
    return with_calibration(spec, speeds)


def with_calibration(spec: GpuSpec, speeds: Speeds) -> GpuSpec:
    """The same device with its calibration, if it was measured."""
    own = next((calibration for calibration in speeds.calibrations if calibration.device == spec.name), None)
    return msgspec.structs.replace(spec, calibration=own)


def cpu_spec(host: Host, speed: CpuSpeed) -> GpuSpec:
    """The CPU as a device: the cores that this process may use, the free memory, and the measured speeds."""
    features = host.cpu.features if host.cpu else ()
    bf16 = max((BF16_OVER_FP32.get(feature, 1.0) for feature in features), default=1.0)
    fp16 = max((FP16_OVER_FP32.get(feature, 1.0) for feature in features), default=1.0)
    count = len(host.compute_cores)
    source = f"measured here: {speed.bandwidth_Bps / 1e9:.0f} GB/s, {speed.fp32_flops / 1e12:.2f} TFLOPS in 32 bits"
    return GpuSpec(
        kind="cpu",
        name=f"{short_cpu_name(host.cpu.model) if host.cpu else 'CPU'} ({count} {'core' if count == 1 else 'cores'})",
        memory_bytes=host.memory_free_bytes,
        bandwidth_Bps=speed.bandwidth_Bps,
        flops={
            "fp32": speed.fp32_flops,
            "bf16": bf16 * speed.fp32_flops,
            "fp16": fp16 * speed.fp32_flops,
        },
        nvlink_Bps=0.0,
        pcie_Bps=0.0,
        capability=(0, 0),
        per_node=1,
        source=f"{source}, {bf16:g} times as many in bfloat16 by its instruction set",
        kernels=cpu_kernel_speed(features, speed),
    )


def short_cpu_name(model: str) -> str:
    """A CPU's name without trademarks, clock and number of cores."""
    return " ".join(re.sub(r"\((R|TM|r|tm)\)|\bCPU\b|\bProcessor\b|@.*|\d+-Core\b", " ", model).split()) or "CPU"


def split_cpu(cluster: Cluster, ranks: int) -> Cluster:
    """Split a CPU into one device per rank, each with its part of the cores, the bandwidth and the memory.

    A cluster of GPUs, and a CPU with one rank, is returned unchanged.
    """
    if not cluster.on_cpu or ranks < 2:
        return cluster
    (first,) = cluster.gpus
    return Cluster((Node((rank_share(first, ranks),) * ranks, "memory"),), cluster.network_Bps)


def rank_share(whole: GpuSpec, ranks: int) -> GpuSpec:
    """One rank's part of a device that `ranks` ranks share."""
    return msgspec.structs.replace(
        whole.scaled(1 / ranks, 1 / ranks),
        name=f"1/{ranks} of {whole.name}",
        memory_bytes=whole.memory_bytes // ranks,
        held_bytes=whole.held_bytes // ranks,
        limit_bytes=None if whole.limit_bytes is None else whole.limit_bytes // ranks,
        per_node=ranks if whole.kind == "cpu" else whole.per_node,
    )
