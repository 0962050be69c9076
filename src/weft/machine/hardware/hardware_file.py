"""Hardware files, for `--gpus FILE.yaml`: nodes, their GPUs or CPU, and the network between them.

Sizes and speeds have a unit (24GB, 79.6GiB, 3350GB/s, 400Gb), FLOPS are in 10^12 (docs/hardware.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from weft.checkpoint.files.yaml_text import dump_yaml, load_yaml
from weft.errors import ConfigError, error_reason
from weft.machine.hardware import quantities
from weft.machine.hardware.cluster import MAX_GPUS, NETWORK, Cluster, Link, Node, check_node_size, link_of_gpus
from weft.machine.hardware.cpu import TOKENS, KernelSpeed, ProductSpeed
from weft.machine.hardware.gpus import PCIE_BPS, GpuSpec, find_gpu
from weft.machine.hardware.quantities import Bytes, Capability, Rate, parse_rate, six_digits
from weft.regular_files import open_regular

SUFFIXES = (".yaml", ".yml")
MAX_FILE_BYTES = 1 << 18  # a hardware file is a page; YAML of megabytes takes minutes to read

Count = Annotated[int, Meta(ge=1, le=MAX_GPUS)]
Precision = Literal["fp32", "bf16", "fp16", "fp8", "int8", "fp4"]
Figure = Annotated[float, Meta(gt=0, le=1e9)]
Tera = dict[Precision, Figure]


class _Fields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the file's parts; an unknown field is an error."""


class _Gpus(_Fields, frozen=True, kw_only=True):
    """`count` GPUs of one type. Given figures replace the catalogue's; a type that it lacks needs all of them."""

    count: Count = 1
    name: str
    memory: Bytes | UnsetType = UNSET
    held: Bytes | UnsetType = UNSET
    bandwidth: Rate | UnsetType = UNSET
    tflops: Tera = {}
    capability: Capability | UnsetType = UNSET
    nvlink: Rate | UnsetType = UNSET
    pcie: Rate | UnsetType = UNSET
    peer_to_peer: bool | UnsetType = UNSET

    def __post_init__(self) -> None:
        with _located():
            self.spec()

    def spec(self) -> GpuSpec:
        """Describe one of these GPUs. Raises ConfigError if figures are missing or impossible."""
        _check_name(self.name)
        try:
            known = find_gpu(self.name)
        except ConfigError as error:
            known = self._unknown(str(error))
        given = {
            "memory_bytes": self.memory,
            "held_bytes": self.held,
            "bandwidth_Bps": self.bandwidth,
            "flops": {**known.flops, **_flops(self.tflops)},
            "capability": self.capability if isinstance(self.capability, UnsetType) else self.capability.pair,
            "nvlink_Bps": self.nvlink,
            "pcie_Bps": self.pcie,
            "peer": self.peer_to_peer,
        }
        spec = msgspec.structs.replace(known, **{name: value for name, value in given.items() if value is not UNSET})
        if spec.held_bytes >= spec.memory_bytes:
            raise ConfigError(
                f"held is {spec.held_bytes / 1e9:.1f} GB; it must be less than the {spec.memory_bytes / 1e9:.1f} GB of "
                f"{spec.name}",
                code="held-exceeds-memory",
            )
        return spec

    def _unknown(self, why: str) -> GpuSpec:
        if isinstance(self.memory, UnsetType) or isinstance(self.bandwidth, UnsetType):
            raise ConfigError(f"{why}; or give its memory, bandwidth and tflops here", code="incomplete-device")
        flops = _flops(self.tflops)
        if not flops.keys() & {"bf16", "fp16"}:
            raise ConfigError(
                f"{self.name} needs tflops for bf16, or for fp16 if it has no bf16", code="device-without-tflops"
            )
        return GpuSpec(
            name=self.name,
            memory_bytes=self.memory,
            bandwidth_Bps=self.bandwidth,
            flops={"fp16": flops.get("bf16", 0.0), **flops},
            nvlink_Bps=0.0,
            pcie_Bps=PCIE_BPS,
            capability=(8, 0) if "bf16" in flops else (7, 0),
            source="the user",
        )


