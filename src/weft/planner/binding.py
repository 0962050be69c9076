"""Binding: what holds a plan back, found by doubling each resource of its hardware in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from weft.formatting import format_factor
from weft.hardware.cluster import Cluster
from weft.hardware.gpus import GpuSpec
from weft.planner.cost import predict
from weft.planner.footprint import footprint
from weft.planner.question import Objective
from weft.planner.ranking import worth
from weft.planner.search import Answer, closest, engine_profile

Resource = Literal["memory", "bandwidth", "compute", "links"]
RESOURCES: dict[Resource, str] = {
    "memory": "memory",
    "bandwidth": "memory bandwidth",
    "compute": "compute",
    "links": "link bandwidth",
}
WHAT: dict[Resource, str] = {
    "memory": "memory for context",
    "bandwidth": "memory bandwidth",
    "compute": "compute (FLOPS)",
    "links": "links between the GPUs",
}
# What grows with `search.worth`, in words.
MEASURES: dict[Objective, str] = {
    "throughput": "throughput",
    "latency": "speed of one request",
    "cost": "tokens per dollar",
}
WORTH = 1.05  # gains below it are not worth a line


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """What binds the best candidate: the resource of which twice as much helps most. `gains` are the factors by
    which twice of each improves what is asked for; `resource` None where none of them does."""

    resource: Resource | None
    gains: dict[Resource, float]
    text: str


def binding(answer: Answer) -> Binding:
    """The binding constraint; where nothing fits it is memory, unless something else stands against every layout."""
    best, question = answer.best, answer.question
    if best is None:
        lacking = closest(answer.rejected)
        short = lacking is not None and lacking.short_bytes > 0
        return Binding(resource="memory" if short else None, gains={}, text=answer.obstacle)
    now = worth(question, best)
    gains: dict[Resource, float] = {}
    for resource in RESOURCES:
        richer = msgspec.structs.replace(question, cluster=doubled(question.cluster, resource))
        engine = engine_profile(richer)
        memory = footprint(richer.shape, best.layout, richer.cluster, engine, richer.workload)
        predicted = predict(richer.shape, best.layout, richer.cluster, richer.workload, engine, memory)
        then = worth(richer, msgspec.structs.replace(best, memory=memory, predicted=predicted))
        gains[resource] = round(then / now, 3)
    most: Resource = max(RESOURCES, key=lambda resource: gains[resource])
    if gains[most] < WORTH:
        return Binding(resource=None, gains=gains, text=f"the engine's fixed times per step and layer. {_told(gains)}")
    measure = MEASURES[question.objective]
    return Binding(resource=most, gains=gains, text=f"{WHAT[most]}. {_told(gains, measure)}")


def _told(gains: Mapping[Resource, float], measure: str = "speed") -> str:
    """ "Doubling: memory -> 2.1x the throughput, compute -> 1.1x", the largest gain first."""
    first, *others = sorted(gains, key=lambda resource: -gains[resource])
    rest = "".join(f", {RESOURCES[it]} -> {format_factor(gains[it])}" for it in others)
    return f"Doubling: {RESOURCES[first]} -> {format_factor(gains[first])} the {measure}{rest}"


def doubled(cluster: Cluster, resource: Resource) -> Cluster:
    """With twice as much of one resource everywhere."""

    def richer(gpu: GpuSpec) -> GpuSpec:
        replace = msgspec.structs.replace
        match resource:
            case "memory":
                return replace(gpu, memory_bytes=2 * gpu.memory_bytes)
            case "bandwidth":
                return gpu.scaled(memory=2)
            case "compute":
                return gpu.scaled(compute=2)
            case "links":
                return replace(gpu, nvlink_Bps=2 * gpu.nvlink_Bps, pcie_Bps=2 * gpu.pcie_Bps)

    network_Bps = cluster.network_Bps * (2 if resource == "links" else 1)
    return msgspec.structs.replace(cluster.changed(richer), network_Bps=network_Bps)
