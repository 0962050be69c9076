"""Reports of traces: time by kernel, by layer and by kind of work, and all ranks on one time axis.

Traces are Chrome traces of torch's profiler, with the events that `ranks.worker.trace` adds. Times are in seconds.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

OWN = "weft"  # category of Weft's own events
KINDS = ("attention", "products", "communication", "sampling", "scheduling", "other", "idle")
PHASE_KINDS = {
    "attention": "attention",
    "products": "products",
    "output": "products",
    "feed-forward": "products",
    "sums": "communication",
    "norms": "other",
}
# The first whose pattern the name of a kernel or of an operation matches.
KERNEL_KINDS = (
    ("communication", r"nccl|all_?reduce|one_shot|two_shot|gloo|c10d"),
    ("sampling", r"^_(survey|filter|draw)|multinomial|aten::(sort|topk|softmax)$"),
    ("attention", r"^_(decode|prefill|join)|flash|fmha|BatchDecode|BatchPrefill|scaled_dot_product"),
    ("products", r"^_multiply|gemm|gemv|nvjet|cutlass|splitK|cublas|xmma|aten::(addmm|mm|bmm|linear|matmul|addmv)"),
)
MAX_ROWS = 30  # rows of the table by kernel

Event = Mapping[str, Any]


class KernelTime(msgspec.Struct, frozen=True):
    """Time of one kernel, operation or phase of the C++ stage, without the time of operations within it."""

    name: str
    calls: int
    seconds: float
    share: float


class RankTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one rank from the start of its first traced step to the end of the last.

    `shares` are the shares of KINDS, from 0 to 1. `communication_s` and `waiting_s` are the rank's exchanges by its own
    count, in which waiting for other ranks is told apart.
    """

    rank: int
    steps: int
    seconds: float
    shares: dict[str, float]
    communication_s: float | None = None
    waiting_s: float | None = None


class TraceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Content of traces: by kernel, the longest first; by layer, in order, seconds by phase; by rank."""

    kernels: list[KernelTime]
    layers: dict[int, dict[str, float]]
    ranks: list[RankTime]


def read_trace(path: str | Path) -> dict[str, Any]:
    """A trace as it was written. Raises OSError, and ValueError for another kind of file."""
    with gzip.open(path) as file:
        trace = json.load(file)
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path} is no trace")
    return trace


def merge_traces(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One trace of several: times after the earliest base, and a process for each trace.

    Traces of several machines are as far apart as their clocks.
    """
    bases = [int(trace.get("baseTimeNanoseconds", 0)) for trace in traces]
    first = min(bases, default=0)
    events: list[dict[str, Any]] = []
    for number, (trace, base) in enumerate(zip(traces, bases, strict=True)):
        for event in trace["traceEvents"]:
            moved = dict(event)
            if "ts" in moved:
                moved["ts"] = float(moved["ts"]) + (base - first) / 1000
            if isinstance(moved.get("pid"), int):
                # Two machines may have processes of one number.
                moved["pid"] = number * 10_000_000 + moved["pid"]
            events.append(moved)
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": first, "traceEvents": events}


def report_traces(traces: Sequence[dict[str, Any]]) -> TraceReport:
    """The tables of several traces together."""
    layers: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    ranks: list[RankTime] = []
    for trace in traces:
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        for name, seconds in kernel_times(events):
            kernels[name][0] += 1
            kernels[name][1] += seconds
        for layer, phase, seconds in layer_times(events):
            layers[layer][phase] += seconds
        ranks += rank_times(events)
    total = sum(seconds for _, seconds in kernels.values()) or 1.0
    rows = [KernelTime(name, int(calls), seconds, seconds / total) for name, (calls, seconds) in kernels.items()]
    return TraceReport(
        kernels=sorted(rows, key=lambda row: -row.seconds)[:MAX_ROWS],
        layers={layer: dict(layers[layer]) for layer in sorted(layers)},
        ranks=sorted(ranks, key=lambda row: row.rank),
    )


