"""Status of a cluster: its nodes, their devices, who runs what on them, and what is free."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from weft.engine.cluster.measured import MeasuredCluster, load_measured
from weft.engine.cluster.ray_cluster import connect, head_address
from weft.engine.executors.ray_calls import NO_CLUSTER, call_watched
from weft.engine.executors.ray_nodes import ENGINE_NAME, NODE_LABEL
from weft.errors import ConfigError
from weft.machine.hardware.host import Host, probe_host
from weft.machine.hardware.topology import link_name

log = logging.getLogger("weft.cluster")

STATUS_S = 60.0  # seconds for Ray to tell its nodes, which takes less than one if its head lives, and their links
LINKS_S = 20.0  # seconds for the nodes of Ray to report the links of their GPUs
DIRECT = "peer to peer"


class NodeUser(msgspec.Struct, frozen=True, kw_only=True):
    """A user of a node: a placement group of Ray, with the number of its bundles there, or a server of this machine.

    An engine of Weft has a model; a server has a URL, and reports no ranks.
    """

    name: str
    model: str | None
    state: str
    ranks: int | None
    url: str = ""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two GPUs of a node, or the network between two nodes.

    `kind` is as nvidia-smi topo writes it (NV18, PIX, SYS), or "network", of which the last start here has measured
    bytes per second, and seconds of a small message there and back. `peer_to_peer` is the driver's report.
    """

    first: str
    second: str
    kind: str
    peer_to_peer: bool | None = None
    bytes_per_s: float | None = None
    round_trip_s: float | None = None


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node: its devices, the devices that no placement group has, their links, and the engines on it. Memory is in
    bytes.

    `links` is None for a node that has not reported them.
    """

    node: str
    name: str
    address: str
    cpus: float
    cpus_free: float
    gpus: float
    gpus_free: float
    gpu_names: tuple[str, ...] = ()
    memory_bytes: int = 0
    links: tuple[Link, ...] | None = ()
    engines: tuple[NodeUser, ...] = ()


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster. `kind` is "ray" or "machine"; a machine alone has one node.

    `network` are the links between nodes, by their addresses, as the last start here has measured them.
    """

    kind: str
    address: str
    nodes: tuple[NodeStatus, ...]
    network: tuple[Link, ...] = ()


def cluster_status(host: Host, environment: Mapping[str, str], servers: Sequence[NodeUser] = ()) -> ClusterStatus:
    """The status of the Ray cluster at RAY_ADDRESS or on this machine; without one, of this machine alone.

    `servers` are the servers that run on this machine. Raises ConfigError for an address at which no cluster answers.
    """
    if environment.get("RAY_ADDRESS") or importlib.util.find_spec("ray"):
        try:
            return _ray_status(environment)
        except ConfigError as error:
            if environment.get("RAY_ADDRESS"):
                raise
            if error.code != NO_CLUSTER:  # Ray knows of a node here, which is dead or refuses connections
                log.warning("%s", error)
    network = tuple(network_links(load_measured()))
    return ClusterStatus(kind="machine", address="", nodes=(machine_status(host, servers),), network=network)