class _Product(_Fields, frozen=True, kw_only=True):
    """A `machine.hardware.cpu.ProductSpeed`, with 10^12 operations per second."""

    bits: Annotated[int, Meta(ge=1, le=64)]
    weights: Annotated[tuple[Rate, ...], Meta(min_length=len(TOKENS), max_length=len(TOKENS))]
    tflops: Figure


class _Kernels(_Fields, frozen=True, kw_only=True):
    """A `machine.hardware.cpu.KernelSpeed`, with 10^12 operations per second."""

    products: tuple[_Product, ...]
    cache: Rate
    attention_tflops: Figure
    rows: Rate
    measured: bool = False

    def __post_init__(self) -> None:
        if 16 not in {product.bits for product in self.products}:
            raise ValueError("products need an entry of 16 bits")

    def speed(self) -> KernelSpeed:
        return KernelSpeed(
            products=tuple(
                ProductSpeed(bits=product.bits, weights_Bps=product.weights, matmul_flops=product.tflops * 1e12)
                for product in self.products
            ),
            cache_Bps=self.cache,
            attention_flops=self.attention_tflops * 1e12,
            rows_Bps=self.rows,
            source="as the hardware file says",
            measured=self.measured,
        )


class _Cpu(_Fields, frozen=True, kw_only=True):
    """The CPU of a machine, for layers that are put on it, or without GPUs for all; `memory` is the free memory."""

    name: str = "CPU"
    memory: Bytes
    bandwidth: Rate
    tflops: Annotated[Tera, Meta(min_length=1)]
    kernels: _Kernels | None = None

    def spec(self) -> GpuSpec:
        _check_name(self.name)
        flops = _flops(self.tflops)
        return GpuSpec(
            kind="cpu",
            name=self.name,
            memory_bytes=self.memory,
            bandwidth_Bps=self.bandwidth,
            flops={**dict.fromkeys(("fp32", "bf16", "fp16"), min(flops.values())), **flops},
            nvlink_Bps=0.0,
            pcie_Bps=0.0,
            capability=(0, 0),
            per_node=1,
            source="the user",
            kernels=self.kernels.speed() if self.kernels else None,
        )


class _Node(_Fields, frozen=True, kw_only=True):
    """`count` equal machines, with GPUs or a CPU, or with GPUs and a CPU that layers may run on."""

    count: Count = 1
    link: Literal["nvlink", "pcie"] | None = None
    bridged: tuple[tuple[int, ...], ...] = ()
    gpus: tuple[_Gpus, ...] = ()
    cpu: _Cpu | None = None

    def __post_init__(self) -> None:
        with _located():
            self.node()

    def node(self) -> Node:
        """Describe one of these machines. Raises ConfigError for what cannot be in one machine, or be joined."""
        if not self.cpu and not self.gpus:
            raise ConfigError("a node needs gpus, a cpu, or both", code="node-needs-gpus-or-cpu")
        if self.cpu and not self.gpus:
            return Node((self.cpu.spec(),), "memory")
        gpus = [gpu for entry in self.gpus for gpu in [entry.spec()] * entry.count]
        words = "+".join(f"{entry.count}x{entry.name}" for entry in self.gpus)
        check_node_size(gpus, words)
        link = link_of_gpus(words, gpus, self.link)
        self._check_bridges(gpus, link)
        return Node(tuple(gpus), link, tuple(tuple(sorted(group)) for group in self.bridged))

    def _check_bridges(self, gpus: Sequence[GpuSpec], link: Link) -> None:
        """Raise ConfigError for groups in `bridged` that cannot be joined by NVLink."""
        numbers = [number for group in self.bridged for number in group]
        if numbers and link != "pcie":
            raise ConfigError(
                "NVLink already joins all of these GPUs; remove bridged, or set link: pcie",
                code="bridged-beside-nvlink",
            )
        if len(set(numbers)) < len(numbers) or not set(numbers) <= set(range(len(gpus))):
            raise ConfigError(
                f"bridged: name each GPU in one group at most, by its number from 0 to {len(gpus) - 1}",
                code="bad-bridge-numbers",
            )
        for group in self.bridged:
            _check_bridge(group, gpus)


