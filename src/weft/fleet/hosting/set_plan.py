"""SetPlan: where each model of a set lives, and its bytes awake and asleep, by the planner."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import msgspec

from weft.checkpoint import lookup
from weft.checkpoint.architectures.model import Model
from weft.checkpoint.quantised.precision import OF_DTYPE, canonical, weight_bytes
from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS
from weft.config import DEFAULT_CONFIG, EngineConfig
from weft.errors import ConfigError, PlanError
from weft.fleet.hosting.model_set import ModelEntry, ModelSet
from weft.fleet.hosting.residency import Need, Residency, Tenant
from weft.formatting import format_bytes
from weft.machine.hardware.cluster import Cluster
from weft.plan.layout import DTYPES
from weft.plan.limits import limits_of
from weft.plan.plan import DraftModel, Speculation
from weft.plan.speculation import resolve_speculation
from weft.planner.deployment import Workload, default_lengths
from weft.planner.execution.config_search import layout_constraints, part_of
from weft.planner.memory.footprint import RankMemory
from weft.planner.question import Objective, Question
from weft.planner.search.ranking import Candidate
from weft.planner.search.search import search
from weft.probes.machine import PCIE_SHARE, split_cpu

# Options that divide the memory of devices in another way, or over several machines.
UNPLANNED = ("plan", "device_map", "max_memory", "nnodes", "node_rank", "master_addr", "headless")
HOST = "cpu"  # the memory of the host, as a device


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a set: its devices, and its bytes on each of them while it is awake and while it sleeps.

    `kv_bytes` is the KV cache of all ranks. `kv_rank_bytes` is the KV cache of one rank on a CPU; None on GPUs, where
    engines use the rest of their share. `wake_s`: seconds to load its weights from the host's memory. That memory is
    pinned: with GPUs it stays allocated after the model wakes, until the model is unloaded.
    """

    entry: ModelEntry
    devices: tuple[str, ...]
    need: Need
    weight_bytes: int
    kv_bytes: int
    wake_s: float
    kv_rank_bytes: int | None = None

    @property
    def tenant(self) -> Tenant:
        """The model in the form of `Residency`."""
        entry = self.entry
        return Tenant(name=entry.name, need=self.need, keep_alive_s=entry.keep_alive_s, priority=entry.priority)

    @property
    def argv(self) -> list[str]:
        """The flags with which `weft serve` runs it as planned."""
        argv = list(self.entry.flags)
        numbers = [device.removeprefix("cuda:") for device in self.devices]
        if self.devices != (HOST,) and self.entry.config.device_ids is None:
            argv.append(f"--device-ids={','.join(numbers)}")
        if self.kv_rank_bytes is not None and self.entry.config.kv_cache_memory_bytes is None:
            argv.append(f"--kv-cache-memory-bytes={self.kv_rank_bytes}")
        return argv


class SetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a set. `rooms`: bytes of each device that its models may take together."""

    models: tuple[ModelPlan, ...]
    rooms: Mapping[str, int]

    def residency(self) -> Residency:
        """The models, all unloaded."""
        return Residency(self.rooms, [model.tenant for model in self.models])

    @property
    def sleepless(self) -> tuple[ModelPlan, ...]:
        """Models that cannot sleep, since their weights alone exceed the host's memory: they are unloaded."""
        rest = (model for model in self.models if not model.entry.must_be_awake and model.need.awake.keys() != {HOST})
        return tuple(model for model in rest if model.need.asleep.get(HOST, 0) > self.rooms.get(HOST, math.inf))

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON: sizes are bytes, times seconds."""
        sleepless = self.sleepless
        return {"rooms": dict(self.rooms), "models": [_row(model, model not in sleepless) for model in self.models]}


def _row(model: ModelPlan, sleeps: bool) -> dict[str, Any]:
    entry = model.entry
    return {
        "names": list(entry.names),
        "model": entry.config.model,
        "devices": list(model.devices),
        "awake_bytes": dict(model.need.awake),
        "asleep_bytes": dict(model.need.asleep),
        "weight_bytes": model.weight_bytes,
        "kv_bytes": model.kv_bytes,
        "wake_s": model.wake_s if sleeps else None,
        "keep_alive_s": None if entry.must_be_awake else entry.keep_alive_s,
        "must_be_awake": entry.must_be_awake,
        "priority": entry.priority,
    }


def plan_set(
    models: ModelSet, cluster: Cluster, look_up: Callable[[ModelEntry], Model], host_bytes: int | None = None
) -> SetPlan:
    """Plan all models of a set on one machine.

    A model without device-ids gets the fewest GPUs on which it fits, and if possible GPUs that no other model names. In
    a set of equal shares, all models get equal numbers of GPUs if they fit. `host_bytes`: free memory of a host with
    GPUs, None if unknown. Raises ModelError, and PlanError, with the bytes, for a model that does not fit and for
    models that must be awake but do not fit together.
    """
    if models.equal_shares and not cluster.on_cpu and len(cluster.gpus) >= len(models.entries):
        try:
            return plan_set(_shared_equally(models, len(cluster.gpus)), cluster, look_up, host_bytes)
        except PlanError:
            pass  # a model needs more GPUs
    rooms = device_rooms(cluster, host_bytes)
    taken = {f"cuda:{number}" for entry in models.entries for number in entry.config.device_ids or ()}
    planned = []
    for entry in models.entries:
        plan = plan_model(entry, look_up(entry), cluster, taken, sharers=len(models.entries))
        taken |= set(plan.devices)
        planned.append(plan)
    result = SetPlan(models=tuple(planned), rooms=rooms)
    check_together(result)
    return result


def _shared_equally(models: ModelSet, gpus: int) -> ModelSet:
    """The models with equal numbers of neighbouring GPUs; the first models get one more if GPUs are left."""
    share, left = divmod(gpus, len(models.entries))
    starts = [number * share + min(number, left) for number in range(len(models.entries) + 1)]
    shares = (tuple(range(start, end)) for start, end in pairwise(starts))
    return with_gpus(models, shares)


def with_gpus(models: ModelSet, shares: Iterable[tuple[int, ...]]) -> ModelSet:
    """The models, each fixed to its GPUs."""
    entries = tuple(
        msgspec.structs.replace(entry, config=replace(entry.config, device_ids=numbers))
        for entry, numbers in zip(models.entries, shares, strict=True)
    )
    return msgspec.structs.replace(models, entries=entries, equal_shares=False)


def device_rooms(cluster: Cluster, host_bytes: int | None) -> dict[str, int]:
    """Bytes of each device that models may take: the memory that other processes leave."""
    if cluster.on_cpu:
        return {HOST: cluster.gpus[0].memory_bytes}
    rooms = {f"cuda:{number}": gpu.memory_bytes - gpu.held_bytes for number, gpu in enumerate(cluster.gpus)}
    return rooms if host_bytes is None else {**rooms, HOST: host_bytes}


def plan_model(
    entry: ModelEntry, model: Model, cluster: Cluster, taken: Collection[str] = (), *, sharers: int = 1
) -> ModelPlan:
    """The plan of one model, given the bytes `taken` on devices; on a CPU, `sharers` models share the memory for KV.

    Raises PlanError if it fits nowhere.
    """
    check_plannable(entry, cluster)
    if cluster.on_cpu:
        config = entry.config
        ranks = (config.tensor_parallel_size or 1) * (config.pipeline_parallel_size or 1)
        best = _best(entry, model, split_cpu(cluster, ranks))
        if best is None:
            raise _fits_nowhere(entry, model, cluster, HOST)
        return _cpu_plan(entry, best, cluster, sharers)
    for numbers in _choices(entry, cluster, taken):
        best = _best(entry, model, part_of(cluster, numbers))
        if best is not None:
            return _gpu_plan(entry, best, cluster, numbers)
    last = [f"cuda:{number}" for number in entry.config.device_ids or range(len(cluster.gpus))]
    raise _fits_nowhere(entry, model, cluster, *last)


def check_plannable(entry: ModelEntry, cluster: Cluster) -> None:
    """Raise ConfigError for options of a model that do not allow to plan its memory together with other models."""
    config = entry.config
    given = next((name for name in UNPLANNED if getattr(config, name) != getattr(DEFAULT_CONFIG, name)), None)
    given = "distributed_executor_backend" if config.executor == "ray" else given
    if given is not None:
        flag = given.replace("_", "-")
        raise ConfigError(
            f"{flag} of {entry.name!r} is for a server of one model; leave it out, or serve that model alone",
            code="option-of-one-model",
        )
    if config.device == "cpu" and not cluster.on_cpu:
        raise ConfigError(
            f"device of {entry.name!r} is cpu, and this machine's models run on its GPUs; leave it out, or serve that "
            "model alone",
            code="cpu-beside-gpus",
        )
    beyond = [number for number in config.device_ids or () if number != "cpu" and int(number) >= len(cluster.gpus)]
    if beyond and not cluster.on_cpu:
        raise ConfigError(
            f"device-ids of {entry.name!r} names GPU {beyond[0]}; there are 0 to {len(cluster.gpus) - 1}",
            code="device-ids-beyond-gpus",
        )


def _choices(entry: ModelEntry, cluster: Cluster, taken: Collection[str]) -> list[list[int]]:
    """The lists of GPUs to try for a model: its own; or first the free GPUs and then all, the shortest lists first."""
    if entry.config.device_ids is not None:
        return [[number for number in entry.config.device_ids if number != "cpu"]]
    everyone = list(range(len(cluster.gpus)))
    free = [number for number in everyone if f"cuda:{number}" not in taken]
    ordered = free + [number for number in everyone if number not in free]
    least = (entry.config.tensor_parallel_size or 1) * (entry.config.pipeline_parallel_size or 1)
    return [sorted(ordered[:count]) for count in range(least, len(everyone) + 1)]


def _best(entry: ModelEntry, model: Model, cluster: Cluster) -> Candidate | None:
    """The best layout of a model on a part of the machine; None if it does not fit."""
    config = entry.config
    length, share = config.max_model_len, config.gpu_memory_utilization
    input_len, output_len = default_lengths(None, None, length or model.shape.longest)
    dtype = "bfloat16" if config.dtype == "auto" else DTYPES[config.dtype]
    return search(
        Question(
            model=model.name,
            shape=model.shape,
            cluster=cluster,
            engine="weft",
            precisions=(_precision(config, model),),
            kv_dtype=OF_DTYPE[dtype] if config.kv_cache_dtype == "auto" else "fp8",
            workload=Workload(input_len=input_len, output_len=output_len, max_model_len=length),
            objective=cast(Objective, config.objective),
            constraints=layout_constraints(config),
            gpu_memory_utilization=None if share == DEFAULT_CONFIG.gpu_memory_utilization else min(share),
            **limits_of(config),
            max_num_batched_tokens=config.max_num_batched_tokens,
            speculation=_speculation(config, model),
        )
    ).best


def _speculation(config: EngineConfig, model: Model) -> Speculation | None:
    """The speculative decoding of a model, since it needs memory. Raises ConfigError and ModelError."""
    if config.speculative_config is None:
        return None

    def find_draft(name: str) -> DraftModel:
        return DraftModel(model=name, checkpoint="", load_format="dummy", shape=lookup.look_up(name).shape)

    return resolve_speculation(config.speculative_config, model.name, model.shape, find_draft)


def _precision(config: EngineConfig, model: Model) -> str:
    """The planner's name for the precision in which the engine holds the weights."""
    if config.quantization in ONLINE_QUANTIZATIONS:
        return ONLINE_QUANTIZATIONS[config.quantization]
    own = canonical(model.precision)
    if own not in ("fp32", "bf16", "fp16"):
        return own
    return OF_DTYPE[DTYPES[config.dtype]] if config.dtype != "auto" else ("bf16" if own == "fp32" else own)


