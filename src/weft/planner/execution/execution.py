"""The plan that an engine runs: from a plan file, from the user's own cut, or from the search."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError
from weft.logs import event_fields
from weft.machine.hardware.host import Host
from weft.plan import nodes
from weft.plan.devices import device_kind
from weft.plan.layout import build_plan, check_config, check_weights_fit, compute_dtype, engine_parallelism
from weft.plan.placement import apply_device_map
from weft.plan.plan import Plan, Speculation
from weft.plan.quantization import checkpoint_precision
from weft.plan.shards import config_of_shards
from weft.plan.speculation import check_draft_groups, fetch_draft, resolve_speculation
from weft.planner.execution.config_search import config_of_best, is_cut, leaves_shares_open, log_step_tokens
from weft.planner.profiles import OURS, load_profile

if TYPE_CHECKING:
    from weft.checkpoint.checkpoint import Checkpoint
    from weft.probes.stored_speeds import Speeds

logger = logging.getLogger("weft")


def plan_over_nodes(
    config: EngineConfig,
    checkpoint: Checkpoint,
    hosts: Sequence[Host],
    rooms: Sequence[int | None],
    round_trip_s: float | None = None,
) -> Plan:
    """The plan of an engine whose ranks are divided over several nodes, in rank order.

    `hosts` are the nodes' machines, `rooms` the numbers of ranks that they have room for, None for any. `round_trip_s`
    is the time of a small message between two of them and back, None if it was not measured. Raises ConfigError and
    PlanError as `plan_to_run` does.
    """
    if config.plan is not None or config.speculative_config is not None:
        flag = "--plan" if config.plan is not None else "--speculative-config"
        raise ConfigError(f"{flag} is for one node; leave it out with --nnodes", code="option-of-one-node")
    config = nodes.config_over_nodes(config_of_shards(config, checkpoint), checkpoint.shape, hosts)
    check_config(config)
    joined = nodes.joined_host(hosts)
    cut = engine_parallelism(config, checkpoint.shape, joined.environment)
    if device_kind(config, joined) == "cpu" and config.executor != "ray":
        rooms = [None] * len(hosts)
    counts = nodes.divide_ranks(cut.tensor_parallel, cut.pipeline_parallel * cut.groups, rooms)
    with nodes.named_gpus(hosts):
        whole = build_plan(nodes.seats(config, hosts, counts), checkpoint, joined)
    plan = nodes.over_nodes(whole, hosts, counts)
    nodes.check_node_memory(plan, hosts)
    if config.executor == "ray" and plan.on_cpu:
        plan = msgspec.structs.replace(plan, max_threads=1)  # a rank's bundle is one CPU
    if config.max_num_batched_tokens is None:
        log_step_tokens(plan.max_num_batched_tokens, "the default for ranks on several nodes")
    if warning := nodes.crossing_warning(plan, round_trip_s):
        logger.warning("%s", warning, extra=event_fields("group-spans-nodes"))
    return plan


def plan_to_run(config: EngineConfig, checkpoint: Checkpoint, host: Host) -> Plan:
    """The plan that one engine runs; of several replicas (`planner.execution.replicas`), the first one's.

    `config.plan` names a file that `weft plan --json` wrote. Without it, and if nothing in the config says how to cut
    the model over the GPUs, the plan is the best layout that `weft plan` finds for this machine.

    Raises ConfigError and PlanError as `plan.layout.build_plan` does, and if a plan file cannot be applied here, or if
    nothing fits.
    """
    config = config_of_shards(config, checkpoint)
    check_config(config)
    if config.plan is not None:
        from weft.planner.execution import run_plan_file
        from weft.planner.report import plan_file

        file = plan_file.load_plan_file(config.plan).engines[0]
        config = run_plan_file.apply_plan_file(file, config, checkpoint, host)
        plan = plan_of_config(config, checkpoint, host, speculation_of(config, checkpoint))
        run_plan_file.check_applied(file, plan)
        return plan
    speculative = speculation_of(config, checkpoint)
    kind = device_kind(config, host)
    dtype = compute_dtype(config.dtype, checkpoint, host, ["cpu"] * (kind == "cpu")).value
    config = apply_device_map(config, checkpoint.shape, host, checkpoint_precision(config, checkpoint, dtype, [kind]))
    if device_kind(config, host) == "cpu" or (is_cut(config, host) and not leaves_shares_open(config, host)):
        return plan_of_config(config, checkpoint, host, speculative)
    from weft.probes.machine import host_cluster
    from weft.probes.stored_speeds import load_speeds

    try:
        config = config_of_best(config, checkpoint, host, host_cluster(host, load_speeds(host)), speculative)
    except PlanError:
        # Sizes that the user gave are tried even if the search found no fit.
        if not is_cut(config, host):
            raise
    return plan_of_config(config, checkpoint, host, speculative)


def speculation_of(config: EngineConfig, checkpoint: Checkpoint) -> Speculation | None:
    """The config's speculative decoding, with its draft model looked up."""
    if config.speculative_config is None:
        return None
    return resolve_speculation(
        config.speculative_config, config.model, checkpoint.shape, lambda name: fetch_draft(name, checkpoint.format)
    )