class _File(_Fields, frozen=True, kw_only=True):
    """The whole file; `network_latency_us` is the time of a small message between two nodes, one way, `price` dollars
    for one GPU and hour."""

    nodes: Annotated[tuple[_Node, ...], Meta(min_length=1)]
    network: Rate | UnsetType = UNSET
    network_latency_us: Figure | None = None
    price: Annotated[float, Meta(gt=0, le=1e6)] | None = None

    def cluster(self) -> Cluster:
        nodes = [node for entry in self.nodes for node in [entry.node()] * entry.count]
        self._check_nodes(nodes)
        network = parse_rate(NETWORK, "network") if isinstance(self.network, UnsetType) else self.network
        latency = None if self.network_latency_us is None else self.network_latency_us * 1e-6
        cluster, cpu = Cluster(tuple(nodes), network, self.price, network_s=latency), self.nodes[0].cpu
        return cluster.with_cpu(cpu.spec()) if cpu and len(nodes) == 1 and self.nodes[0].gpus else cluster

    def _check_nodes(self, nodes: Sequence[Node]) -> None:
        """Raise ConfigError for too many GPUs, or a node without GPUs among others."""
        if sum(len(node.gpus) for node in nodes) > MAX_GPUS:
            raise ConfigError(f"the nodes have more than {MAX_GPUS:,} GPUs in all", code="too-many-gpus")
        if len(nodes) > 1 and any(node.link == "memory" for node in nodes):
            raise ConfigError(
                "a machine without GPUs cannot be combined with others; describe one node only",
                code="cpu-node-among-others",
            )


# msgspec's words and a user's, replaced in this order.
PLAIN_WORDS = {
    " | null`": "`",
    "Expected": "expected",
    "Object missing": "missing",
    "`array`": "a list",
    "`object`": "fields with values",
    "`float`": "a number",
    "`int`": "a whole number",
    "`str`": "a text",
    "`bool`": "true or false",
    "`null`": "nothing",
    "`": "",
}
FIELDS = sorted({name for kind in (_Product, _Kernels, _Gpus, _Cpu, _Node, _File) for name in kind.__struct_fields__})


def _check_bridge(group: Sequence[int], gpus: Sequence[GpuSpec]) -> None:
    if len(group) < 2 or not all(gpus[number].nvlink_Bps for number in group):
        raise ConfigError(f"bridged: {list(group)} must be two or more GPUs with NVLink", code="bad-bridge-group")


def is_hardware_file(words: str) -> bool:
    """Return True if the argument of --gpus is the name of a hardware file."""
    return words.lower().endswith(SUFFIXES)


def read_hardware_file(path: str) -> Cluster:
    """Read a hardware file. Raises ConfigError of one line if it cannot be read or describes something impossible."""
    try:
        with open_regular(Path(path).expanduser()) as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} has more than {MAX_FILE_BYTES >> 10} KiB; a hardware file has at most that",
                code="hardware-file-too-large",
            )
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error_reason(error)}", code="cannot-read-hardware-file") from None
    try:
        fields = load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML: {error}", code="hardware-file-not-yaml") from None
    try:
        return msgspec.convert(fields, _File, dec_hook=quantities.parse_quantity).cluster()
    except msgspec.ValidationError as error:
        code = getattr(error.__cause__, "code", "bad-hardware-file")
        raise ConfigError(f"{path}: {_plain(str(error))}", code=code) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", code=error.code) from None


def hardware_yaml(cluster: Cluster) -> str:
    """Text of a hardware file that `read_hardware_file` reads as this cluster."""
    return dump_yaml(cluster_fields(cluster))


def cluster_fields(cluster: Cluster) -> dict[str, Any]:
    """Fields of a cluster's hardware file; figures have six digits."""
    file = _File(
        nodes=tuple(_node_entry(node, count) for node, count in _runs(cluster.nodes)),
        network=Rate(cluster.network_Bps) if len(cluster.nodes) > 1 else UNSET,
        network_latency_us=None if cluster.network_s is None else six_digits(cluster.network_s * 1e6),
        price=cluster.price,
    )
    fields: dict[str, Any] = msgspec.to_builtins(file, enc_hook=quantities.format_quantity)
    return fields


