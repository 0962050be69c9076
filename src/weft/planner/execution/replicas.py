"""Plans of the replicas that one command runs: from a plan file, from --data-parallel-size, or from the search.

Each replica is an engine with a plan of its own: on GPUs that no other has, or on its share of the CPU's cores and
memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from weft.config import DeviceIds, EngineConfig
from weft.errors import ConfigError, PlanError
from weft.machine.hardware.host import Host
from weft.plan.devices import device_kind
from weft.plan.layout import check_config, engine_parallelism
from weft.plan.max_memory import device_caps
from weft.plan.parallelism import asked_parallelism
from weft.plan.plan import Plan, Speculation
from weft.plan.shards import config_of_shards
from weft.plan.split import split
from weft.planner.execution.config_search import configs_of_best, is_cut
from weft.planner.execution.execution import measured_speeds, plan_of_config, plan_to_run, speculation_of

if TYPE_CHECKING:
    from weft.checkpoint.checkpoint import Checkpoint
    from weft.planner.report.plan_file import PlanFile

logger = logging.getLogger("weft")


class ReplicaPlan(NamedTuple):
    """The plan of one replica, the part of the host that it has, and its speed relative to the others."""

    plan: Plan
    host: Host
    weight: float = 1.0


def plan_replicas(
    config: EngineConfig, checkpoint: Checkpoint, host: Host, *, whole: bool = False
) -> list[ReplicaPlan]:
    """The plans of all replicas that the config asks for; one if it leaves their number open.

    With `whole` the search then chooses the number: as many as the best deployment on this machine's GPUs has.

    Raises ConfigError and PlanError as `plan_to_run`, and for more replicas than there are GPUs or cores.
    """
    config = config_of_shards(config, checkpoint)
    check_config(config)
    if config.plan is not None:
        plans = _replicas_of_files(config, checkpoint, host)
    elif config.enable_expert_parallel:
        plans = [ReplicaPlan(plan_to_run(config, checkpoint, host), host)]
    elif device_kind(config, host) == "cpu":
        plans = _replicas_on_cores(config, checkpoint, host, config.data_parallel_size or 1)
    else:
        plans = _replicas_on_gpus(config, checkpoint, host, whole)
    return _weighted(plans)


# On a CPU


def share_of_host(host: Host, number: int, count: int) -> Host:
    """The part of a machine that one of `count` replicas on its CPU has: cores and memory.

    Raises ConfigError for more replicas than cores.
    """
    if count > len(host.cores):
        cores = f"{len(host.cores)} {'core' if len(host.cores) == 1 else 'cores'}"
        raise ConfigError(
            f"data_parallel_size is {count}, and {host.hostname} has {cores} for its replicas; give each at least one: "
            f"--data-parallel-size {len(host.cores)} or less",
            code="more-replicas-than-cores",
        )
    part = split(len(host.cores), [1.0] * count, minimum=1)[number]
    return msgspec.structs.replace(
        host, cores=host.cores[part.start : part.stop], memory_free_bytes=host.memory_free_bytes // count
    )


def _replicas_on_cores(config: EngineConfig, checkpoint: Checkpoint, host: Host, count: int) -> list[ReplicaPlan]:
    one = replace(config, data_parallel_size=None)
    hosts = [share_of_host(host, number, count) for number in range(count)] if count > 1 else [host]
    return [ReplicaPlan(shared_plan(plan_to_run(one, checkpoint, part), count), part) for part in hosts]


def shared_plan(plan: Plan, engines: int) -> Plan:
    """The plan of an engine of several that share a CPU's memory, and what --max-memory leaves of it."""
    if engines == 1 or not plan.on_cpu:
        return plan
    caps = {device: size // engines for device, size in plan.max_memory.items()}
    return msgspec.structs.replace(plan, engines=engines, max_memory=caps)


# On GPUs


def _configs_of_replicas(
    config: EngineConfig, one: EngineConfig, checkpoint: Checkpoint, host: Host, speculative: Speculation | None
) -> list[EngineConfig]:
    """A config for each replica: from the best layout, or, if `one` gives a layout, on GPUs in order."""
    searched: list[EngineConfig] = []
    if not is_cut(one, host) or _only_sizes(one, host):
        searched = _searched(config, checkpoint, host, speculative)
    return searched or _contiguous(one, checkpoint, host, config.data_parallel_size or 1)


def _is_one_engine(config: EngineConfig, one: EngineConfig, host: Host) -> bool:
    """Return True if the config, or `one`, which is its config of a single replica, decides the layout of an engine."""
    if config.device_map is not None:
        return True
    return is_cut(one, host) and (config.data_parallel_size or 1) == 1


def _replicas_on_gpus(config: EngineConfig, checkpoint: Checkpoint, host: Host, whole: bool) -> list[ReplicaPlan]:
    count, one = config.data_parallel_size, replace(config, data_parallel_size=None)
    if _is_one_engine(config, one, host):
        return [ReplicaPlan(plan_to_run(one, checkpoint, host), host)]
    if count is not None:
        _check_room(one, checkpoint, host, count)
    speculative = speculation_of(config, checkpoint)
    configs = _configs_of_replicas(config, one, checkpoint, host, speculative)
    if count is None and not whole and len(configs) > 1:
        logger.info("one of %d replicas runs here; data_parallel_size %d runs all", len(configs), len(configs))
        del configs[1:]
    return [ReplicaPlan(plan_of_config(each, checkpoint, host, speculative), host) for each in configs]


def _searched(
    config: EngineConfig, checkpoint: Checkpoint, host: Host, speculative: Speculation | None
) -> list[EngineConfig]:
    """The replicas of the best layout; none if nothing fits a cut of the user's, which is tried all the same.

    Raises PlanError if nothing fits, and the user gives no cut.
    """
    from weft.probes.machine import host_cluster
    from weft.probes.stored_speeds import load_speeds

    try:
        return configs_of_best(config, checkpoint, host, host_cluster(host, load_speeds(host)), speculative)
    except PlanError:
        if is_cut(replace(config, data_parallel_size=None), host):
            return []
        raise


def _only_sizes(config: EngineConfig, host: Host) -> bool:
    """Return True if the search may choose the shares and the GPUs of a cut."""
    cut = asked_parallelism(vars(config), host.environment)
    return not cut.tensor_split and not cut.pipeline_split and config.device_ids is None


def _seats(config: EngineConfig, host: Host) -> tuple[int, ...]:
    """Numbers of the GPUs that may be used. Raises ConfigError for a GPU that is named twice."""
    if config.device_ids is not None:
        named = ",".join(map(str, config.device_ids))
        seats = tuple(seat for seat in config.device_ids if seat != "cpu")
        if len(seats) < len(config.device_ids):
            raise ConfigError(
                f"device_ids {named} puts layers on the CPU, which several replicas cannot share; leave "
                "--data-parallel-size or the CPU out",
                code="replicas-beside-cpu",
            )
        if len(set(seats)) < len(seats):
            raise ConfigError(
                f"device_ids {named} names a GPU twice, and replicas share none; name each once",
                code="replicas-share-gpu",
            )
        return seats
    caps = device_caps(config.max_memory, len(host.gpus), on_cpu=False, ids=None)
    return tuple(gpu.index for gpu in (host.gpus_of(caps) if caps else host.gpus))


def _check_room(config: EngineConfig, checkpoint: Checkpoint, host: Host, count: int) -> None:
    """Raise ConfigError or PlanError for more ranks than GPUs."""
    seats, ranks = _seats(config, host), engine_parallelism(config, checkpoint.shape, host.environment).replica_size
    if count * ranks > len(seats):
        one = "one GPU each" if ranks == 1 else f"{ranks} GPUs each"
        most = len(seats) // ranks
        way = f"give --data-parallel-size {most} or less" if most else "lower --tensor-parallel-size"
        raise PlanError(
            f"data_parallel_size is {count}: replicas of {one} need {count * ranks} GPUs, and {len(seats)} "
            f"{'is' if len(seats) == 1 else 'are'} there for them; {way}, or use --device cpu",
            code="more-replicas-than-gpus",
        )


def _contiguous(config: EngineConfig, checkpoint: Checkpoint, host: Host, count: int) -> list[EngineConfig]:
    """The replicas of a cut that the user gives, on neighbouring GPUs. Raises ConfigError for other lists of GPUs."""
    seats, ranks = _seats(config, host), engine_parallelism(config, checkpoint.shape, host.environment).replica_size
    if config.device_ids is not None and len(seats) != count * ranks:
        raise ConfigError(
            f"device_ids names {len(seats)} GPUs for {count} replicas of {ranks}; give {count * ranks}",
            code="device-ids-not-per-rank",
        )
    configs = []
    for start in range(0, count * ranks, ranks):
        share = config.gpu_memory_utilization
        own = share[start : start + ranks] if len(share) == count * ranks else share
        ids = seats[start : start + ranks]
        configs.append(replace(config, device_ids=ids, gpu_memory_utilization=own))
    return configs


# From plan files


def _check_seats_free(files: object, shared: Collection[int | Literal["cpu"]]) -> None:
    """Raise PlanError if several replicas of the plan files have these devices."""
    if shared:
        where = "the CPU" if "cpu" in shared else f"GPU {min(map(str, shared))}"
        raise PlanError(
            f"{files} puts two replicas on {where}; name a GPU for each rank with --device-ids",
            code="replicas-share-gpu",
        )


def _replicas_of_files(config: EngineConfig, checkpoint: Checkpoint, host: Host) -> list[ReplicaPlan]:
    """The replicas of all plans of a file, each on its own GPUs."""
    from weft.planner.execution import run_plan_file
    from weft.planner.report import plan_file

    assert config.plan is not None
    files = plan_file.load_plan_files(config.plan)
    engines = [engine for file in files for engine in file.engines]
    _check_size(config, files, len(engines))
    ids = _divided_ids(config, engines)
    one = replace(config, data_parallel_size=None)
    used: set[int | Literal["cpu"]] = set()
    plans = []
    on_cores = len(engines) > 1 and all(engine.on_cpu for engine in engines)
    for number, (engine, own) in enumerate(zip(engines, ids, strict=True)):
        part = share_of_host(host, number, len(engines)) if on_cores else host
        applied = run_plan_file.apply_plan_file(engine, replace(one, device_ids=own), checkpoint, part)
        seats = set(applied.device_ids or ())
        _check_seats_free(config.plan, seats & used)
        used |= seats
        plan = plan_of_config(applied, checkpoint, part, speculation_of(applied, checkpoint))
        run_plan_file.check_applied(engine, plan)
        plans.append(ReplicaPlan(shared_plan(plan, len(engines)) if on_cores else plan, part))
    return plans


def _check_size(config: EngineConfig, files: Sequence[PlanFile], engines: int) -> None:
    """Raise ConfigError if --data-parallel-size contradicts the plan."""
    given = config.data_parallel_size
    sizes = {file.layout.parallelism.data_parallel for file in files} if len(files) == 1 else {engines}
    if given is not None and given not in sizes:
        raise ConfigError(
            f"data_parallel_size is {given} and {config.plan} has {sizes.pop()}; leave the flag out, or plan again "
            "with it",
            code="flag-contradicts-plan",
        )


def _divided_ids(config: EngineConfig, engines: Sequence[PlanFile]) -> list[DeviceIds | None]:
    """The GPUs that --device-ids names for each engine. Raises ConfigError if they are not one per rank."""
    ids = config.device_ids
    if ids is None:
        return [None] * len(engines)
    counts = [len(engine.ranks) for engine in engines]
    if len(ids) != sum(counts):
        raise ConfigError(
            f"device_ids names {len(ids)} GPUs; {config.plan} has {sum(counts)} ranks: give one each, or leave it out",
            code="device-ids-not-per-rank",
        )
    starts = [sum(counts[:number]) for number in range(len(counts))]
    return [ids[start : start + count] for start, count in zip(starts, counts, strict=True)]


# Speeds


def _weighted(plans: Sequence[ReplicaPlan]) -> list[ReplicaPlan]:
    """The replicas with their predicted speeds as weights, the first one's being 1."""
    kinds = {_kind(one) for one in plans}
    if len(kinds) == 1:
        return list(plans)
    speeds = [_speed(one) for one in plans]
    weights = [speed / speeds[0] for speed in speeds]
    logger.info("replicas share the requests by their predicted speed: %s", " : ".join(f"{w:.2f}" for w in weights))
    return [one._replace(weight=weight) for one, weight in zip(plans, weights, strict=True)]


def _kind(one: ReplicaPlan) -> tuple[object, ...]:
    """All that the speed of a replica depends on, but for the links of its GPUs."""
    plan = one.plan
    gpus = tuple(gpu.name for gpu in one.host.gpus_of(device.name for device in plan.devices))
    return plan.places, gpus, sum(map(len, plan.cores)) if plan.on_cpu else 0


def _speed(one: ReplicaPlan) -> float:
    """Predicted tokens per second of a replica under load; on hardware without known figures, its number of devices."""
    from weft.planner.deployment import default_lengths
    from weft.planner.execution.forecast import forecast_plan

    plan = one.plan
    if plan.on_cpu:
        return float(len({core for cores in plan.cores for core in cores}))
    try:
        forecast = forecast_plan(plan, one.host, measured_speeds(plan, one.host))
    except ConfigError:
        return float(len(set(plan.devices)))
    return forecast.speed(*default_lengths(None, None, plan.max_model_len)).saturated_tok_s