def plan_of_config(config: EngineConfig, checkpoint: Checkpoint, host: Host, speculative: Speculation | None) -> Plan:
    """The plan of a config that says how to cut the model."""
    plan = build_plan(config, checkpoint, host)
    if speculative is not None:
        check_draft_groups(speculative, plan.data_parallel)
        plan = msgspec.structs.replace(plan, lookahead=False, speculation=speculative)
        check_weights_fit(plan, host)
    return with_peer_to_peer(with_step_tokens(plan, config, host), host)


def with_step_tokens(plan: Plan, config: EngineConfig, host: Host) -> Plan:
    """The plan with the token budget that `planner.work.batch` chooses for it, unless the config gives one."""
    if config.max_num_batched_tokens is not None:
        return plan
    if plan.on_cpu:
        tokens, why = plan.max_num_batched_tokens, load_profile(OURS, on_cpu=True).max_num_batched_tokens.source
    else:
        from weft.machine.hardware.cpus import TYPICAL
        from weft.planner.execution.forecast import step_token_budget
        from weft.probes.stored_speeds import load_speeds

        known = load_speeds(host)
        if plan.uses_cpu and known.cpu is None:
            known = msgspec.structs.replace(known, cpu=TYPICAL)  # a measurement would delay the start
        try:
            tokens, why, _ = step_token_budget(plan, host, known)
        except ConfigError as error:  # a GPU that is not in the catalogue
            tokens, why = plan.max_num_batched_tokens, str(error)
    log_step_tokens(tokens, why)
    return msgspec.structs.replace(plan, max_num_batched_tokens=tokens)


def with_peer_to_peer(plan: Plan, host: Host) -> Plan:
    """The plan, without peer-to-peer if a measurement (`weft hardware`) found that it does not work here."""
    if plan.on_cpu or len(set(plan.devices)) < 2:
        return plan
    from weft.probes.stored_speeds import load_speeds

    faults = [pair for pair in load_speeds(host).pairs if pair.verdict != "works"]
    if not faults:
        return plan
    numbers = {gpu.uuid: gpu.index for gpu in host.gpus}
    named = ", ".join(f"{numbers[pair.first]}-{numbers[pair.second]} ({pair.verdict})" for pair in faults)
    logger.warning("peer-to-peer is off: weft hardware found it does not work between the GPUs %s", named)
    return msgspec.structs.replace(plan, peer_to_peer=False)


def measured_speeds(plan: Plan, host: Host) -> Speeds:
    """The measured speeds of this machine.

    A CPU that ranks run on is measured now if it was not yet, which takes a second and an idle machine. Raises
    ConfigError if that is not possible.
    """
    from weft.probes import stored_speeds

    known = stored_speeds.load_speeds(host)
    return msgspec.structs.replace(known, cpu=stored_speeds.cpu_speed_of(host)) if plan.uses_cpu else known
