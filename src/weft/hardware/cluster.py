"""Cluster: nodes, the GPUs in each, and the links between them, as a user describes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Literal, NamedTuple

import msgspec

from weft.errors import ConfigError
from weft.hardware.gpus import GpuSpec, find_gpu, is_gpu_name

Link = Literal["nvlink", "pcie", "memory"]
NETWORK = "100Gb"  # per second and direction, between nodes of which nobody says it
# More is a slip of the keyboard.
MAX_GPUS = 100_000  # GPUs
MAX_BPS = 1e15  # bytes per second

# The x of a count, and not that of 7900XT or 7900XTX.
_TIMES = r"\s*[x×*](?!t\b|tx\b)\s*"
_TERM = re.compile(
    rf"\s*(?:(?P<count>[-+]?\d{{1,9}}){_TIMES})?(?P<name>[^@]*?)\s*(?:@\s*(?P<link>\S*)\s*)?",
    re.IGNORECASE | re.ASCII,  # digits are 0 to 9, and not those of another script
)
_NODES = re.compile(rf"\s*(?P<nodes>[-+]?\d{{1,9}}){_TIMES}(?P<gpus>[-+]?\d+{_TIMES}.*)", re.IGNORECASE | re.ASCII)
_RATE = re.compile(r"\s*(?P<number>[-+]?\d+(?:\.\d+)?)\s*(?P<unit>[a-z/]*)\s*", re.IGNORECASE | re.ASCII)


class Node(msgspec.Struct, frozen=True):
    """One machine. `link` is what joins any two of its GPUs; "memory" the parts of a CPU. `bridged` are groups of its
    GPUs, by their number in it, that NVLink joins where `link` is PCIe."""

    gpus: tuple[GpuSpec, ...]
    link: Link
    bridged: tuple[tuple[int, ...], ...] = ()


class GpuPosition(NamedTuple):
    """The number of a GPU's node, the link between that node's GPUs, and the bridged group that the GPU is in."""

    node: int
    link: Link
    group: int | None


class Cluster(msgspec.Struct, frozen=True, dict=True):
    """`network_Bps` is what one node sends to another, in bytes per second; `price` what one GPU costs for an hour, in
    dollars, where it is known."""

    nodes: tuple[Node, ...]
    network_Bps: float
    price: float | None = None

    @cached_property
    def gpus(self) -> tuple[GpuSpec, ...]:
        """All of them, node by node."""
        return tuple(gpu for node in self.nodes for gpu in node.gpus)

    @property
    def on_cpu(self) -> bool:
        """Whether there is no GPU, and a machine's CPU computes."""
        return self.nodes[0].gpus[0].kind == "cpu"

    @cached_property
    def gpu_positions(self) -> tuple[GpuPosition, ...]:
        """Of each GPU where it is."""
        return tuple(home for number, node in enumerate(self.nodes) for home in _homes(number, node))

    def with_gpus(self, gpus: Sequence[GpuSpec]) -> Cluster:
        """The same nodes with these GPUs in them, node by node."""
        left = iter(gpus)
        nodes = (msgspec.structs.replace(node, gpus=tuple(islice(left, len(node.gpus)))) for node in self.nodes)
        return msgspec.structs.replace(self, nodes=tuple(nodes))

    def map_gpus(self, change: Callable[[GpuSpec], GpuSpec]) -> Cluster:
        """With every GPU changed. Equal ones are one object then, by which the planner knows them."""
        made = {gpu: change(gpu) for gpu in set(self.gpus)}
        return self.with_gpus([made[gpu] for gpu in self.gpus])


def _homes(number: int, node: Node) -> Iterator[GpuPosition]:
    groups = {gpu: group for group, members in enumerate(node.bridged) for gpu in members}
    return (GpuPosition(number, node.link, groups.get(gpu)) for gpu in range(len(node.gpus)))


def parse_cluster(spec: str) -> Cluster:
    """One node, or several equal ones: `4xRTX4090` or `2x8xH100`. Raises ConfigError, saying what is wrong."""
    return parse_nodes(spec) if any(map(_NODES.fullmatch, _terms(spec))) else parse_gpus(spec)


def parse_gpus(spec: str) -> Cluster:
    """One node: `4xRTX4090`, `8xH100@nvlink`, `1xRTX4090+1xRTX3090`, `RTX4090,RTX3090`.

    Raises ConfigError, saying what is wrong.
    """
    return Cluster((_node(spec),), network_bytes(NETWORK))


def parse_nodes(spec: str, network: str | None = None) -> Cluster:
    """Several nodes: `2x8xH100`, `1x8xH100+2x4xA100`; `network` as in 400Gb or 50GB, per second and direction."""
    nodes: list[Node] = []
    for term in _terms(spec):
        match = _NODES.fullmatch(term)
        if match is None:
            raise ConfigError(f"nodes {spec!r}: {term.strip()!r} is not NODESxGPUSxNAME, as in 2x8xH100")
        count = _count(match["nodes"], spec, "nodes")
        nodes += [_node(match["gpus"])] * count
    if sum(len(node.gpus) for node in nodes) > MAX_GPUS:
        raise ConfigError(f"nodes {spec!r} are more than {MAX_GPUS:,} GPUs")
    return Cluster(tuple(nodes), network_bytes(NETWORK if network is None else network))