def machine_status(host: Host, servers: Sequence[NodeUser] = ()) -> NodeStatus:
    """The status of a machine without Ray. A GPU is free if no process holds memory on it."""
    return NodeStatus(
        links=gpu_links(host),
        engines=tuple(servers),
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
    return call_watched(lambda: _connected_status(ray), head_address(ray), STATUS_S)


def _connected_status(ray: Any) -> ClusterStatus:
    from ray.util import placement_group_table

    groups = list(placement_group_table().values())
    alive = [node for node in ray.nodes() if node["Alive"]]
    links = ray_links(ray, alive)
    nodes = [ray_node_status(node, groups, links.get(node["NodeID"])) for node in alive]
    here = {node.address for node in nodes}
    network = [link for link in network_links(load_measured()) if {link.first, link.second} <= here]
    ordered = tuple(sorted(nodes, key=lambda node: node.node))
    return ClusterStatus(kind="ray", address=head_address(ray), nodes=ordered, network=tuple(network))


def network_links(measured: MeasuredCluster | None) -> Iterator[Link]:
    """The network between the nodes of the last start, by their addresses."""
    if measured is None:
        return
    for speed in measured.speeds:
        first, second = measured.addresses[speed.first], measured.addresses[speed.second]
        if first != second:  # several nodes of Ray may be on a machine
            yield Link(
                first=first,
                second=second,
                kind="network",
                bytes_per_s=speed.bytes_per_s,
                round_trip_s=speed.round_trip_s,
            )


def gpu_links(host: Host) -> tuple[Link, ...]:
    """The links between a machine's GPUs."""
    return tuple(
        Link(first=f"cuda:{pair.first}", second=f"cuda:{pair.second}", kind=link_name(pair), peer_to_peer=pair.peer)
        for pair in host.pairs
    )


def ray_links(ray: Any, nodes: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Link, ...] | None]:
    """Links of the GPUs of each node, by its id: from a task on each that has several, None if none answers in time."""
    task, links = ray.remote(_report_links), dict[str, tuple[Link, ...] | None]()
    questions = {}
    for node in nodes:
        links[node["NodeID"]] = ()
        if node["Resources"].get("GPU", 0) > 1:
            place = {NODE_LABEL: node["NodeID"]}
            questions[node["NodeID"]] = task.options(num_cpus=0, max_retries=0, label_selector=place).remote()
    deadline = time.monotonic() + LINKS_S
    for node_id, answer in questions.items():
        try:
            reply = ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
            links[node_id] = msgspec.json.decode(reply, type=tuple[Link, ...])
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError, msgspec.DecodeError):
            links[node_id] = None
    return links


def _report_links() -> bytes:
    """The links of the GPUs of the node on which this task runs, as JSON."""
    return msgspec.json.encode(gpu_links(probe_host({})))


def ray_node_status(
    node: Mapping[str, Any], groups: list[Mapping[str, Any]], links: tuple[Link, ...] | None = ()
) -> NodeStatus:
    """The status of a node, from Ray's tables of nodes and of placement groups, and its links."""
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
        engines.append(NodeUser(name=name, model=model, state=group["state"].lower(), ranks=len(here)))
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
        links=links,
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
        lines += [f"    {line}" for line in _link_lines(node.links)]
        lines += [f"    {_engine_line(engine)}" for engine in node.engines]
    for link in status.network:
        assert link.bytes_per_s is not None and link.round_trip_s is not None
        lines.append(
            f"  network {link.first} - {link.second}, at the last start here: {8 * link.bytes_per_s / 1e9:.2f} Gb/s, "
            f"{1e6 * link.round_trip_s:.0f} us there and back"
        )
    return lines


def _link_lines(links: Sequence[Link] | None) -> Iterator[str]:
    """A line for each kind of link, with the pairs of GPUs that have it."""
    if links is None:
        yield f"links: no report within {LINKS_S:g} s; see `ray status`"
        return
    pairs: dict[str, list[str]] = {}
    for link in links:
        kind = f"{link.kind or 'unknown'}{f', {DIRECT}' if link.peer_to_peer else ''}"
        pairs.setdefault(kind, []).append(f"{link.first.removeprefix('cuda:')}-{link.second.removeprefix('cuda:')}")
    for kind, names in pairs.items():
        yield f"links of GPUs {', '.join(names)}: {kind}"


def _engine_line(engine: NodeUser) -> str:
    what = f"weft {engine.model}" if engine.model is not None else engine.name or "a placement group"
    ranks = "" if engine.ranks is None else f"{engine.ranks} rank{'s' * (engine.ranks != 1)}, "
    return f"{what}: {ranks}{engine.state}{f' at {engine.url}' if engine.url else ''}"
