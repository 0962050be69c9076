"""Wishes: what the flags of weft plan fix of a layout, by itself and all of them together."""

from __future__ import annotations

from math import prod
from typing import Any

from weft.architectures.model import Model
from weft.cli.parser import UsageError
from weft.errors import ConfigError, PlanError
from weft.hardware.cluster import Cluster
from weft.plan import device_map, max_memory, placement
from weft.plan.rules import check_layout
from weft.planner.domains import usable_devices
from weft.planner.question import LayoutConstraints


def ranks(said: dict[str, Any]) -> int:
    """How many ranks the flags ask for, as far as they do."""
    splits = {kind: len(said.get(f"{kind}_split") or ()) for kind in ("tensor", "pipeline")}
    return prod(said.get(f"{kind}_parallel_size") or splits.get(kind) or 1 for kind in ("tensor", "pipeline", "data"))


def capped(said: dict[str, Any], cluster: Cluster) -> Cluster:
    """The cluster with what --max-memory leaves of it. Raises ConfigError for a device that is not there."""
    caps = said.get("max_memory")
    return cluster if caps is None else max_memory.cap_cluster(cluster, max_memory.parse_max_memory(caps))


def remarks(said: dict[str, Any], cluster: Cluster) -> tuple[str, ...]:
    """What is not as the flags may have meant it."""
    names = [name for name in said.get("max_memory") or {} if name in ("cpu", "disk")]
    if not names or cluster.on_cpu:
        return ()
    return (
        f"--max-memory {names[0]}={said['max_memory'][names[0]]}: nothing is put there, for all layers run on GPUs",
    )


def wished(said: dict[str, Any], cluster: Cluster, model: Model, precision: str) -> LayoutConstraints:
    """What the flags fix of the layout. Raises UsageError where they contradict each other or the hardware, and
    ConfigError for a device map that is no pipeline of the model; `precision` is what that weighs it in."""
    if said.get("device_map") is not None:
        return mapped(said, cluster, model, precision)
    replicas, weights, layers = (said.get(name) for name in ("data_parallel_size", "tensor_split", "pipeline_split"))
    try:
        tensor, stages = check_layout(
            model.shape,
            tensor_parallel_size=said.get("tensor_parallel_size"),
            tensor_split=weights,
            pipeline_parallel_size=said.get("pipeline_parallel_size"),
            pipeline_split=layers,
        )
    except (ConfigError, PlanError) as error:
        raise UsageError(str(error)) from None
    needed, there = (tensor or 1) * (stages or 1) * (replicas or 1), len(usable_devices(cluster))
    if needed > there:
        sizes = [str(size) for size in (tensor, stages, replicas) if size and size > 1]
        product = f"{' x '.join(sizes)} = {needed}" if len(sizes) > 1 else str(needed)
        has = "the hardware has" if there == len(cluster.gpus) else "--max-memory leaves"
        raise UsageError(f"{product} ranks need as many GPUs; {has} {there}")
    experts = said.get("enable_expert_parallel")
    if experts and model.shape.experts is None:
        raise UsageError(f"--enable-expert-parallel: {model.name} has no experts")
    if experts is None and (tensor or stages or replicas):
        experts = False  # who gives the sizes, gives all of the layout
    return LayoutConstraints(
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        data_parallel=replicas,
        expert_parallel=experts,
        tensor_split=weights,
        pipeline_split=layers,
    )


def mapped(said: dict[str, Any], cluster: Cluster, model: Model, precision: str) -> LayoutConstraints:
    """What --device-map comes to."""
    given = said["device_map"]
    placement.check_flags(given, said)
    word = placement.spread_word(given)
    if word:
        return LayoutConstraints(tensor_parallel=1, data_parallel=1, expert_parallel=False, device_map_strategy=word)
    gpus = {number: gpu for number, gpu in enumerate(cluster.gpus) if gpu.kind == "gpu"}
    room = device_map.AvailableDevices(
        gpus=[number for number, gpu in gpus.items() if gpu.limit_bytes != 0],
        left_out=[number for number, gpu in gpus.items() if gpu.limit_bytes == 0],
        nbytes=lambda unit: placement.unit_bytes(model.shape, precision, unit),
        fetch_Bps=max((gpu.pcie_Bps for gpu in gpus.values()), default=None),
    )
    stages = device_map.map_to_stages(model.shape, placement.module_devices(given), room)
    if gpus and "cpu" in stages.devices:
        raise UsageError(
            f"--device-map puts the whole model on cpu; the plan is for {len(gpus)} GPU{'s' * (len(gpus) > 1)}: leave "
            "it out, or plan on a machine without"
        )
    placement.check_stages(stages, said)
    return LayoutConstraints(
        tensor_parallel=1,
        pipeline_parallel=len(stages.layers),
        data_parallel=1,
        expert_parallel=False,
        pipeline_split=stages.layers,
        # Without GPUs the CPU is the cluster's only device.
        devices=tuple(it if isinstance(it, int) else 0 for it in stages.devices),
    )