def _fixed_bytes(rank: RankMemory) -> int:
    return rank.weights.total + rank.other_bytes


def _cpu_plan(entry: ModelEntry, best: Candidate, cluster: Cluster, sharers: int) -> ModelPlan:
    """The plan on a CPU, where a sleeping model keeps its weights and frees its KV cache."""
    ranks = best.memory.ranks
    given = entry.config.kv_cache_memory_bytes
    each = given if given is not None else max(rank.kv_room_bytes for rank in ranks) // sharers
    weights, kv = sum(rank.weights.total for rank in ranks), each * len(ranks)
    asleep = weights + sum(rank.runtime_bytes + rank.draft_bytes for rank in ranks)
    # The two warm-up steps read them.
    wake_s = 2 * weights / cluster.gpus[0].bandwidth_Bps
    return ModelPlan(
        entry=entry,
        devices=(HOST,),
        need=Need({HOST: sum(map(_fixed_bytes, ranks)) + kv}, {HOST: asleep}),
        weight_bytes=weights,
        kv_bytes=kv,
        wake_s=wake_s,
        kv_rank_bytes=each,
    )


def _gpu_plan(entry: ModelEntry, best: Candidate, cluster: Cluster, numbers: Sequence[int]) -> ModelPlan:
    """The plan on GPUs: a sleeping model leaves its contexts on them, and its weights in the host's memory."""
    awake, asleep, weights, kv = Counter[str](), Counter[str](), Counter[str](), 0
    for seat, rank in zip(best.layout.gpus, best.memory.ranks, strict=True):
        device = f"cuda:{numbers[seat]}"
        given = entry.config.kv_cache_memory_bytes
        room = rank.kv_room_bytes if given is None else given
        awake[device] += _fixed_bytes(rank) + room
        asleep[device] += rank.runtime_bytes
        weights[device] += rank.weights.total
        kv += room
    total = sum(weights.values())
    wake_s = max(size / (cluster.gpus[_number(device)].pcie_Bps * PCIE_SHARE) for device, size in weights.items())
    return ModelPlan(
        entry=entry,
        devices=tuple(awake),
        need=Need(dict(awake), {**asleep, HOST: total}),
        weight_bytes=total,
        kv_bytes=kv,
        wake_s=wake_s,
    )


