"""This machine as the planner's hardware: its GPUs, as they are really joined, or its CPU."""

from __future__ import annotations

import re

import msgspec

from weft.hardware import host as hosts
from weft.hardware.cluster import NETWORK, Cluster, Node, default_link, network_bytes
from weft.hardware.cpu import CpuSpeed
from weft.hardware.cpus import cpu_kernel_speed
from weft.hardware.gpus import GpuSpec, gpu_spec
from weft.hardware.host import Host
from weft.hardware.topology import Gpu, interconnect_domains
from weft.probes import speeds as measured
from weft.probes.speeds import Speeds

# What copies reach of a data sheet's bandwidth, and of a PCIe link's, where nothing is wrong; a card that copies slower
# than that is slower in everything. Source: bandwidthTest and nvbandwidth on A100 to H200 and RTX cards, an estimate.
COPY_SHARE = 0.8
PCIE_SHARE = 0.85
# 16-bit matrix operations for one of 32 bits, by the instruction set that has them; the best one counts. A CPU with
# none of them converts, and multiplies in 32 bits. Source: the makers' manuals, operations per cycle; that of
# avx512_bf16 is what two cores of Zen 5 reach.
BF16_OVER_FP32 = {"amx_bf16": 16.0, "avx512_bf16": 2.0, "bf16": 2.0}
FP16_OVER_FP32 = {"avx512_fp16": 2.0}


def probe_cluster(*, refresh: bool = False) -> Cluster:
    """This machine. Where there is no GPU the CPU is measured, a second at the first time or with `refresh`; how
    fast GPUs copy is looked up only (`probes.links` measures it)."""
    host = hosts.probe_host()
    if not host.gpus:
        cpu = measured.known_cpu_speed(host, refresh=refresh)
        return host_cluster(host, msgspec.structs.replace(measured.load_speeds(host), cpu=cpu))
    return host_cluster(host, measured.load_speeds(host))


def host_cluster(host: Host, speeds: Speeds) -> Cluster:
    """The GPUs that this process sees, on one node; without any, one device that is the CPU. Raises ConfigError for
    a GPU that neither the catalogue knows nor its driver tells enough of."""
    if not host.gpus:
        assert speeds.cpu is not None, "a CPU is measured before it is planned for"
        node = Node((with_calibration(cpu_spec(host, speeds.cpu), speeds),), "memory")
    else:
        node = gpu_node(host, speeds)
    return Cluster((node,), network_bytes(NETWORK))


def gpu_node(host: Host, speeds: Speeds) -> Node:
    """The GPUs with what was seen of them: NVLink only where it is, PCIe as wide as the slot, and peer-to-peer only
    where it works between all: a library that sums has one way for all of them."""
    gpus, uuids = host.gpus, [gpu.uuid for gpu in host.gpus]
    found = {(pair.first, pair.second): speeds.pair(uuids[pair.first], uuids[pair.second]) for pair in host.pairs}
    faulty = any(it is not None and it.verdict != "works" for it in found.values())
    peers = [it.peer if it else pair.peer for pair, it in zip(host.pairs, found.values(), strict=True)]
    peer = False if faulty or False in peers else True if peers and all(peers) else None
    specs = tuple(observed_spec(gpu, speeds, peer) for gpu in gpus)
    if len(gpus) > 1 and not any(pair.ancestor or pair.nvlinks or pair.peer is not None for pair in host.pairs):
        return Node(specs, default_link(specs))  # an old driver tells nothing
    joined = [(pair.first, pair.second) for pair in host.pairs if pair.nvlinks and not faulty]
    groups = interconnect_domains(len(gpus), joined)
    if len(groups) == 1 and joined:
        return Node(specs, "nvlink")
    return Node(specs, "pcie", tuple(sorted(group for group in groups if len(group) > 1)))


def observed_spec(gpu: Gpu, speeds: Speeds, peer: bool | None) -> GpuSpec:
    """The data sheet of a GPU, corrected by what was seen of this one."""
    spec = gpu_spec(gpu)
    bandwidth, pcie, nvlink = spec.bandwidth_Bps, spec.pcie_Bps, spec.nvlink_Bps
    if gpu.pcie and gpu.pcie.Bps:
        pcie = gpu.pcie.Bps
    if gpu.nvlinks:
        # The driver's figure counts the coding, so the data sheet's stands where all links are up.
        nvlink = min(nvlink or gpu.nvlinks.Bps, gpu.nvlinks.Bps)
    speed = next((it for it in speeds.gpus if it.gpu == gpu.uuid), None)
    if speed:
        bandwidth = min(bandwidth, speed.copy_Bps / COPY_SHARE)
        pcie = min(pcie, min(speed.from_host_Bps, speed.to_host_Bps) / PCIE_SHARE)
    spec = msgspec.structs.replace(
        spec, bandwidth_Bps=bandwidth, pcie_Bps=pcie, nvlink_Bps=nvlink, held_bytes=gpu.held_bytes, peer=peer
    )
    return with_calibration(spec, speeds)


def with_calibration(spec: GpuSpec, speeds: Speeds) -> GpuSpec:
    """With what our engine reaches on it, where that was measured."""
    found = next((it for it in speeds.calibrations if it.device == spec.name), None)
    return msgspec.structs.replace(spec, calibration=found)


def cpu_spec(host: Host, speed: CpuSpeed) -> GpuSpec:
    """The CPU as a device: the cores that this process may use, the memory that is free, and what was measured."""
    features = host.cpu.features if host.cpu else ()
    bf16 = max((BF16_OVER_FP32.get(it, 1.0) for it in features), default=1.0)
    fp16 = max((FP16_OVER_FP32.get(it, 1.0) for it in features), default=1.0)
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
    """A CPU's name without its maker's ornaments."""
    return " ".join(re.sub(r"\((R|TM|r|tm)\)|\bCPU\b|\bProcessor\b|@.*|\d+-Core\b", " ", model).split()) or "CPU"


def split_cpu(cluster: Cluster, ranks: int) -> Cluster:
    """A CPU as so many devices, for ranks that share it: each has its part of the cores, the bandwidth and the memory.
    Anything else, or one rank, is left as it is."""
    if not cluster.on_cpu or ranks < 2:
        return cluster
    (first,) = cluster.gpus
    return Cluster((Node((rank_share(first, ranks),) * ranks, "memory"),), cluster.network_Bps)


def rank_share(whole: GpuSpec, ranks: int) -> GpuSpec:
    """What one of so many ranks has of a device that they share."""
    return msgspec.structs.replace(
        whole.scaled(1 / ranks, 1 / ranks),
        name=f"1/{ranks} of {whole.name}",
        memory_bytes=whole.memory_bytes // ranks,
        held_bytes=whole.held_bytes // ranks,
        limit_bytes=None if whole.limit_bytes is None else whole.limit_bytes // ranks,
        per_node=ranks if whole.kind == "cpu" else whole.per_node,
    )
