"""Hardware as a YAML file describes it, for `--gpus FILE.yaml`: nodes, what is in each, and the network between them.

Sizes and speeds have their unit (24GB, 79.6GiB, 3350GB/s, 400Gb), FLOPS are in 10^12 (docs/hardware.md).
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

from weft.errors import ConfigError, error_reason
from weft.formats.yaml_text import dump, load
from weft.hardware import quantities
from weft.hardware.cluster import MOST, NETWORK, Cluster, Node, check_size, joined, network_bytes
from weft.hardware.cpu import TOKENS, KernelSpeed, ProductSpeed
from weft.hardware.gpus import PCIE_BPS, GpuSpec, find_gpu
from weft.hardware.quantities import Bytes, Capability, Rate, digits

SUFFIXES = (".yaml", ".yml")
MOST_FILE_BYTES = 1 << 18  # a description is a page at most; YAML of megabytes takes minutes to read

Count = Annotated[int, Meta(ge=1, le=MOST)]
Precision = Literal["fp32", "bf16", "fp16", "fp8", "int8", "fp4"]
Figure = Annotated[float, Meta(gt=0, le=1e9)]
Tera = dict[Precision, Figure]


class _Fields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is not known here is a mistake."""


class _Gpus(_Fields, frozen=True, kw_only=True):
    """`count` GPUs of a type of the catalogue, those figures changed that are given; of another one they all are."""

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
        """Raises ConfigError where the figures are not enough, or cannot be."""
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
        spec = msgspec.structs.replace(known, **{name: it for name, it in given.items() if it is not UNSET})
        if spec.held_bytes >= spec.memory_bytes:
            raise ConfigError(f"others hold all of the {spec.memory_bytes / 1e9:.1f} GB of {spec.name}")
        return spec

    def _unknown(self, why: str) -> GpuSpec:
        if isinstance(self.memory, UnsetType) or isinstance(self.bandwidth, UnsetType):
            raise ConfigError(f"{why}; or give its memory, bandwidth and tflops")
        flops = _flops(self.tflops)
        if not flops.keys() & {"bf16", "fp16"}:
            raise ConfigError(f"{self.name} needs tflops of bf16, or of fp16 where it has no bf16")
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
    """As hardware.cpu.ProductSpeed."""

    bits: Annotated[int, Meta(ge=1, le=64)]
    weights: Annotated[tuple[Rate, ...], Meta(min_length=len(TOKENS), max_length=len(TOKENS))]
    tflops: Figure


class _Kernels(_Fields, frozen=True, kw_only=True):
    """As hardware.cpu.KernelSpeed."""

    products: tuple[_Product, ...]
    cache: Rate
    attention_tflops: Figure
    rows: Rate
    measured: bool = False

    def __post_init__(self) -> None:
        if 16 not in {it.bits for it in self.products}:
            raise ValueError("products need an entry of 16 bits")

    def speed(self) -> KernelSpeed:
        return KernelSpeed(
            products=tuple(
                ProductSpeed(bits=it.bits, weights_Bps=it.weights, matmul_flops=it.tflops * 1e12)
                for it in self.products
            ),
            cache_Bps=self.cache,
            attention_flops=self.attention_tflops * 1e12,
            rows_Bps=self.rows,
            source="as the hardware file says",
            measured=self.measured,
        )


class _Cpu(_Fields, frozen=True, kw_only=True):
    """The CPU of a machine without GPUs; `memory` is what is free of it."""

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
    """`count` equal machines."""

    count: Count = 1
    link: Literal["nvlink", "pcie"] | None = None
    bridged: tuple[tuple[int, ...], ...] = ()
    gpus: tuple[_Gpus, ...] = ()
    cpu: _Cpu | None = None

    def __post_init__(self) -> None:
        with _located():
            self.node()

    def node(self) -> Node:
        """Raises ConfigError for what cannot be in one machine, or cannot be joined."""
        if bool(self.cpu) == bool(self.gpus):
            raise ConfigError("a node has either gpus or a cpu")
        if self.cpu:
            return Node((self.cpu.spec(),), "memory")
        gpus = [gpu for entry in self.gpus for gpu in [entry.spec()] * entry.count]
        told = "+".join(f"{entry.count}x{entry.name}" for entry in self.gpus)
        check_size(gpus, told)
        link = joined(told, gpus, self.link)
        numbers = sorted(number for group in self.bridged for number in group)
        if numbers and link != "pcie":
            raise ConfigError("NVLink joins all of these GPUs already; leave bridged out, or say link: pcie")
        if len(set(numbers)) < len(numbers) or (numbers and not 0 <= numbers[0] <= numbers[-1] < len(gpus)):
            raise ConfigError(f"bridged: a GPU is in one group at most, by its number from 0 to {len(gpus) - 1}")
        for group in self.bridged:
            if len(group) < 2 or not all(gpus[number].nvlink_Bps for number in group):
                raise ConfigError(f"bridged: {list(group)} are not two or more GPUs that have NVLink")
        return Node(tuple(gpus), link, tuple(tuple(sorted(group)) for group in self.bridged))


