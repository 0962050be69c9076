"""Clusters: nodes, their GPUs and the links between them, parsed from what a user writes (`4xRTX4090`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Literal, NamedTuple

import msgspec

from weft.errors import ConfigError
from weft.machine.hardware.gpus import GpuSpec, find_gpu, is_gpu_name
from weft.machine.hardware.links import link_table
from weft.machine.hardware.quantities import parse_rate

Link = Literal["nvlink", "pcie", "memory"]
NETWORK = "100Gb"  # per second and direction; the default between nodes
ETHERNET_BPS = 25e9 / 8  # up to here a network is Ethernet without RDMA, unless its kind is said
# Kinds of network that may follow the speed, as in 100Gb-ethernet; True if messages go through TCP.
_KINDS = {"ethernet": True, "tcp": True, "rdma": False, "roce": False, "infiniband": False, "ib": False}
MAX_GPUS = 100_000  # GPUs in all; larger counts are typing errors

# The x after a count, but not the x in 7900XT or 7900XTX.
_TIMES = r"\s*[x×*](?!t\b|tx\b)\s*"
_TERM = re.compile(
    rf"\s*(?:(?P<count>[-+]?\d{{1,9}}){_TIMES})?(?P<name>[^@]*?)\s*(?:@\s*(?P<link>\S*)\s*)?",
    re.IGNORECASE | re.ASCII,  # digits are 0 to 9, no other script's
)
# A count before the name without an x, as in 2 H100; one behind the name, as in 4090x2.
_COUNT_BEFORE = re.compile(r"(?P<count>\d{1,3})\s+(?P<name>.+)", re.ASCII)
_COUNT_BEHIND = re.compile(r"(?P<name>.+?)\s*[x×*]\s*(?P<count>\d{1,3})", re.IGNORECASE | re.ASCII)
_NODES = re.compile(rf"\s*(?P<nodes>[-+]?\d{{1,9}}){_TIMES}(?P<gpus>[-+]?\d+{_TIMES}.*)", re.IGNORECASE | re.ASCII)


class Node(msgspec.Struct, frozen=True):
    """One machine. `link` joins any two of its GPUs, "memory" the parts of a CPU. `bridged` are groups of GPUs, by
    their number in the node, that NVLink joins although `link` is PCIe."""

    gpus: tuple[GpuSpec, ...]
    link: Link
    bridged: tuple[tuple[int, ...], ...] = ()


class GpuPosition(NamedTuple):
    """Position of a GPU: its node's number, the link between that node's GPUs, and the GPU's bridged group, if any."""

    node: int
    link: Link
    group: int | None


class Cluster(msgspec.Struct, frozen=True, dict=True):
    """Nodes and their network: `network_Bps` is bytes per second from one node to another, `network_s` the time of a
    small message, one way, as measured or Ethernet's; None for RDMA's time in the table. `price` is dollars for one GPU
    and hour, None if unknown. `cpu` is the CPU of a single node with GPUs, if layers may run on it too."""

    nodes: tuple[Node, ...]
    network_Bps: float
    price: float | None = None
    cpu: GpuSpec | None = None
    network_s: float | None = None

    @cached_property
    def gpus(self) -> tuple[GpuSpec, ...]:
        """The GPUs of all nodes, node by node."""
        return tuple(gpu for node in self.nodes for gpu in node.gpus)

    @cached_property
    def devices(self) -> tuple[GpuSpec, ...]:
        """The GPUs, and behind them the CPU that may run layers, too."""
        return self.gpus if self.cpu is None else (*self.gpus, self.cpu)

    @property
    def on_cpu(self) -> bool:
        """True if the cluster is one machine without GPUs, whose CPU computes."""
        return self.nodes[0].gpus[0].kind == "cpu"

    @cached_property
    def gpu_positions(self) -> tuple[GpuPosition, ...]:
        """Position of each device, in the order of `devices`; the CPU's is behind the PCIe links of the GPUs."""
        own = tuple(position for number, node in enumerate(self.nodes) for position in _positions(number, node))
        return own if self.cpu is None else (*own, GpuPosition(0, "pcie", None))

    def with_cpu(self, cpu: GpuSpec) -> Cluster:
        """These GPUs, and the CPU of their host, behind their PCIe links. Raises ConfigError for several nodes."""
        if len(self.nodes) > 1:
            raise ConfigError(
                f"a CPU is used with GPUs on one machine only, and there are {len(self.nodes)} nodes: leave cpu out of "
                "--max-memory and --device-map, or plan for one of them",
                code="cpu-beside-several-nodes",
            )
        pcie_Bps = max(gpu.pcie_Bps for gpu in self.gpus)
        return msgspec.structs.replace(self, cpu=msgspec.structs.replace(cpu, pcie_Bps=pcie_Bps))

    def with_gpus(self, gpus: Sequence[GpuSpec]) -> Cluster:
        """The same nodes with these GPUs in them, node by node."""
        remaining = iter(gpus)
        nodes = (msgspec.structs.replace(node, gpus=tuple(islice(remaining, len(node.gpus)))) for node in self.nodes)
        return msgspec.structs.replace(self, nodes=tuple(nodes))

    def map_gpus(self, change: Callable[[GpuSpec], GpuSpec]) -> Cluster:
        """This cluster with `change` applied to every GPU. Equal GPUs stay one object; the planner relies on it."""
        changed = {gpu: change(gpu) for gpu in set(self.gpus)}
        return self.with_gpus([changed[gpu] for gpu in self.gpus])


