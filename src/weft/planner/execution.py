"""Execution: the plan that an engine runs, from a plan file, from the user's own cut, or from the search."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from weft.config import USUAL, EngineConfig
from weft.errors import ConfigError, PlanError
from weft.formats.precision import OF_DTYPE
from weft.hardware.cluster import Cluster, Node
from weft.hardware.host import Host
from weft.plan.devices import device_kind
from weft.plan.layout import build_plan, check_config, check_weights_fit, compute_dtype
from weft.plan.max_memory import cap_cluster, device_caps, parse_max_memory
from weft.plan.placement import apply_device_map, spread_word
from weft.plan.plan import Plan, Speculation
from weft.plan.quantization import checkpoint_precision
from weft.plan.speculation import fetch_draft, resolve_speculation
from weft.planner.profiles import OURS, profile

if TYPE_CHECKING:
    from weft.formats.checkpoint import Checkpoint
    from weft.planner.question import Question
    from weft.planner.ranking import Candidate
    from weft.planner.search import Answer
    from weft.probes.speeds import Speeds

logger = logging.getLogger("weft")

# Fields of a config that say how to cut the model; where one is set, the search has nothing to decide.
CUTS = ("tensor_parallel_size", "tensor_split", "pipeline_parallel_size", "pipeline_split")


def plan_to_run(config: EngineConfig, checkpoint: Checkpoint, host: Host) -> Plan:
    """What the engine runs. `config.plan` names a file that `weft plan --json` wrote. Without it, and where nothing
    says how to cut the model over the GPUs, it is the best layout that `weft plan` finds for this machine.

    Raises ConfigError and PlanError as `plan.layout.build_plan`, and where a plan file cannot be carried out here or
    nothing fits.
    """
    check_config(config)
    if config.plan is not None:
        from weft.planner import plan_file, run_plan_file

        file = plan_file.read(config.plan)
        config = run_plan_file.carried_out(file, config, checkpoint, host)
        plan = laid_out(config, checkpoint, host, speculating(config, checkpoint))
        run_plan_file.check_carried_out(file, plan)
        return plan
    how = speculating(config, checkpoint)
    dtype, devices = compute_dtype(config, checkpoint, host, ()), [device_kind(config, host)]
    config = apply_device_map(config, checkpoint.shape, host, checkpoint_precision(config, checkpoint, dtype, devices))
    if device_kind(config, host) == "cpu" or (is_cut(config, host) and not leaves_shares_open(config, host)):
        return laid_out(config, checkpoint, host, how)
    from weft.probes.machine import this_machine
    from weft.probes.speeds import known

    try:
        config = searched(config, checkpoint, host, this_machine(host, known(host)), how)
    except PlanError:
        # Who says the sizes has them tried, whatever the search thinks of it.
        if not is_cut(config, host):
            raise
    return laid_out(config, checkpoint, host, how)


def speculating(config: EngineConfig, checkpoint: Checkpoint) -> Speculation | None:
    """How the engine guesses ahead, with its draft model found."""
    if config.speculative_config is None:
        return None
    return resolve_speculation(
        config.speculative_config, config.model, checkpoint.shape, lambda name: fetch_draft(name, checkpoint.format)
    )


def laid_out(config: EngineConfig, checkpoint: Checkpoint, host: Host, how: Speculation | None) -> Plan:
    """The plan of a config that says how the model is cut."""
    plan = build_plan(config, checkpoint, host)
    if how is not None:
        plan = msgspec.structs.replace(plan, lookahead=False, speculation=how)
        check_weights_fit(plan, host)
    return linked(stepping(plan, config, host), host)


def stepping(plan: Plan, config: EngineConfig, host: Host) -> Plan:
    """The plan with as many tokens in a step as `planner.batch` chooses for it, where they are still open."""
    if config.max_num_batched_tokens is not None:
        return plan
    if plan.devices[0] == "cpu":
        tokens, why = plan.max_num_batched_tokens, profile(OURS, on_cpu=True).max_num_batched_tokens.source
    else:
        from weft.planner.forecast import step_choice
        from weft.probes.speeds import known

        try:
            tokens, why = step_choice(plan, host, known(host))
        except ConfigError as error:  # a GPU that nobody knows
            tokens, why = plan.max_num_batched_tokens, str(error)
    _tell_steps(tokens, why)
    return msgspec.structs.replace(plan, max_num_batched_tokens=tokens)


def linked(plan: Plan, host: Host) -> Plan:
    """The plan, without peer-to-peer where a measurement (`weft hardware`) found that it does not work here."""
    if len({device for device in plan.devices if device != "cpu"}) < 2:
        return plan
    from weft.probes.speeds import known

    faults = [pair for pair in known(host).pairs if pair.verdict != "works"]
    if not faults:
        return plan
    numbers = {gpu.uuid: gpu.index for gpu in host.gpus}
    named = ", ".join(f"{numbers[it.first]}-{numbers[it.second]} ({it.verdict})" for it in faults)
    logger.warning("peer-to-peer is off: weft hardware found it does not work between the GPUs %s", named)
    return msgspec.structs.replace(plan, peer_to_peer=False)


def seen(plan: Plan, host: Host) -> Speeds:
    """What was measured of this machine. A CPU that ranks are to run on is measured now where that is still to do,
    which takes a second and an idle machine. Raises ConfigError where it is not possible."""
    from weft.probes import speeds

    known = speeds.known(host)
    if plan.devices[0] != "cpu":
        return known
    return msgspec.structs.replace(known, cpu=speeds.cpu_speed(host))


def is_cut(config: EngineConfig, host: Host) -> bool:
    """Whether the user says how to cut the model, or lets ranks share a GPU."""
    if any(getattr(config, name) is not None for name in CUTS) or host.environment.get("VLLM_PP_LAYER_PARTITION"):
        return True
    return not names_each_once(config, host)


def names_each_once(config: EngineConfig, host: Host) -> bool:
    """Whether the GPUs that `device_ids` names are here, and none is named twice."""
    ids = config.device_ids or ()
    return len(set(ids)) == len(ids) and all(0 <= number < len(host.gpus) for number in ids)


def leaves_shares_open(config: EngineConfig, host: Host) -> bool:
    """Whether the user says how many ranks and stages, and of GPUs that differ: who gets how much is to be found."""
    sizes = {"tensor_parallel_size", "pipeline_parallel_size"}
    said = {name for name in CUTS if getattr(config, name) is not None}
    if not said or said - sizes or host.environment.get("VLLM_PP_LAYER_PARTITION"):
        return False
    ids = config.device_ids or range(len(host.gpus))
    return names_each_once(config, host) and len({host.gpus[number].name for number in ids}) > 1


def searched(
    config: EngineConfig, checkpoint: Checkpoint, host: Host, cluster: Cluster, how: Speculation | None = None
) -> EngineConfig:
    """The config with the best layout on this machine's GPUs (of `device_ids`, where those are given) in it. Of several
    replicas it is the first one. Raises PlanError where nothing fits."""
    from weft.planner.search import search

    numbers = config.device_ids or tuple(range(len(host.gpus)))
    if config.max_memory is not None:
        device_caps(config.max_memory, len(host.gpus), on_cpu=False, ids=config.device_ids)  # or ConfigError
        cluster = cap_cluster(cluster, parse_max_memory(config.max_memory))
    answer = search(question(config, checkpoint, host, part_of(cluster, numbers), numbers, how))
    best = answer.best
    if best is None:
        raise PlanError(_nothing_fits(answer))
    seats, memory = best.layout.gpus[: best.layout.size], best.memory.replicas[0]
    _tell(answer, best, numbers)
    if config.max_num_batched_tokens is None:
        _tell_steps(memory.batched_tokens, memory.batched_reason)
    return replace(
        config,
        max_num_batched_tokens=memory.batched_tokens,
        tensor_parallel_size=best.layout.tensor_parallel,
        tensor_split=best.layout.tensor_weights,
        pipeline_parallel_size=best.layout.pipeline_parallel,
        pipeline_split=best.layout.stage_layers,
        device_ids=tuple(numbers[seat] for seat in seats),
        device_map=None,
        gpu_memory_utilization=_shares(config, answer.question.cluster, best),
    )


def question(
    config: EngineConfig,
    checkpoint: Checkpoint,
    host: Host,
    cluster: Cluster,
    numbers: Sequence[int],
    how: Speculation | None = None,
) -> Question:
    """What `weft plan MODEL` asks, with the user's limits; `numbers` are the host's of the cluster's GPUs."""
    from weft.planner.deployment import Workload, lengths
    from weft.planner.question import Question, Wish

    word = spread_word(config.device_map) if config.device_map else None
    wish = Wish(tensor_parallel=1, data_parallel=1, expert_parallel=False, spread=word) if word else Wish()
    if config.tensor_parallel_size or config.pipeline_parallel_size:
        tensor, stages = config.tensor_parallel_size or 1, config.pipeline_parallel_size or 1
        wish = Wish(tensor_parallel=tensor, pipeline_parallel=stages, expert_parallel=False)
    shape, most = checkpoint.shape, config.max_model_len
    devices = [f"cuda:{number}" for number in numbers]
    dtype = compute_dtype(config, checkpoint, host, devices)
    input_len, output_len = lengths(None, None, most or shape.longest)
    share = config.gpu_memory_utilization
    return Question(
        model=config.model,
        shape=shape,
        cluster=cluster,
        engine="weft",
        precisions=(checkpoint_precision(config, checkpoint, dtype, devices),),
        kv_dtype=OF_DTYPE[dtype] if config.kv_cache_dtype == "auto" else "fp8",
        workload=Workload(input_len=input_len, output_len=output_len, max_model_len=most),
        wish=wish,
        gpu_memory_utilization=None if share == USUAL.gpu_memory_utilization else min(share),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        speculation=how,
    )


