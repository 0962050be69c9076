"""Search for an engine: from its config to the question of `weft plan`, and from the best layout back to configs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import msgspec

from weft.checkpoint.quantised.precision import OF_DTYPE
from weft.config import DEFAULT_CONFIG, DeviceIds, EngineConfig
from weft.errors import PlanError
from weft.machine.hardware.cluster import Cluster, Node
from weft.machine.hardware.host import Host
from weft.plan.layout import compute_dtype
from weft.plan.limits import limits_of
from weft.plan.max_memory import cap_cluster, device_caps, parse_max_memory
from weft.plan.parallelism import WHOLE_LAYERS, Parallelism, asked_parallelism
from weft.plan.placement import spread_word
from weft.plan.plan import Speculation
from weft.plan.quantization import checkpoint_precision

if TYPE_CHECKING:
    from weft.checkpoint.checkpoint import Checkpoint
    from weft.planner.question import Question
    from weft.planner.search.ranking import Candidate
    from weft.planner.search.search import SearchResult

logger = logging.getLogger("weft")


def is_cut(config: EngineConfig, host: Host) -> bool:
    """Return True if the user says how to cut the model, or lets ranks share a GPU."""
    cut = asked_parallelism(vars(config), host.environment)
    return bool(cut.tensor_parallel or cut.pipeline_parallel or cut.data_parallel) or not names_each_once(config, host)


def names_each_once(config: EngineConfig, host: Host) -> bool:
    """Return True if the GPUs that `device_ids` names are present, none is named twice, and the CPU is not."""
    ids = config.device_ids or ()
    return len(set(ids)) == len(ids) and all(number != "cpu" and 0 <= number < len(host.gpus) for number in ids)


def leaves_shares_open(config: EngineConfig, host: Host) -> bool:
    """Return True if the user gives the number of ranks and stages only, and the GPUs differ: the search then decides
    their shares."""
    cut = asked_parallelism(vars(config), host.environment)
    has_more = cut.tensor_split or cut.pipeline_split or cut.data_parallel
    if has_more or not (cut.tensor_parallel or cut.pipeline_parallel):
        return False
    ids = config.device_ids or range(len(host.gpus))
    names = {host.gpus[number].name for number in ids if number != "cpu"} if names_each_once(config, host) else ()
    return len(names) > 1


def config_of_best(
    config: EngineConfig,
    checkpoint: Checkpoint,
    host: Host,
    cluster: Cluster,
    speculative: Speculation | None = None,
) -> EngineConfig:
    """The first of `configs_of_best`."""
    return configs_of_best(config, checkpoint, host, cluster, speculative)[0]


def _gpu_numbers(config: EngineConfig, host: Host) -> tuple[int, ...]:
    """The host's numbers of the GPUs that the config may use."""
    return tuple(number for number in config.device_ids or range(len(host.gpus)) if number != "cpu")


def configs_of_best(
    config: EngineConfig,
    checkpoint: Checkpoint,
    host: Host,
    cluster: Cluster,
    speculative: Speculation | None = None,
) -> list[EngineConfig]:
    """The config with the best layout on this machine's GPUs, or on `device_ids`, for each engine.

    There is one engine per replica, or one for all if they share their experts. Raises PlanError if nothing fits.
    """
    from weft.planner.search.search import search

    numbers = _gpu_numbers(config, host)
    caps = None if config.max_memory is None else parse_max_memory(config.max_memory)
    if caps is not None:
        device_caps(config.max_memory, len(host.gpus), on_cpu=False, ids=config.device_ids)  # or ConfigError

    def search_on(machine: Cluster) -> SearchResult:
        capped = machine if caps is None else cap_cluster(machine, caps)
        return search(plan_question(config, checkpoint, host, part_of(capped, numbers), numbers, speculative))

    result = search_on(cluster)
    if result.best is None and caps is not None and caps.cpu:
        # Only now: the CPU is measured for it, which takes a second.
        from weft.probes import stored_speeds
        from weft.probes.machine import add_cpu

        known = msgspec.structs.replace(stored_speeds.load_speeds(host), cpu=stored_speeds.cpu_speed_of(host))
        result = search_on(add_cpu(cluster, host, known))
    best = result.best
    if best is None:
        raise PlanError(_nothing_fits(result), code="nothing-fits")
    _log_layout(result, best, numbers)
    if config.max_num_batched_tokens is None:
        memory = best.memory.replicas[0]
        log_step_tokens(memory.batched_tokens, memory.batched_reason)
    return [_engine_config(config, result, best, engine, numbers) for engine in range(best.layout.parallelism.engines)]


def _engine_config(
    config: EngineConfig, result: SearchResult, best: Candidate, engine: int, numbers: Sequence[int]
) -> EngineConfig:
    """The config of one engine of a layout. `numbers` are the host's numbers of the cluster's GPUs."""
    layout = best.layout
    size = layout.parallelism.engine_ranks
    ranks = slice(engine * size, (engine + 1) * size)
    return replace(
        config,
        max_num_batched_tokens=best.memory.replicas[engine].batched_tokens,
        **layout.parallelism.fields,
        device_ids=_device_ids(layout.gpus[ranks], numbers),
        device_map=None,
        gpu_memory_utilization=_shares(config, result.question.cluster, best, ranks),
    )