def kernel_times(events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Name and own time of each kernel; without a GPU, of each operation and phase."""
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if on_gpu:
        yield from ((event["name"], _seconds(event)) for event in on_gpu)
        return
    yield from own_times(_of_category(events, "cpu_op"))
    for event in _of_category(events, OWN):
        if event["name"] in PHASE_KINDS:
            yield f"C++: {event['name']}", _seconds(event)


def own_times(operations: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Name and time of each operation, without the time of operations within it on the same thread."""
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in operations:
        by_thread[event.get("pid"), event.get("tid")].append(event)
    for events in by_thread.values():
        open_until: list[list[Any]] = []  # end, name, own time
        for event in sorted(events, key=lambda one: (float(one["ts"]), -float(one["dur"]))):
            begin = float(event["ts"])
            while open_until and open_until[-1][0] <= begin:
                _, name, own = open_until.pop()
                yield name, own
            if open_until:
                open_until[-1][2] -= _seconds(event)
            open_until.append([begin + float(event["dur"]), event["name"], _seconds(event)])
        yield from ((name, own) for _, name, own in open_until)


def layer_times(events: Iterable[Event]) -> Iterator[tuple[int, str, float]]:
    """Layer, phase and seconds: of the C++ stage by phase, of others as "whole"."""
    events = list(events)
    category = "gpu_user_annotation" if any(one.get("cat") == "kernel" for one in events) else "user_annotation"
    for event in events:
        if event.get("cat") == OWN and "layer" in event.get("args", {}):
            yield int(event["args"]["layer"]), event["name"], _seconds(event)
        elif event.get("cat") == category and (layer := re.fullmatch(r"layer (\d+)", event["name"])):
            yield int(layer[1]), "whole", _seconds(event)


def rank_times(events: Sequence[Event]) -> Iterator[RankTime]:
    """The time of each rank that a trace has."""
    spans_of_rank: dict[int, list[Event]] = defaultdict(list)
    for event in _of_category(events, OWN):
        spans_of_rank[int(event["args"]["rank"])].append(event)
    kernels = _of_category(events, "kernel")
    # Ranks that are threads of one process have their operations together: they are told apart by phases only.
    operations = _of_category(events, "cpu_op") if len(spans_of_rank) == 1 else []
    for rank, spans in spans_of_rank.items():
        if any(span["name"] == "step" for span in spans):
            yield _rank_time(rank, spans, kernels, operations)


def _of_category(events: Iterable[Event], category: str) -> list[Event]:
    return [event for event in events if event.get("cat") == category]


def _rank_time(rank: int, spans: Sequence[Event], kernels: Sequence[Event], operations: Sequence[Event]) -> RankTime:
    """The time of a rank with these spans, which have a step at least."""
    steps = [span for span in spans if span["name"] == "step"]
    window_s = _window_s(steps)
    exchanges: Mapping[str, Any] = next((span["args"] for span in spans if span["name"] == "exchanges"), {})
    if kernels:
        seconds, busy_s = gpu_kinds(kernels, spans), union_s(kernels)
    else:
        seconds, busy_s = cpu_kinds(spans, operations, exchanges), sum(map(_seconds, steps))
    seconds["idle"] = max(0.0, window_s - busy_s)
    return RankTime(
        rank=rank,
        steps=len(steps),
        seconds=window_s,
        shares={kind: seconds.get(kind, 0.0) / window_s if window_s else 0.0 for kind in KINDS},
        communication_s=exchanges.get("communication_s"),
        waiting_s=exchanges.get("waiting_s"),
    )


def _window_s(steps: Sequence[Event]) -> float:
    """Seconds from the start of the first step to the end of the last."""
    begin = min(float(step["ts"]) for step in steps)
    end = max(float(step["ts"]) + float(step["dur"]) for step in steps)
    return end / 1e6 - begin / 1e6


def cpu_kinds(spans: Sequence[Event], operations: Sequence[Event], exchanges: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a rank on a CPU by kind, without those between steps. Communication includes the waits."""
    seconds: dict[str, float] = defaultdict(float)
    parts: dict[str, float] = defaultdict(float)
    for span in spans:
        if "layer" in span["args"]:
            seconds[PHASE_KINDS[span["name"]]] += _seconds(span)
        else:
            parts[span["name"]] += _seconds(span)
    if not seconds:  # layers that run separately: torch's operations tell
        for name, own_s in own_times(events_within(operations, spans, "layers")):
            seconds[kind_of(name)] += own_s
        seconds["communication"] += exchanges.get("communication_s", 0.0) + exchanges.get("waiting_s", 0.0)
        seconds["communication"] -= min(seconds["communication"], parts["wait for the stage before"])
    seconds["communication"] += parts["wait for the stage before"]
    seconds["sampling"] += parts["sampling"]
    inside = parts["layers"] + parts["sampling"] + parts["wait for the stage before"]
    seconds["scheduling"] = max(0.0, parts["step"] - inside)
    known = sum(seconds[kind] for kind in KINDS if kind not in ("other", "idle"))
    seconds["other"] = max(0.0, parts["step"] - known)
    return seconds


def gpu_kinds(kernels: Sequence[Event], spans: Sequence[Event]) -> dict[str, float]:
    """Seconds of a GPU by kind of kernel. Scheduling is the host's time, which may overlap with kernels."""
    seconds: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        seconds[kind_of(kernel["name"])] += _seconds(kernel)
    host: dict[str, float] = defaultdict(float)
    for span in spans:
        host[span["name"]] += _seconds(span)
    seconds["scheduling"] = max(0.0, host["step"] - host["layers"] - host["sampling"])
    return seconds


def kind_of(name: str) -> str:
    """Kind of work of a kernel or operation, by its name."""
    return next((kind for kind, pattern in KERNEL_KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def events_within(events: Iterable[Event], spans: Iterable[Event], name: str) -> list[Event]:
    """The events that begin within a span of that name."""
    times = sorted((float(one["ts"]), float(one["ts"]) + float(one["dur"])) for one in spans if one["name"] == name)
    begins = [begin for begin, _ in times]
    until = [float("-inf"), *accumulate((end for _, end in times), max)]  # the latest end of the first n spans
    return [event for event in events if float(event["ts"]) < until[bisect_right(begins, float(event["ts"]))]]


def union_s(events: Iterable[Event]) -> float:
    """Seconds in which at least one of the events ran."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted((float(one["ts"]), float(one["ts"]) + float(one["dur"])) for one in events):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1e6


def _seconds(event: Event) -> float:
    return float(event.get("dur", 0.0)) / 1e6