class _File(_Fields, frozen=True, kw_only=True):
    """The whole file. `price` is dollars for one GPU and hour."""

    nodes: Annotated[tuple[_Node, ...], Meta(min_length=1)]
    network: Rate | UnsetType = UNSET
    price: Annotated[float, Meta(gt=0, le=1e6)] | None = None

    def cluster(self) -> Cluster:
        nodes = [node for entry in self.nodes for node in [entry.node()] * entry.count]
        if sum(len(node.gpus) for node in nodes) > MOST:
            raise ConfigError(f"they are more than {MOST:,} GPUs")
        if len(nodes) > 1 and any(node.link == "memory" for node in nodes):
            raise ConfigError("machines without GPUs work alone; describe one of them")
        network = network_bytes(NETWORK) if isinstance(self.network, UnsetType) else self.network
        return Cluster(tuple(nodes), network, self.price)


WORDS = {
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


def is_file(words: str) -> bool:
    """Whether what was said for --gpus is the name of such a file."""
    return words.lower().endswith(SUFFIXES)


def read(path: str) -> Cluster:
    """Raises ConfigError, in one line, for a file that cannot be read or says what cannot be."""
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
        if len(content) > MOST_FILE_BYTES:
            raise ConfigError(f"{path} has more than {MOST_FILE_BYTES >> 10} KiB: that is no description of hardware")
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error_reason(error)}") from None
    try:
        told = load(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    try:
        return msgspec.convert(told, _File, dec_hook=quantities.read).cluster()
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_plain(str(error))}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def write(cluster: Cluster) -> str:
    """The file of which `read` makes such a cluster."""
    return dump(as_told(cluster))


def as_told(cluster: Cluster) -> dict[str, Any]:
    """What such a file says; figures have six digits."""
    file = _File(
        nodes=tuple(_written(node, count) for node, count in _runs(cluster.nodes)),
        network=Rate(cluster.network_Bps) if len(cluster.nodes) > 1 else UNSET,
        price=cluster.price,
    )
    told: dict[str, Any] = msgspec.to_builtins(file, enc_hook=quantities.write)
    return told


def _written(node: Node, count: int) -> _Node:
    first = node.gpus[0]
    if node.link == "memory":
        memory, bandwidth = Bytes(first.memory_bytes), Rate(first.bandwidth_Bps)
        own, tera = _kernels(first.kernels) if first.kernels else None, _tera(first)
        cpu = _Cpu(name=first.name, memory=memory, bandwidth=bandwidth, tflops=tera, kernels=own)
        return _Node(cpu=cpu, count=count)
    link, bridged = node.link, node.bridged
    if link == "nvlink" and first.bridge and len(node.gpus) > 2:
        link, bridged = "pcie", (tuple(range(len(node.gpus))),)  # a larger bridge than such cards are sold with
    gpus = tuple(
        _Gpus(
            count=alike,
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
        for gpu, alike in _runs(node.gpus)
    )
    return _Node(count=count, link=link, bridged=bridged, gpus=gpus)


def _kernels(speed: KernelSpeed) -> _Kernels:
    return _Kernels(
        products=tuple(
            _Product(bits=it.bits, weights=tuple(map(Rate, it.weights_Bps)), tflops=digits(it.matmul_flops / 1e12))
            for it in speed.products
        ),
        cache=Rate(speed.cache_Bps),
        attention_tflops=digits(speed.attention_flops / 1e12),
        rows=Rate(speed.rows_Bps),
        measured=speed.measured,
    )


def _runs(values: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    return ((value, len(list(equal))) for value, equal in groupby(values))


def _flops(tera: Tera) -> dict[str, float]:
    return {precision: figure * 1e12 for precision, figure in tera.items()}


def _tera(gpu: GpuSpec) -> Any:
    return {precision: digits(flops / 1e12) for precision, flops in gpu.flops.items()}


def _check_name(name: str) -> None:
    """Raises ConfigError for one that would spoil what is printed."""
    if not name.strip() or not name.isprintable():
        raise ConfigError(f"{name!r} is no name; write letters and figures, as in RTX 4090")


@contextmanager
def _located() -> Iterator[None]:
    """What goes wrong inside is a ValueError, to which msgspec adds the place in the file."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _plain(message: str) -> str:
    """msgspec's words as a user's, the place before them, and what there is in place of what there is not."""
    what, _, where = message.partition(" - at ")
    place = re.sub(r"^(`key` in )?`\$\.?|`$", "", where)
    unknown = re.search(r"unknown field `(.*)`", what)
    if unknown:
        near = get_close_matches(unknown[1], FIELDS, n=1)
        # One that is known belongs to something else in the file.
        near = near if unknown[1] not in FIELDS else []
        what = f"unknown field {unknown[1]!r}; " + (f"did you mean {near[0]}?" if near else "see docs/hardware.md")
    elif what.startswith("Invalid enum value"):
        known = get_args(Precision) if place.endswith("tflops") else ("nvlink", "pcie")
        what = f"unknown {what.removeprefix('Invalid enum value ')}; known: {', '.join(known)}"
    for word, plain in WORDS.items():
        what = what.replace(word, plain)
    return f"{place}: {what}" if place else what