def part_of(cluster: Cluster, numbers: Sequence[int]) -> Cluster:
    """Some GPUs of one node, as a cluster of their own."""
    (node,) = cluster.nodes
    if tuple(numbers) == tuple(range(len(node.gpus))):
        return cluster
    at = {number: place for place, number in enumerate(numbers)}
    bridged = tuple(tuple(at[number] for number in group if number in at) for group in node.bridged)
    bridged = tuple(group for group in bridged if len(group) > 1)
    whole = len(bridged) == 1 and len(bridged[0]) == len(numbers)
    gpus = tuple(node.gpus[number] for number in numbers)
    return Cluster((Node(gpus, "nvlink" if whole else node.link, () if whole else bridged),), cluster.network_Bps)


def _shares(config: EngineConfig, cluster: Cluster, best: Candidate) -> tuple[float, ...]:
    """As the user says or by default; more on a GPU where a single request needs it."""
    usual = config.gpu_memory_utilization
    held = [cluster.gpus[seat].held_bytes for seat in best.layout.gpus]
    ranks = best.memory.replicas[0].ranks
    taken = [(rank.usable_bytes + more) / rank.memory_bytes for rank, more in zip(ranks, held, strict=False)]
    return usual if len(usual) > 1 or max(taken) <= usual[0] else tuple(max(usual[0], share) for share in taken)


