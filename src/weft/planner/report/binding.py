"""Binding: the resource that limits a plan, from doubling each resource of its hardware in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from weft.formatting import format_factor
from weft.machine.hardware.cluster import Cluster
from weft.machine.hardware.gpus import GpuSpec
from weft.planner.memory.footprint import footprint
from weft.planner.note import Note, create_note
from weft.planner.profiles import engine_profile
from weft.planner.question import Objective
from weft.planner.search.ranking import Candidate, objective_value
from weft.planner.search.search import SearchResult, closest_miss
from weft.planner.speed.cost import predict

Resource = Literal["memory", "bandwidth", "compute", "links"]
RESOURCES: dict[Resource, str] = {
    "memory": "memory",
    "bandwidth": "memory bandwidth",
    "compute": "compute",
    "links": "link bandwidth",
}
# The measure of `ranking.objective_value` in words, by objective.
MEASURES: dict[Objective, str] = {
    "throughput": "throughput",
    "latency": "speed of one request",
    "cost": "tokens per dollar",
}
MIN_GAIN = 1.05  # gains below it are not worth a line


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """The resource that limits the best candidate: doubling it helps most.

    `gains` are the factors by which twice of each resource improves the objective. `resource` is None if none of them
    does. `note` says it in words.
    """

    resource: Resource | None
    gains: dict[Resource, float]
    note: Note

    @property
    def text(self) -> str:
        return str(self.note)


def binding_constraint(result: SearchResult) -> Binding:
    """The binding constraint. If nothing fits it is memory, unless something else stands against every layout."""
    best, question = result.best, result.question
    if best is None:
        miss = closest_miss(result.rejected)
        short = miss is not None and miss.short_bytes > 0
        note = create_note("nothing_fits", obstacle=result.obstacle)
        return Binding(resource="memory" if short else None, gains={}, note=note)
    gains = {resource: round(_gain(result, best, resource), 3) for resource in RESOURCES}
    most: Resource = max(RESOURCES, key=lambda resource: gains[resource])
    if gains[most] < MIN_GAIN:
        return Binding(resource=None, gains=gains, note=create_note("bound_by_engine", doubling=_describe_gains(gains)))
    doubling = _describe_gains(gains, MEASURES[question.objective])
    return Binding(resource=most, gains=gains, note=create_note(f"bound_by_{most}", doubling=doubling))


def _gain(result: SearchResult, best: Candidate, resource: Resource) -> float:
    """The factor by which twice of a resource improves the best candidate.

    At least 1: with room for more requests at once the engine may be slower in all, but the user need not let that many
    run.
    """
    question = result.question
    richer = msgspec.structs.replace(question, cluster=doubled(question.cluster, resource))
    engine = engine_profile(richer)
    memory = footprint(richer.shape, best.layout, richer.cluster, engine, richer.workload)
    predicted = predict(richer.shape, best.layout, richer.cluster, richer.workload, engine, memory)
    changed = msgspec.structs.replace(best, memory=memory, predicted=predicted)
    return max(1.0, objective_value(richer, changed) / objective_value(question, best))


def _describe_gains(gains: Mapping[Resource, float], measure: str = "speed") -> str:
    """ "Doubling: memory -> 2.1x the throughput, compute -> 1.1x", the largest gain first."""
    first, *others = sorted(gains, key=lambda resource: -gains[resource])
    following = "".join(f", {RESOURCES[resource]} -> {format_factor(gains[resource])}" for resource in others)
    return f"Doubling: {RESOURCES[first]} -> {format_factor(gains[first])} the {measure}{following}"


def doubled(cluster: Cluster, resource: Resource) -> Cluster:
    """The cluster with twice as much of one resource everywhere."""

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
    return msgspec.structs.replace(cluster.map_gpus(richer), network_Bps=network_Bps)
