"""Status of a cluster: its nodes, their devices, who runs what on them, and what is free."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import msgspec

from weft.cluster.ray_cluster import connect
from weft.errors import ConfigError
from weft.executors.ray_nodes import ENGINE_NAME
from weft.hardware.host import Host


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """A placement group on a node: its name, and the number of its bundles there. An engine of Weft has a model."""

    name: str
    model: str | None
    state: str
    ranks: int


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node: its devices, those that no placement group has, and the engines on it. Memory is in bytes."""

    node: str
    name: str
    address: str
    cpus: float
    cpus_free: float
    gpus: float
    gpus_free: float
    gpu_names: tuple[str, ...] = ()
    memory_bytes: int = 0
    engines: tuple[Engine, ...] = ()


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster. `kind` is "ray" or "machine"; a machine alone has one node."""

    kind: str
    address: str
    nodes: tuple[NodeStatus, ...]


def cluster_status(host: Host, environment: Mapping[str, str]) -> ClusterStatus:
    """The status of the Ray cluster at RAY_ADDRESS or on this machine; without one, of this machine alone.

    Raises ConfigError for an address at which no cluster answers.
    """
    if environment.get("RAY_ADDRESS") or importlib.util.find_spec("ray"):
        try:
            return _ray_status(environment)
        except ConfigError:
            if environment.get("RAY_ADDRESS"):
                raise
    return ClusterStatus(kind="machine", address="", nodes=(machine_status(host),))


def machine_status(host: Host) -> NodeStatus:
    """The status of a machine without Ray. A GPU is free if no process holds memory on it."""
    return NodeStatus(
        node=host.hostname,
        name=host.hostname,
        address="",
        cpus=len(host.cores),
        cpus_free=len(host.cores),
        gpus=len(host.gpus),
        gpus_free=sum(not gpu.holders for gpu in host.gpus),
        gpu_names=tuple(gpu.name for gpu in host.gpus),
        memory_bytes=host.memory_total_bytes,
    )


def _ray_status(environment: Mapping[str, str]) -> ClusterStatus:
    ray = connect(environment, may_start=False)
    from ray.util import placement_group_table

    groups = list(placement_group_table().values())
    nodes = [ray_node_status(node, groups) for node in ray.nodes() if node["Alive"]]
    address = ray.get_runtime_context().gcs_address
    return ClusterStatus(kind="ray", address=address, nodes=tuple(sorted(nodes, key=lambda node: node.node)))


def ray_node_status(node: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> NodeStatus:
    """The status of a node, from Ray's tables of nodes and of placement groups."""
    resources, id = node["Resources"], node["NodeID"]
    taken = {"CPU": 0.0, "GPU": 0.0}
    engines = []
    for group in groups:
        here = [number for number, where in group.get("bundles_to_node_id", {}).items() if where == id]
        if not here or group["state"] == "REMOVED":
            continue
        for kind in taken:
            taken[kind] += sum(group["bundles"][number].get(kind, 0.0) for number in here)
        name = group["name"]
        model = name.removeprefix(ENGINE_NAME) if name.startswith(ENGINE_NAME) else None
        engines.append(Engine(name=name, model=model, state=group["state"].lower(), ranks=len(here)))
    return NodeStatus(
        node=id,
        name=node["NodeManagerHostname"],
        address=node["NodeManagerAddress"],
        cpus=resources.get("CPU", 0.0),
        cpus_free=max(0.0, resources.get("CPU", 0.0) - taken["CPU"]),
        gpus=resources.get("GPU", 0.0),
        gpus_free=max(0.0, resources.get("GPU", 0.0) - taken["GPU"]),
        gpu_names=tuple(label for name, label in node.get("Labels", {}).items() if name == "ray.io/accelerator-type"),
        memory_bytes=int(resources.get("memory", 0)),
        engines=tuple(engines),
    )


def status_lines(status: ClusterStatus) -> list[str]:
    """The status as lines for a terminal."""
    where = f"Ray cluster at {status.address}" if status.kind == "ray" else "this machine (no Ray cluster runs here)"
    lines = [f"{where}: {len(status.nodes)} node{'s' * (len(status.nodes) != 1)}"]
    for node in status.nodes:
        gpus = f", {node.gpus_free:g} of {node.gpus:g} GPUs free" if node.gpus else ""
        names = f" ({', '.join(sorted(set(node.gpu_names)))})" if node.gpu_names else ""
        place = f"{node.name}, {node.address}" if node.address else node.name
        lines.append(f"  {node.node[:8]} ({place}): {node.cpus_free:g} of {node.cpus:g} CPUs free{gpus}{names}")
        for engine in node.engines:
            what = f"weft {engine.model}" if engine.model is not None else engine.name or "a placement group"
            lines.append(f"    {what}: {engine.ranks} rank{'s' * (engine.ranks != 1)}, {engine.state}")
    return lines