def _positions(number: int, node: Node) -> Iterator[GpuPosition]:
    groups = {gpu: group for group, members in enumerate(node.bridged) for gpu in members}
    return (GpuPosition(number, node.link, groups.get(gpu)) for gpu in range(len(node.gpus)))


def is_several_nodes(spec: str) -> bool:
    """Return True if a description of GPUs has a number of nodes in it, as in 2x8xH100."""
    return any(map(_NODES.fullmatch, _terms(spec)))


def parse_cluster(spec: str, *, find: Callable[[str], GpuSpec] = find_gpu) -> Cluster:
    """Parse one node (`4xRTX4090`) or several (`2x8xH100`). Raises ConfigError that says what is wrong."""
    return parse_nodes(spec, find=find) if is_several_nodes(spec) else parse_gpus(spec, find=find)


def parse_gpus(spec: str, *, find: Callable[[str], GpuSpec] = find_gpu) -> Cluster:
    """Parse one node: `4xRTX4090`, `8xH100@nvlink`, `1xRTX4090+1xRTX3090`, `RTX4090,RTX3090`.

    `find` gives the card of a name. Raises ConfigError that says what is wrong.
    """
    return Cluster((_node(spec, find),), parse_rate(NETWORK, "network"))


def parse_nodes(spec: str, network: str | None = None, *, find: Callable[[str], GpuSpec] = find_gpu) -> Cluster:
    """Parse several nodes: `2x8xH100`, `1x8xH100+2x4xA100`; `network` as `parse_network` takes it.

    Raises ConfigError that says what is wrong.
    """
    nodes: list[Node] = []
    for term in _terms(spec):
        match = _NODES.fullmatch(term)
        if match is None:
            raise ConfigError(
                f"nodes {spec!r}: {term.strip()!r} is not NODESxGPUSxNAME, as in 2x8xH100", code="bad-node-spec"
            )
        count = _count(match["nodes"], spec, "nodes")
        nodes += [_node(match["gpus"], find)] * count
    if sum(len(node.gpus) for node in nodes) > MAX_GPUS:
        raise ConfigError(f"nodes {spec!r} have more than {MAX_GPUS:,} GPUs in all", code="too-many-gpus")
    network_Bps, network_s = parse_network(NETWORK if network is None else network)
    return Cluster(tuple(nodes), network_Bps, network_s=network_s)


def parse_network(text: str) -> tuple[float, float | None]:
    """Bytes per second in each direction of `400Gb`, `50GB` or `100Gb-ethernet`, and the seconds of a small message.

    The latter are None over RDMA: slow networks are Ethernet unless they end in `-rdma`, fast ones if they end in
    `-ethernet`. Raises ConfigError.
    """
    speed, dash, kind = text.partition("-")
    tcp = _KINDS.get(kind.strip().lower())
    if not speed or (dash and tcp is None):  # no kind: let the whole be refused as a speed
        speed = text
    network_Bps = parse_rate(speed, "network")
    if tcp is None:
        tcp = network_Bps <= ETHERNET_BPS
    return network_Bps, link_table().network.ethernet_us * 1e-6 if tcp else None


def _terms(spec: str) -> list[str]:
    """Terms of 1xRTX4090+1xRTX3090; a comma separates like a plus."""
    return re.split(r"[+,]", spec)


