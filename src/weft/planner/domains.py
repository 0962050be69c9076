"""Islands: which GPUs of a cluster belong together, and the groups that a layout may be laid on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import inf

import msgspec

from weft.hardware.cluster import Cluster
from weft.hardware.gpus import GpuSpec

MOST_GROUPS = 16  # of one pool, with a size that is no power of two


class Device(msgspec.Struct, frozen=True):
    """One GPU of a cluster: its number in cluster order, and the number of its node."""

    number: int
    node: int
    gpu: GpuSpec


@lru_cache(maxsize=8)
def devices(cluster: Cluster) -> tuple[Device, ...]:
    """Every GPU, node by node."""
    flat = [(node, gpu) for node, it in enumerate(cluster.nodes) for gpu in it.gpus]
    return tuple(Device(number, node, gpu) for number, (node, gpu) in enumerate(flat))


@lru_cache(maxsize=8)
def usable(cluster: Cluster) -> tuple[Device, ...]:
    """Every GPU that the user lets be used, those that a bridge joins one after the other."""
    homes = cluster.gpu_positions

    def place(device: Device) -> tuple[int, float, int]:
        group = homes[device.number].group
        return device.node, inf if group is None else group, device.number

    there = (device for device in devices(cluster) if device.gpu.limit_bytes != 0)
    return tuple(sorted(there, key=place))


def sort(gpu: GpuSpec) -> tuple[str, int | None]:
    """What GPUs of an island have in common: their type, and how much of it may be used."""
    return gpu.name, gpu.limit_bytes


def islands(cluster: Cluster) -> list[tuple[Device, ...]]:
    """The GPUs of one sort on one node, which reach each other over the same kind of link."""
    found: dict[tuple[int, object], list[Device]] = {}
    for device in usable(cluster):
        found.setdefault((device.node, sort(device.gpu)), []).append(device)
    return [tuple(island) for island in found.values()]


def nodes(cluster: Cluster) -> list[tuple[Device, ...]]:
    """The GPUs of each node, of whatever type."""
    found: dict[int, list[Device]] = {}
    for device in usable(cluster):
        found.setdefault(device.node, []).append(device)
    return [tuple(node) for node in found.values()]


def alike(members: Sequence[Device]) -> bool:
    """Whether all of them are of one type."""
    first = members[0].gpu
    return all(device.gpu is first or device.gpu == first for device in members)


def groups(pools: Sequence[Sequence[Device]], size: int) -> list[tuple[Device, ...]]:
    """As many groups of `size` GPUs as there are, none with GPUs of two pools, neighbours together."""
    return [
        tuple(pool[start : start + size]) for pool in pools for start in range(0, len(pool) - len(pool) % size, size)
    ]


def replicas(groups: Sequence[tuple[Device, ...]], stages: int, count: int) -> list[tuple[tuple[Device, ...], ...]]:
    """`count` replicas of `stages` groups each: on one node where one has room for it, the rest across nodes."""
    whole: list[tuple[tuple[Device, ...], ...]] = []
    loose: list[tuple[Device, ...]] = []
    for node in _by_node(groups):
        for start in range(0, len(node), stages):
            part = tuple(node[start : start + stages])
            if len(part) == stages:
                whole.append(part)
            else:
                loose += part
    across = [tuple(loose[start : start + stages]) for start in range(0, len(loose), stages)]
    return [*whole, *(part for part in across if len(part) == stages)][:count]


def _by_node(groups: Sequence[tuple[Device, ...]]) -> Iterator[list[tuple[Device, ...]]]:
    found: dict[int, list[tuple[Device, ...]]] = {}
    for group in groups:
        found.setdefault(group[0].node, []).append(group)
    yield from found.values()


def tensor_sizes(pools: Sequence[Sequence[Device]], most: int) -> list[int]:
    """Sizes of tensor parallelism worth trying, up to `most`: those that divide a pool among few groups with no GPU
    idle, and the powers of two."""
    sizes: set[int] = set()
    for pool in pools:
        sizes |= {len(pool) // parts for parts in range(1, min(len(pool), MOST_GROUPS) + 1)}
        sizes |= {1 << bit for bit in range(len(pool).bit_length())}
    return sorted((size for size in sizes if size <= most), reverse=True)