def network_bytes(rate: str) -> float:
    """Bytes per second of `400Gb`, `100GbE`, `25Gbit/s` (bits) or `50GB`, `50GB/s` (bytes)."""
    match = _RATE.fullmatch(rate)
    if match is None or float(match["number"]) <= 0:
        raise ConfigError(f"network {rate!r} is no speed above 0; write it as 400Gb (bits) or 50GB (bytes) per second")
    unit = re.sub(r"(ps|/s|/sec)$", "", match["unit"])
    scale = {"g": 1e9, "m": 1e6, "t": 1e12}.get(unit[:1].lower())
    if scale is None or unit[1:] not in ("b", "B", "bit", "bits", "it", "bE", "be", "BE", "byte", "bytes"):
        raise ConfigError(
            f"network {rate!r} has the unit {match['unit']!r}; write 400Gb (bits) or 50GB (bytes) per second"
        )
    in_bytes = unit[1:] in ("B", "byte", "bytes")
    Bps = float(match["number"]) * scale / (1 if in_bytes else 8)
    if Bps > MAX_BPS:
        raise ConfigError(f"network {rate[:60]!r} is more than {MAX_BPS / 1e12:.0f}TB per second")
    return Bps


def _terms(spec: str) -> list[str]:
    """The parts of 1xRTX4090+1xRTX3090; a comma is as good as a plus."""
    return re.split(r"[+,]", spec)


def _node(spec: str) -> Node:
    gpus: list[GpuSpec] = []
    wanted: set[str] = set()
    # A number may be the name of a card (4090), or a count whose card is not named.
    if (number := spec.strip()).isdecimal() and not is_gpu_name(number):
        raise ConfigError(f"GPUs {spec!r}: {number} of which GPU? As in {number}xRTX4090")
    for term in _terms(spec):
        match = _TERM.fullmatch(term)
        if match is None or not match["name"]:
            raise ConfigError(f"GPUs {spec!r}: {term.strip()!r} is not COUNTxNAME, as in 4xRTX4090 or 8xH100@nvlink")
        if _NODES.fullmatch(term):
            raise ConfigError(f"GPUs {spec!r}: {term.strip()!r} is several machines; describe those with --nodes")
        link = match["link"]
        if link is not None and link.lower() not in ("nvlink", "pcie"):
            raise ConfigError(f"GPUs {spec!r}: unknown link {link!r} after @; known: nvlink, pcie")
        wanted |= {link.lower()} if link else set()
        gpus += [find_gpu(match["name"])] * (_count(match["count"], spec, "GPUs") if match["count"] else 1)
        check_node_size(gpus, spec)
    if len(wanted) > 1:
        raise ConfigError(f"GPUs {spec!r} ask for nvlink and for pcie; a node has one of them between its GPUs")
    return Node(tuple(gpus), link_of_gpus(spec, gpus, wanted.pop() if wanted else None))


def check_node_size(gpus: Sequence[GpuSpec], spec: str) -> None:
    """Raises ConfigError for more GPUs than one machine can have."""
    most = max(gpu.per_node for gpu in gpus)
    if len(gpus) > most:
        nodes = len(gpus) // 8 if len(gpus) % 8 == 0 else 2
        raise ConfigError(
            f"GPUs {spec!r}: one machine holds at most {most}, not {len(gpus):,}; describe several with --nodes, as in "
            f"{nodes}x8x{gpus[0].name}"
        )


def default_link(gpus: Sequence[GpuSpec]) -> Link:
    """What such cards are sold with: NVLink where all are of one type that has it, without a bridge."""
    first = gpus[0]
    alike = len(gpus) > 1 and len({gpu.name for gpu in gpus}) == 1
    return "nvlink" if alike and first.nvlink_Bps > 0 and not first.bridge else "pcie"


def link_of_gpus(spec: str, gpus: Sequence[GpuSpec], wanted: str | None) -> Link:
    """What joins these GPUs, as the user says. Raises ConfigError for NVLink that cannot be."""
    # By name: what others hold of them, or what was measured of each, differs on every real machine.
    alike, first = len({gpu.name for gpu in gpus}) == 1, gpus[0]
    if wanted != "nvlink":
        return "pcie" if wanted else default_link(gpus)
    without = next((gpu for gpu in gpus if not gpu.nvlink_Bps), None)
    if without is not None:
        raise ConfigError(f"GPUs {spec!r}: {without.name} has no NVLink; use @pcie or leave it out")
    if not alike:
        raise ConfigError(f"GPUs {spec!r}: NVLink joins GPUs of one type; use @pcie or leave it out")
    if first.bridge and len(gpus) > 2:
        raise ConfigError(
            f"GPUs {spec!r}: the NVLink bridge of {first.name} joins two cards, not {len(gpus)}; use @pcie"
        )
    return "nvlink"


def _count(text: str, spec: str, what: str) -> int:
    count = int(text)
    if not 0 < count <= MAX_GPUS:
        raise ConfigError(f"{what} {spec!r}: a count of {count} is out of range; use 1 to {MAX_GPUS:,}")
    return count
