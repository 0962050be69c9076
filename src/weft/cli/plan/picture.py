"""The picture of a plan as data: nodes and their GPUs. If there are many, equal ones are folded into one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

MAX_DRAWN_GPUS = 8  # GPUs drawn separately; more are folded
PARTS = ("weight", "kv", "other", "held", "free")  # parts of a GPU's memory, as `ranks` of the JSON names them
NAMES = {"weight": "weights", "kv": "KV", "other": "other", "held": "in use", "free": "free"}
LINKS = {"nvlink": "NVLink", "pcie": "PCIe", "memory": "shared memory", "network": "the network"}

Row = Mapping[str, Any]  # a rank in the JSON


class GpuBar(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or several with equal parts; bytes are per GPU.

    `numbers` count within the node. `ranks` is empty if the plan leaves the GPUs idle.
    """

    numbers: tuple[int, ...]
    kind: str
    gpu: str
    memory_bytes: int
    parts: dict[str, int]
    ranks: tuple[Row, ...]

    @property
    def title(self) -> str:
        """ "GPU 0 H100-SXM"; a CPU by its name alone."""
        if self.kind == "cpu":
            return self.gpu
        return f"GPU{'s' * (len(self.numbers) > 1)} {numbers(self.numbers)} {self.gpu}"

    @property
    def holds(self) -> list[str]:
        """The ranks, and their layers, heads and experts."""
        if not self.ranks:
            return ["idle"]
        ranks = [row["rank"] for row in self.ranks]
        parts = [f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {numbers(ranks)}"]
        parts.append(spans(self.ranks, "layer", "first_layer", "layers"))
        parts.append(spans(self.ranks, "head", "first_q_head", "q_heads"))
        if any(row["kv_heads"] != row["q_heads"] for row in self.ranks):
            parts.append(spans(self.ranks, "KV head", "first_kv_head", "kv_heads"))
        if self.ranks[0]["experts"]:
            parts.append(spans(self.ranks, "expert", "first_expert", "experts"))
        return parts


class Rack(msgspec.Struct, frozen=True, kw_only=True):
    """One node, or several whose GPUs have equal parts.

    `link_Bps` is None if a node has a single GPU. `alone` is True if there is no other node.
    """

    nodes: tuple[int, ...]
    alone: bool
    bridged: tuple[tuple[int, ...], ...]
    link: str
    link_Bps: float | None
    bars: tuple[GpuBar, ...]

    @property
    def title(self) -> str:
        """ "nodes 0-3, 4 alike: 8 GPUs joined by NVLink, 450 GB/s each way"; empty for a single GPU."""
        count = sum(len(bar.numbers) for bar in self.bars)
        gpus = f"{count} {'ranks' if self.bars[0].kind == 'cpu' else 'GPUs'}" if count > 1 else "1 GPU"
        if self.link_Bps:
            gpus += f" joined by {LINKS[self.link]}, {self.link_Bps / 1e9:,.0f} GB/s each way"
        if self.bridged:
            gpus += f"; NVLink joins {' and '.join(numbers(group) for group in self.bridged)}"
        if self.alone:
            return gpus if count > 1 else ""
        if len(self.nodes) == 1:
            return f"node {self.nodes[0]}: {gpus}"
        return f"nodes {numbers(self.nodes)}, {len(self.nodes):,} alike: {gpus}"


def picture(plan: Mapping[str, Any]) -> list[Rack]:
    """Every node of a plan that fits; `plan` is the JSON of `planner.report.plan_json.plan_json`."""
    ranks: dict[int, list[Row]] = defaultdict(list)
    for row in plan["best"]["ranks"]:
        ranks[row["gpu_index"]].append(row)
    hardware, racks = plan["hardware"], []
    fold, first = hardware["gpus"] > MAX_DRAWN_GPUS, 0
    for number, node in enumerate(hardware["nodes"]):
        bars = [_bar(at, name, hardware["types"][name], ranks[first + at]) for at, name in enumerate(node["gpus"])]
        first += len(bars)
        racks.append(
            Rack(
                nodes=(number,),
                alone=len(hardware["nodes"]) == 1,
                bridged=tuple(map(tuple, node["bridged"])),
                link=node["link"],
                link_Bps=node["link_Bps"],
                bars=tuple(_folded_bars(bars) if fold else bars),
            )
        )
    racks = _folded_racks(racks) if fold else racks
    on_cpu = ranks[hardware["gpus"]]
    if on_cpu:  # on the CPU, which comes behind the GPUs
        name = on_cpu[0]["gpu"]
        bar = _bar(0, name, hardware["types"][name], on_cpu)
        racks.append(Rack(nodes=(0,), alone=True, bridged=(), link="pcie", link_Bps=None, bars=(bar,)))
    return racks


def parts_of(racks: Sequence[Rack]) -> list[str]:
    """The PARTS to draw: memory in use by other processes only if there is some."""
    held = any(bar.parts["held"] for rack in racks for bar in rack.bars)
    return [part for part in PARTS if part != "held" or held]


def _bar(number: int, gpu: str, spec: Mapping[str, Any], rows: Sequence[Row]) -> GpuBar:
    parts = {part: sum(row[f"{part}_bytes"] for row in rows) for part in PARTS}
    memory_bytes = rows[0]["memory_bytes"] if rows else spec["memory_bytes"]
    parts["free"] = memory_bytes - sum(parts[part] for part in PARTS[:-1])
    return GpuBar(
        numbers=(number,), kind=spec["kind"], gpu=gpu, memory_bytes=memory_bytes, parts=parts, ranks=tuple(rows)
    )


def _key(bar: GpuBar) -> tuple[object, ...]:
    """A key that is equal for GPUs with equally large parts, whichever layers and heads they are."""
    counts = [tuple(row[name] for name in ("layers", "q_heads", "kv_heads", "experts")) for row in bar.ranks]
    return bar.gpu, bar.memory_bytes, tuple(bar.parts.values()), tuple(counts)


def _merged(bars: Sequence[GpuBar], numbers: Iterable[int]) -> GpuBar:
    ranks = tuple(row for bar in bars for row in bar.ranks)
    return msgspec.structs.replace(bars[0], numbers=tuple(numbers), ranks=ranks)


def _folded_bars(bars: Sequence[GpuBar]) -> list[GpuBar]:
    groups: dict[object, list[GpuBar]] = defaultdict(list)
    for bar in bars:
        groups[_key(bar)].append(bar)
    return [_merged(alike, (number for bar in alike for number in bar.numbers)) for alike in groups.values()]


def _folded_racks(racks: Sequence[Rack]) -> list[Rack]:
    groups: dict[object, list[Rack]] = defaultdict(list)
    for rack in racks:
        bars = tuple((bar.numbers, _key(bar)) for bar in rack.bars)
        groups[rack.link, rack.link_Bps, rack.bridged, bars].append(rack)
    return [_merged_racks(alike) for alike in groups.values()]


def _merged_racks(alike: Sequence[Rack]) -> Rack:
    """One rack for several with equal bars."""
    merged = [_merged(bars, bars[0].numbers) for bars in zip(*(rack.bars for rack in alike), strict=True)]
    return msgspec.structs.replace(alike[0], nodes=tuple(rack.nodes[0] for rack in alike), bars=tuple(merged))


def numbers(given: Sequence[int]) -> str:
    """ "3", "0-7", "0-3, 8-11"; with more than three ranges only the first and the last, "0-3 to 24-27"."""
    runs: list[list[int]] = []
    for number in sorted(given):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    ranges = [f"{low}-{high}" if high > low else f"{low}" for low, high in runs]
    return ", ".join(ranges) if len(ranges) < 4 else f"{ranges[0]} to {ranges[-1]}"


def spans(rows: Sequence[Row], noun: str, first: str, count: str) -> str:
    """The indices of some ranks: "layers 0-79", or "heads 8-63, 8 each" if the ranks have different ones.

    If several of the ranks share a GPU, "layers 0-2, 4-15" has all of theirs.
    """
    each = rows[0][count]
    if len({row["gpu_index"] for row in rows}) < len(rows):
        indices = {index for row in rows for index in range(row[first], row[first] + row[count])}
        return f"{noun}s {numbers(sorted(indices))}"
    low, high = min(row[first] for row in rows), max(row[first] + row[count] for row in rows)
    text = f"{noun} {low}" if high - low == 1 else f"{noun}s {low}-{high - 1}"
    return text if high - low == each else f"{text}, {each} each"