def _tell(answer: Answer, best: Candidate, numbers: Sequence[int]) -> None:
    seats = [numbers[seat] for seat in best.layout.gpus[: best.layout.size]]
    where = f"GPU{'s' * (len(seats) > 1)} {','.join(map(str, seats))}"
    replicas = best.layout.data_parallel
    if replicas == 1:
        logger.info("layout: %s on %s, the best for %s", best.cut, where, answer.question.objective)
        return
    logger.info(
        "layout: weft plan's best is %s, %d replicas with %.0f tokens/s in all; one of them runs here, on %s: start "
        "the others as servers of their own with --device-ids, or cut the model over all with --tensor-parallel-size",
        best.cut,
        replicas,
        best.predicted.saturated_tok_s,
        where,
    )


def _tell_steps(tokens: int, why: str) -> None:
    logger.info("max_num_batched_tokens is %s: %s", f"{tokens:,}", why)


def _nothing_fits(answer: Answer) -> str:
    from weft.planner.advice import advice

    changes = [change for change in advice(answer) if "does not run it yet" not in change]
    help_ = f"; {changes[0]}" if changes else ""
    return (
        f"{answer.question.model} does not fit this machine: {answer.obstacle}{help_} (weft plan "
        f"{answer.question.model} tells more; --tensor-parallel-size or --pipeline-parallel-size is tried all the same)"
    )
