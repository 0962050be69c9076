"""Interconnect domains: the GPUs of a cluster that belong together, and the groups of them that ranks may use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import inf

import msgspec

from weft.machine.hardware.cluster import Cluster
from weft.machine.hardware.gpus import GpuSpec

MAX_GROUPS = 16  # tensor-parallel groups per pool, if their size is no power of two


class Device(msgspec.Struct, frozen=True):
    """One GPU of a cluster, or its CPU: its number in cluster order, and the number of its node."""

    number: int
    node: int
    gpu: GpuSpec


@lru_cache(maxsize=8)
def cluster_devices(cluster: Cluster) -> tuple[Device, ...]:
    """Every GPU, node by node, and last the CPU if layers may run on it."""
    numbered = [(number, gpu) for number, node in enumerate(cluster.nodes) for gpu in node.gpus]
    numbered += [(0, cluster.cpu)] if cluster.cpu else []
    return tuple(Device(number, node, gpu) for number, (node, gpu) in enumerate(numbered))


@lru_cache(maxsize=8)
def usable_devices(cluster: Cluster) -> tuple[Device, ...]:
    """Every GPU that the user allows, node by node; GPUs that a bridge joins are neighbours. A CPU that is used with
    GPUs gets layers only by name."""
    homes = cluster.gpu_positions

    def order(device: Device) -> tuple[int, float, int]:
        group = homes[device.number].group
        return device.node, inf if group is None else group, device.number

    allowed = (device for device in cluster_devices(cluster)[: len(cluster.gpus)] if device.gpu.limit_bytes != 0)
    return tuple(sorted(allowed, key=order))


def gpu_type(gpu: GpuSpec) -> tuple[str, int | None]:
    """(name, memory limit): equal for the GPUs of one interconnect domain."""
    return gpu.name, gpu.limit_bytes


def interconnect_domains(cluster: Cluster) -> list[tuple[Device, ...]]:
    """The GPUs of one type on one node. They reach each other over the same kind of link."""
    domains: dict[tuple[int, object], list[Device]] = {}
    for device in usable_devices(cluster):
        domains.setdefault((device.node, gpu_type(device.gpu)), []).append(device)
    return [tuple(domain) for domain in domains.values()]


def node_devices(cluster: Cluster) -> list[tuple[Device, ...]]:
    """The GPUs of each node, of any type."""
    nodes: dict[int, list[Device]] = {}
    for device in usable_devices(cluster):
        nodes.setdefault(device.node, []).append(device)
    return [tuple(node) for node in nodes.values()]


def same_gpu_type(members: Sequence[Device]) -> bool:
    """Return True if all devices are GPUs of one type."""
    first = members[0].gpu
    return all(device.gpu is first or device.gpu == first for device in members)


def tensor_groups(pools: Sequence[Sequence[Device]], size: int) -> list[tuple[Device, ...]]:
    """The largest number of groups of `size` GPUs: each from one pool, and of neighbours."""
    return [
        tuple(pool[start : start + size]) for pool in pools for start in range(0, len(pool) - len(pool) % size, size)
    ]


def place_replicas(
    groups: Sequence[tuple[Device, ...]], stages: int, count: int
) -> list[tuple[tuple[Device, ...], ...]]:
    """At most `count` replicas of `stages` groups each: within one node if it has room, the others across nodes."""
    within: list[tuple[tuple[Device, ...], ...]] = []
    left_over: list[tuple[Device, ...]] = []
    for node in _by_node(groups):
        for start in range(0, len(node), stages):
            part = tuple(node[start : start + stages])
            if len(part) == stages:
                within.append(part)
            else:
                left_over += part
    across = [tuple(left_over[start : start + stages]) for start in range(0, len(left_over), stages)]
    return [*within, *(part for part in across if len(part) == stages)][:count]


def _by_node(groups: Sequence[tuple[Device, ...]]) -> Iterator[list[tuple[Device, ...]]]:
    nodes: dict[int, list[tuple[Device, ...]]] = {}
    for group in groups:
        nodes.setdefault(group[0].node, []).append(group)
    yield from nodes.values()


def tensor_sizes(pools: Sequence[Sequence[Device]], most: int) -> list[int]:
    """Sizes of tensor parallelism worth trying, up to `most`, the largest first: the powers of two, and sizes that
    divide a pool into few groups with no GPU idle."""
    sizes: set[int] = set()
    for pool in pools:
        sizes |= {len(pool) // parts for parts in range(1, min(len(pool), MAX_GROUPS) + 1)}
        sizes |= {1 << bit for bit in range(len(pool).bit_length())}
    return sorted((size for size in sizes if size <= most), reverse=True)
