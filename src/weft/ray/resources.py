"""Resources of a Ray actor that holds a whole engine, with its ranks as processes below it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.config import EngineConfig
from weft.engine.cluster.ray_cluster import sized_ranks
from weft.errors import ConfigError, PlanError
from weft.formatting import extra_hint


def import_library(name: str) -> Any:
    """Ray's library of this name. Raises ConfigError if it, or what it needs, is not installed."""
    from importlib import import_module

    try:
        return import_module(f"ray.{name}")
    except ImportError as error:
        raise ConfigError(
            f"Ray {name.capitalize()} is not installed ({error}): {extra_hint(f'ray-{name}')}", code=f"no-ray-{name}"
        ) from None


def actor_config(config: EngineConfig) -> EngineConfig:
    """The config of one engine in an actor. Its ranks are processes, unless it asks for Ray's actors itself.

    Raises ConfigError for a token: Ray keeps the arguments of actors, and its dashboard shows them.
    """
    if config.hf_token:
        raise ConfigError(
            "hf_token would be kept in the Ray cluster's state; set HF_TOKEN in the environment of its nodes",
            code="token-in-cluster",
        )
    executor = "processes" if config.executor is None else config.executor
    coupled = config.data_parallel_size if config.enable_expert_parallel else None
    return replace(config, executor=executor, data_parallel_size=coupled)


def actor_resources(config: EngineConfig, gpus: float) -> dict[str, float]:
    """Options of an actor with an engine: a GPU, or in a cluster without `gpus` a CPU, for each rank.

    An engine whose ranks are actors themselves needs none. Sizes that are left out count as 1: the planner sees only
    the GPUs of the actor.
    """
    if config.executor == "ray":
        return {"num_cpus": 0, "num_gpus": 0}
    ranks = sized_ranks(config)
    return {"num_cpus": ranks, "num_gpus": 0} if on_cpus(config, gpus) else {"num_cpus": 1, "num_gpus": ranks}


def on_cpus(config: EngineConfig, gpus: float) -> bool:
    """Return True if the ranks run on CPUs, in a cluster with `gpus` GPUs."""
    return config.device == "cpu" or not gpus


def count_engines(ray: Any, config: EngineConfig, resources: dict[str, float], wanted: int | None) -> int:
    """Number of engines in a cluster: `wanted`, or as many as there is room for, on CPUs one for each node.

    Raises PlanError if the cluster has no room for them: they would wait until the start times out.
    """
    if config.executor == "ray":
        room = default = check_seats(ray, config)
    else:
        room = default = check_room(ray, resources)
        if not resources["num_gpus"]:
            cpus = resources["num_cpus"]
            default = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= cpus for node in ray.nodes())
    if wanted and wanted > room:
        raise PlanError(
            f"{wanted} engines are wanted, and the Ray cluster has room for {room}; lower --data-parallel-size, or "
            "start Ray on more machines",
            code="ray-too-small",
        )
    return wanted or default


def check_seats(ray: Any, config: EngineConfig) -> int:
    """Number of engines over any nodes, whose ranks are actors. Raises PlanError if there is room for none."""
    ranks = sized_ranks(config)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kinds = ("CPU",) if on_cpus(config, sum(node.get("GPU", 0) for node in nodes)) else ("CPU", "GPU")
    seats = sum(int(min(node.get(kind, 0) for kind in kinds)) for node in nodes)
    if seats < ranks:
        present = describe({kind: sum(node.get(kind, 0) for node in nodes) for kind in kinds})
        raise PlanError(
            f"an engine has {ranks} ranks, each with {describe(dict.fromkeys(kinds, 1))} of one node, and the Ray "
            f"cluster has {present}, enough for {seats}; lower --tensor-parallel-size or --pipeline-parallel-size, or "
            "start Ray on more machines",
            code="ray-too-small",
        )
    return seats // ranks


def check_room(ray: Any, wanted: dict[str, float]) -> int:
    """Number of actors that the nodes have room for. Raises PlanError if there is none: Ray would wait without end."""
    room, present = 0, []
    kinds = {"CPU": wanted["num_cpus"], "GPU": wanted["num_gpus"]}
    for node in ray.nodes():
        if node["Alive"]:
            has = {kind: node["Resources"].get(kind, 0) for kind in kinds}
            room += int(min((has[kind] // count for kind, count in kinds.items() if count), default=1))
            present.append(f"{node['NodeManagerAddress']} has {describe(has)}")
    if not room:
        raise PlanError(
            f"an engine wants {describe(kinds)} on one node, and of the Ray cluster {'; '.join(present)}; lower "
            "--tensor-parallel-size, or give --distributed-executor-backend ray for an engine over several nodes",
            code="ray-too-small",
        )
    return room


def describe(kinds: dict[str, float]) -> str:
    """Numbers of CPUs and GPUs in words."""
    return " and ".join(f"{count:g} {kind}" for kind, count in kinds.items())