def _number(device: str) -> int:
    return int(device.removeprefix("cuda:"))


def check_together(plan: SetPlan) -> None:
    """Raise PlanError if the models that must be awake do not fit together, or another model does not fit with them."""
    pinned = [model for model in plan.models if model.entry.must_be_awake]
    for device, room in plan.rooms.items():
        needs = {model.entry.name: model.need.awake.get(device, 0) for model in pinned}
        needs = {name: size for name, size in needs.items() if size}
        if sum(needs.values()) > room:
            listed = " and ".join(f"{name!r} {size:,} bytes" for name, size in needs.items())
            raise PlanError(
                f"models that must be awake do not fit together on {device}, which has {room:,} bytes: {listed}; give "
                "one of them a keep-alive, so that it may sleep, other device-ids, or less memory",
                code="set-does-not-fit",
            )
    residency = plan.residency()
    for model in plan.models:
        if not model.entry.must_be_awake:
            _check_beside(residency, model, pinned)


def _check_beside(residency: Residency, model: ModelPlan, pinned: Sequence[ModelPlan]) -> None:
    """Raise PlanError if a model that may sleep does not fit together with the models that must be awake."""
    for device, size in model.need.awake.items():
        held = sum(other.need.awake.get(device, 0) for other in pinned)
        room = residency.rooms.get(device, size + held)
        if size + held > room:
            raise PlanError(
                f"{model.entry.name!r} needs {size:,} bytes of {device}, which has {room:,}, {held:,} of them held by "
                "models that must be awake; give these a keep-alive, or less memory",
                code="set-does-not-fit",
            )


def _fits_nowhere(entry: ModelEntry, model: Model, cluster: Cluster, *devices: str) -> PlanError:
    rooms = device_rooms(cluster, None)
    have = ", ".join(f"{format_bytes(rooms.get(device, 0))} on {device}" for device in devices)
    need = weight_bytes(model.shape, _precision(entry.config, model))
    config = entry.config
    limit, ways = "", "compress it with quantization, lower max-model-len, or give it more GPUs"
    if not cluster.on_cpu and config.gpu_memory_utilization != DEFAULT_CONFIG.gpu_memory_utilization:
        share = min(config.gpu_memory_utilization)
        limit = f", of which it may use {share:g} (gpu-memory-utilization)"
        ways = "raise gpu-memory-utilization, compress it with quantization, or give it more GPUs"
    return PlanError(
        f"{entry.name!r} ({config.model}) does not fit: its weights take {format_bytes(need)}, and {have} are "
        f"free{limit}; {ways}",
        code="model-does-not-fit",
    )
