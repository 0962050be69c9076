"""The picture of a plan, as data: nodes and their GPUs, those that hold alike folded into one where there are many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

MOST = 8  # GPUs that are drawn one by one
PARTS = ("weight", "kv", "other", "held", "free")  # of a GPU's memory, as `ranks` of the JSON has them
NAMES = {"weight": "weights", "kv": "KV", "other": "other", "held": "in use", "free": "free"}
LINKS = {"nvlink": "NVLink", "pcie": "PCIe", "memory": "shared memory", "network": "the network"}

Row = Mapping[str, Any]  # a rank, as the JSON has it


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or several that hold alike; bytes are those of each. `numbers` count within the node. `ranks` is
    empty where the plan leaves them idle."""

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
        """Which ranks they are, and which layers, heads and experts those hold."""
        if not self.ranks:
            return ["idle"]
        there = [it["rank"] for it in self.ranks]
        found = [f"rank {there[0]}" if len(there) == 1 else f"ranks {numbers(there)}"]
        found.append(spans(self.ranks, "layer", "first_layer", "layers"))
        found.append(spans(self.ranks, "head", "first_q_head", "q_heads"))
        if any(row["kv_heads"] != row["q_heads"] for row in self.ranks):
            found.append(spans(self.ranks, "KV head", "first_kv_head", "kv_heads"))
        if self.ranks[0]["experts"]:
            found.append(spans(self.ranks, "expert", "first_expert", "experts"))
        return found


class Rack(msgspec.Struct, frozen=True, kw_only=True):
    """One node, or several whose GPUs hold alike. `link_Bps` is None where a node has a single GPU; `alone` where
    there is no other node."""

    nodes: tuple[int, ...]
    alone: bool
    bridged: tuple[tuple[int, ...], ...]
    link: str
    link_Bps: float | None
    bars: tuple[Bar, ...]

    @property
    def title(self) -> str:
        """ "nodes 0-3, 4 alike: 8 GPUs joined by NVLink, 450 GB/s each way"; empty for a GPU that is all there is."""
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


def picture(told: Mapping[str, Any]) -> list[Rack]:
    """Every node of a plan that fits, as `planner.plan_json.plan_json` tells it."""
    held: dict[int, list[Row]] = defaultdict(list)
    for row in told["best"]["ranks"]:
        held[row["gpu_index"]].append(row)
    hardware, racks = told["hardware"], []
    fold, first = hardware["gpus"] > MOST, 0
    for number, node in enumerate(hardware["nodes"]):
        bars = [_bar(at, name, hardware["types"][name], held[first + at]) for at, name in enumerate(node["gpus"])]
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
    return _folded_racks(racks) if fold else racks


def parts_of(racks: Sequence[Rack]) -> list[str]:
    """Those of PARTS that there are; others' memory is in use on machines that are here, at most."""
    held = any(bar.parts["held"] for rack in racks for bar in rack.bars)
    return [part for part in PARTS if part != "held" or held]


def _bar(number: int, gpu: str, spec: Mapping[str, Any], rows: Sequence[Row]) -> Bar:
    parts = {part: sum(row[f"{part}_bytes"] for row in rows) for part in PARTS}
    memory_bytes = rows[0]["memory_bytes"] if rows else spec["memory_bytes"]
    parts["free"] = memory_bytes - sum(parts[part] for part in PARTS[:-1])
    return Bar(numbers=(number,), kind=spec["kind"], gpu=gpu, memory_bytes=memory_bytes, parts=parts, ranks=tuple(rows))


def _key(bar: Bar) -> tuple[object, ...]:
    """Equal for GPUs that hold as much of everything, whichever part of the model that is."""
    counts = [tuple(row[name] for name in ("layers", "q_heads", "kv_heads", "experts")) for row in bar.ranks]
    return bar.gpu, bar.memory_bytes, tuple(bar.parts.values()), tuple(counts)


def _together(bars: Sequence[Bar], numbers: Iterable[int]) -> Bar:
    ranks = tuple(row for bar in bars for row in bar.ranks)
    return msgspec.structs.replace(bars[0], numbers=tuple(numbers), ranks=ranks)


def _folded_bars(bars: Sequence[Bar]) -> list[Bar]:
    found: dict[object, list[Bar]] = defaultdict(list)
    for bar in bars:
        found[_key(bar)].append(bar)
    return [_together(alike, (number for bar in alike for number in bar.numbers)) for alike in found.values()]


def _folded_racks(racks: Sequence[Rack]) -> list[Rack]:
    found: dict[object, list[Rack]] = defaultdict(list)
    for rack in racks:
        found[rack.link, rack.link_Bps, rack.bridged, tuple((bar.numbers, _key(bar)) for bar in rack.bars)].append(rack)
    return [
        msgspec.structs.replace(
            alike[0],
            nodes=tuple(rack.nodes[0] for rack in alike),
            bars=tuple(_together(bars, bars[0].numbers) for bars in zip(*(rack.bars for rack in alike), strict=True)),
        )
        for alike in found.values()
    ]


def numbers(given: Sequence[int]) -> str:
    """ "3", "0-7", "0-3, 8-11"; only the first and the last where there are more gaps than that."""
    runs: list[list[int]] = []
    for number in sorted(given):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = [f"{low}-{high}" if high > low else f"{low}" for low, high in runs]
    return ", ".join(told) if len(told) < 4 else f"{told[0]} to {told[-1]}"


def spans(rows: Sequence[Row], noun: str, first: str, count: str) -> str:
    """ "layers 0-79"; "heads 8-63, 8 each" where the ranks have different ones; "layers 0-2, 4-15" where one GPU has
    both."""
    each = rows[0][count]
    if len({row["gpu_index"] for row in rows}) < len(rows):
        return f"{noun}s {numbers(sorted({at for row in rows for at in range(row[first], row[first] + row[count])}))}"
    low, high = min(row[first] for row in rows), max(row[first] + row[count] for row in rows)
    told = f"{noun} {low}" if high - low == 1 else f"{noun}s {low}-{high - 1}"
    return told if high - low == each else f"{told}, {each} each"
