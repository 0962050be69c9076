"""Clusters like a given one: with more GPUs, with other GPUs, or without --max-memory."""

from __future__ import annotations

import msgspec

from weft.machine.hardware.cluster import Cluster, Node, default_link
from weft.machine.hardware.gpus import GpuSpec

MAX_NODE_GPUS = 8  # GPUs per node
MAX_NODES = 64  # nodes of a cluster that is tried


def grown_cluster(cluster: Cluster, by: int) -> Cluster | None:
    """The cluster with `by` more GPUs like the last one, in its last node or in nodes of the same size, of at most
    eight. None if there is no such cluster, or for a CPU."""
    last = cluster.nodes[-1]
    if cluster.on_cpu:
        return None
    if len(cluster.nodes) == 1 and len(last.gpus) + by <= MAX_NODE_GPUS:
        grown = (*last.gpus, *[last.gpus[-1]] * by)
        link = default_link(grown) if len(last.gpus) == 1 else last.link
        return Cluster((Node(grown, link, last.bridged),), cluster.network_Bps)
    nodes, left_over = divmod(by, len(last.gpus))
    if left_over or len(cluster.nodes) + nodes > MAX_NODES:
        return None
    return Cluster((*cluster.nodes, *[last] * nodes), cluster.network_Bps, network_s=cluster.network_s)


def with_gpu(cluster: Cluster, gpu: GpuSpec) -> Cluster:
    """The cluster with this GPU in place of each of its own."""
    rows = [(gpu,) * len(node.gpus) for node in cluster.nodes]
    nodes = tuple(Node(row, default_link(row)) for row in rows)
    return Cluster(nodes, cluster.network_Bps, network_s=cluster.network_s)


def is_limited(cluster: Cluster) -> bool:
    """Return True if --max-memory limits a GPU."""
    return any(gpu.limit_bytes is not None for gpu in cluster.gpus)


def unlimited(cluster: Cluster) -> Cluster:
    """The cluster without --max-memory."""
    return cluster.map_gpus(lambda gpu: msgspec.structs.replace(gpu, limit_bytes=None))