def _node(spec: str, find: Callable[[str], GpuSpec]) -> Node:
    """Parse the GPUs of one node."""
    number = spec.strip()
    # A number may be the name of a card (4090), or a count without a name.
    if number.isdecimal() and not is_gpu_name(number):
        raise ConfigError(
            f"GPUs {spec!r}: {number} is a count without the name of a GPU; write {number}xRTX4090",
            code="count-without-gpu",
        )
    gpus: list[GpuSpec] = []
    links: set[str] = set()
    for term in _terms(spec):
        count, name, link = _parse_term(term, spec)
        links |= {link} if link else set()
        gpus += [find(name)] * count
        check_node_size(gpus, spec)
    if len(links) > 1:
        raise ConfigError(
            f"GPUs {spec!r}: nvlink and pcie are both named; the GPUs of a node have one kind of link",
            code="two-kinds-of-link",
        )
    return Node(tuple(gpus), link_of_gpus(spec, gpus, links.pop() if links else None))


def _parse_term(term: str, spec: str) -> tuple[int, str, str]:
    """Count, name and link ("" if none is given) of one term, as in 8xH100@nvlink."""
    match = _TERM.fullmatch(term)
    if match is None or not match["name"]:
        raise ConfigError(
            f"GPUs {spec!r}: {term.strip()!r} is not COUNTxNAME, as in 4xRTX4090 or 8xH100@nvlink", code="bad-gpu-spec"
        )
    if _NODES.fullmatch(term):
        raise ConfigError(
            f"GPUs {spec!r}: {term.strip()!r} describes several machines; use --nodes for those",
            code="several-machines-in-gpus",
        )
    link = match["link"]
    if link is not None and link.lower() not in ("nvlink", "pcie"):
        raise ConfigError(f"GPUs {spec!r}: unknown link {link!r} after @; known: nvlink, pcie", code="unknown-link")
    name, written = _name_and_count(match["name"], match["count"])
    return _count(written, spec, "GPUs") if written else 1, name, (link or "").lower()


def _name_and_count(name: str, count: str | None) -> tuple[str, str | None]:
    """The name of a card, and its count, which may have no x, or stand behind it: 4090x2, but not in MI300X."""
    if is_gpu_name(name):
        return name, count
    written = f"{count}x{name}" if count else name
    match = _COUNT_BEHIND.fullmatch(written) or _COUNT_BEFORE.fullmatch(written)
    return (match["name"], match["count"]) if match and is_gpu_name(match["name"]) else (name, count)


def check_node_size(gpus: Sequence[GpuSpec], spec: str) -> None:
    """Raise ConfigError for more GPUs than one machine can have."""
    most = max(gpu.per_node for gpu in gpus)
    if len(gpus) > most:
        nodes = len(gpus) // 8 if len(gpus) % 8 == 0 else 2
        raise ConfigError(
            f"GPUs {spec!r}: one machine holds at most {most}, not {len(gpus):,}; describe several with --nodes, as in "
            f"{nodes}x8x{gpus[0].name}",
            code="too-many-gpus-in-machine",
        )


def default_link(gpus: Sequence[GpuSpec]) -> Link:
    """The link that such cards are sold with: NVLink if all are of one type that has NVLink without a bridge."""
    first = gpus[0]
    one_type = len(gpus) > 1 and len({gpu.name for gpu in gpus}) == 1
    return "nvlink" if one_type and first.nvlink_Bps > 0 and not first.bridge else "pcie"


def link_of_gpus(spec: str, gpus: Sequence[GpuSpec], wanted: str | None) -> Link:
    """The link between these GPUs: `wanted`, or else the default. Raises ConfigError for NVLink that is impossible."""
    if wanted != "nvlink":
        return "pcie" if wanted else default_link(gpus)
    without = next((gpu for gpu in gpus if not gpu.nvlink_Bps), None)
    if without is not None:
        raise ConfigError(
            f"GPUs {spec!r}: {without.name} has no NVLink; use @pcie or leave it out", code="gpu-without-nvlink"
        )
    # Compared by name: held memory and measured speeds differ between cards of one type.
    if len({gpu.name for gpu in gpus}) > 1:
        raise ConfigError(
            f"GPUs {spec!r}: NVLink joins GPUs of one type; use @pcie or leave it out", code="nvlink-of-mixed-gpus"
        )
    if gpus[0].bridge and len(gpus) > 2:
        raise ConfigError(
            f"GPUs {spec!r}: the NVLink bridge of {gpus[0].name} joins two cards, not {len(gpus)}; use @pcie",
            code="nvlink-bridge-of-two",
        )
    return "nvlink"


def _count(text: str, spec: str, what: str) -> int:
    count = int(text)
    if not 0 < count <= MAX_GPUS:
        raise ConfigError(
            f"{what} {spec!r}: a count of {count} is out of range; use 1 to {MAX_GPUS:,}", code="count-out-of-range"
        )
    return count