def _node_entry(node: Node, count: int) -> _Node:
    first = node.gpus[0]
    if node.link == "memory":
        memory, bandwidth = Bytes(first.memory_bytes), Rate(first.bandwidth_Bps)
        kernels, tera = _kernels_entry(first.kernels) if first.kernels else None, _tera(first)
        cpu = _Cpu(name=first.name, memory=memory, bandwidth=bandwidth, tflops=tera, kernels=kernels)
        return _Node(cpu=cpu, count=count)
    link, bridged = node.link, node.bridged
    if link == "nvlink" and first.bridge and len(node.gpus) > 2:
        link, bridged = "pcie", (tuple(range(len(node.gpus))),)  # a larger bridge than such cards are sold with
    gpus = tuple(_gpus_entry(gpu, equal) for gpu, equal in _runs(node.gpus))
    return _Node(count=count, link=link, bridged=bridged, gpus=gpus)


def _gpus_entry(gpu: GpuSpec, count: int) -> _Gpus:
    return _Gpus(
        count=count,
        name=gpu.name,
        memory=Bytes(gpu.memory_bytes),
        held=Bytes(gpu.held_bytes) if gpu.held_bytes else UNSET,
        bandwidth=Rate(gpu.bandwidth_Bps),
        tflops=_tera(gpu),
        capability=Capability(".".join(map(str, gpu.capability))),
        nvlink=Rate(gpu.nvlink_Bps) if gpu.nvlink_Bps else UNSET,
        pcie=Rate(gpu.pcie_Bps),
        peer_to_peer=UNSET if gpu.peer is None else gpu.peer,
    )


def _kernels_entry(speed: KernelSpeed) -> _Kernels:
    return _Kernels(
        products=tuple(
            _Product(
                bits=product.bits,
                weights=tuple(map(Rate, product.weights_Bps)),
                tflops=six_digits(product.matmul_flops / 1e12),
            )
            for product in speed.products
        ),
        cache=Rate(speed.cache_Bps),
        attention_tflops=six_digits(speed.attention_flops / 1e12),
        rows=Rate(speed.rows_Bps),
        measured=speed.measured,
    )


def _runs(values: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """Each value with the number of equal ones in a row."""
    return ((value, len(list(equal))) for value, equal in groupby(values))


def _flops(tera: Tera) -> dict[str, float]:
    return {precision: figure * 1e12 for precision, figure in tera.items()}


def _tera(gpu: GpuSpec) -> Any:
    return {precision: six_digits(flops / 1e12) for precision, flops in gpu.flops.items()}


def _check_name(name: str) -> None:
    """Raise ConfigError for a name that would spoil printed text."""
    if not name.strip() or not name.isprintable():
        raise ConfigError(f"{name!r} is not a name; write printable characters, as in RTX 4090", code="bad-device-name")


class _LocatedError(ValueError):
    """A ConfigError as the ValueError to which msgspec adds the place in the file."""

    def __init__(self, error: ConfigError) -> None:
        super().__init__(str(error))
        self.code = error.code


@contextmanager
def _located() -> Iterator[None]:
    """Turn ConfigError into _LocatedError."""
    try:
        yield
    except ConfigError as error:
        raise _LocatedError(error) from None


def _plain(message: str) -> str:
    """msgspec's message in a user's words: the place in the file, the problem, and the nearest known name."""
    problem, _, where = message.partition(" - at ")
    place = re.sub(r"^(`key` in )?`\$\.?|`$", "", where)
    unknown = re.search(r"unknown field `(.*)`", problem)
    if unknown:
        problem = f"unknown field {unknown[1]!r}; {_field_hint(unknown[1])}"
    elif problem.startswith("Invalid enum value"):
        known = get_args(Precision) if place.endswith("tflops") else ("nvlink", "pcie")
        problem = f"unknown {problem.removeprefix('Invalid enum value ')}; known: {', '.join(known)}"
    for word, plain in PLAIN_WORDS.items():
        problem = problem.replace(word, plain)
    return f"{place}: {problem}" if place else problem


def _field_hint(unknown: str) -> str:
    """The nearest known field, unless `unknown` is a field of another part of the file."""
    near = [] if unknown in FIELDS else get_close_matches(unknown, FIELDS, n=1)
    return f"did you mean {near[0]}?" if near else "see docs/hardware.md"