def _device_ids(seats: Sequence[int], numbers: Sequence[int]) -> DeviceIds:
    """The device of each of `seats` of a cluster: a GPU's number on the host, or the CPU."""
    return tuple(numbers[seat] if seat < len(numbers) else "cpu" for seat in seats)


def plan_question(
    config: EngineConfig,
    checkpoint: Checkpoint,
    host: Host,
    cluster: Cluster,
    numbers: Sequence[int],
    speculative: Speculation | None = None,
) -> Question:
    """The question of `weft plan MODEL`, with the user's limits.

    `numbers` are the host's numbers of the cluster's GPUs.
    """
    from weft.planner.deployment import Workload, default_lengths
    from weft.planner.question import Objective, Question

    shape, most = checkpoint.shape, config.max_model_len
    devices = [f"cuda:{number}" for number in numbers] + ["cpu"] * (cluster.cpu is not None)
    dtype = compute_dtype(config.dtype, checkpoint, host, devices).value
    input_len, output_len = default_lengths(None, None, most or shape.longest)
    share = config.gpu_memory_utilization
    return Question(
        model=config.model,
        shape=shape,
        cluster=cluster,
        engine="weft",
        precisions=(checkpoint_precision(config, checkpoint, dtype, devices),),
        kv_dtype=OF_DTYPE[dtype] if config.kv_cache_dtype == "auto" else "fp8",
        workload=Workload(input_len=input_len, output_len=output_len, max_model_len=most),
        objective=cast(Objective, config.objective),
        constraints=layout_constraints(config),
        gpu_memory_utilization=None if share == DEFAULT_CONFIG.gpu_memory_utilization else min(share),
        **limits_of(config),
        max_num_batched_tokens=config.max_num_batched_tokens,
        speculation=speculative,
    )


def layout_constraints(config: EngineConfig) -> Parallelism:
    """The parts of a layout that a config decides; next to a size that is given, another one is 1."""
    cut, strategy = asked_parallelism(vars(config)), spread_word(config.device_map) if config.device_map else None
    if cut.tensor_parallel or cut.pipeline_parallel:
        sizes = {"tensor_parallel": cut.tensor_parallel or 1, "pipeline_parallel": cut.pipeline_parallel or 1}
        return msgspec.structs.replace(cut, data_parallel=1 if cut.deals_experts else cut.data_parallel, **sizes)
    if strategy is not None:
        return msgspec.structs.replace(WHOLE_LAYERS, device_map_strategy=strategy)
    if cut.deals_experts:
        return msgspec.structs.replace(cut, data_parallel=0)
    # Replicas share no experts.
    return msgspec.structs.replace(cut, deals_experts=False if cut.data_parallel > 1 else None)


def part_of(cluster: Cluster, numbers: Sequence[int]) -> Cluster:
    """The GPUs of one node that have these numbers, as a cluster of their own."""
    (node,) = cluster.nodes
    if tuple(numbers) == tuple(range(len(node.gpus))):
        return cluster
    gpus = tuple(node.gpus[number] for number in numbers)
    groups = [tuple(numbers.index(number) for number in group if number in numbers) for group in node.bridged]
    bridged = tuple(group for group in groups if len(group) > 1)
    all_bridged = [len(group) for group in bridged] == [len(numbers)]
    part = Node(gpus, "nvlink") if all_bridged else Node(gpus, node.link, bridged)
    return Cluster((part,), cluster.network_Bps, cpu=cluster.cpu)


def _shares(config: EngineConfig, cluster: Cluster, best: Candidate, part: slice) -> tuple[float, ...]:
    """Shares of the GPUs' memory of some ranks: the user's or the default, or more if a single request needs it."""
    usual = config.gpu_memory_utilization
    seats, ranks = best.layout.gpus[part], best.memory.ranks[part]
    if len(usual) == len(best.layout.gpus):
        usual = usual[part]
    held = [cluster.devices[seat].held_bytes for seat in seats]
    # A CPU that is used with GPUs has no share.
    taken = [
        (rank.usable_bytes + others) / rank.memory_bytes if seat < len(cluster.gpus) else 0.0
        for rank, others, seat in zip(ranks, held, seats, strict=False)
    ]
    return usual if len(usual) > 1 or max(taken) <= usual[0] else tuple(max(usual[0], share) for share in taken)


def _log_layout(result: SearchResult, best: Candidate, numbers: Sequence[int]) -> None:
    seats = _device_ids(best.layout.gpus, numbers)
    gpus = [seat for seat in seats if seat != "cpu"]
    where = "the CPU and " * (len(gpus) < len(seats)) + f"GPU{'s' * (len(gpus) > 1)} {','.join(map(str, gpus))}"
    logger.info("layout: %s on %s, the best for %s", best.cut, where, result.question.objective)


def _nothing_fits(result: SearchResult) -> str:
    from weft.planner.report.advice import advice

    changes = [change for change in advice(result) if change.values.get("runs", True)]
    change = f"; {changes[0]}" if changes else ""
    model = result.question.model
    return (
        f"{model} does not fit this machine: {result.obstacle}{change} (weft plan {model} has more suggestions; "
        "--tensor-parallel-size or --pipeline-parallel-size makes Weft try all the same)"
    )


def log_step_tokens(tokens: int, why: str) -> None:
    logger.info("max_num_batched_tokens is %s: %s", f"{tokens:,}", why)
