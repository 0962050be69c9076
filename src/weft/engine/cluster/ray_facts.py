"""Facts of the nodes of a Ray cluster, from a task on each, and their checks."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from weft._version import __version__
from weft.checkpoint.checkpoint import Checkpoint
from weft.config import EngineConfig
from weft.engine.cluster import preflight
from weft.engine.cluster.facts import gather_facts
from weft.engine.cluster.messages import Facts, Speed
from weft.engine.cluster.ray_bundles import OwnGroup
from weft.engine.cluster.ray_seats import Seat
from weft.engine.cluster.settings import NodeSettings
from weft.engine.executors.ray_nodes import NODE_LABEL, RayNode
from weft.errors import ConfigError, PlanError, WeftError
from weft.logs import event_fields
from weft.machine.hardware.host import probe_host
from weft.plan.opening import resolve_checkpoint

log = logging.getLogger("weft.cluster")

SAY_S = 10.0  # seconds between two log lines on a node that has not reported yet


def find_seats(ray: Any, config: EngineConfig, on_cpu: bool, group: OwnGroup | None = None) -> list[Seat]:
    """The cluster's nodes with room for ranks, this process's own first, each with its facts.

    If this process is in a placement group, only the group's free bundles count. Raises ConfigError, and
    PlanError if no node has room.
    """
    own = ray.get_runtime_context().get_node_id()
    kinds = ("CPU",) if on_cpu else ("GPU", "CPU")  # each rank on a GPU wants a CPU as well
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if group is None:
        rooms = {node["NodeID"]: int(min(node["Resources"].get(kind, 0) for kind in kinds)) for node in nodes}
    else:
        rooms = {node: len(bundles) for node, bundles in group.bundles.items()}
    alive = [node for node in nodes if rooms.get(node["NodeID"])]
    alive.sort(key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"], node["NodeID"]))
    if not alive:
        raise PlanError(
            f"no node of the Ray cluster has a {' and a '.join(kinds)} for a rank; ray start "
            f"{' '.join(f'--num-{kind.lower()}s N' for kind in kinds)} gives it some",
            code="ray-without-devices",
        )
    facts = gather_from(ray, [node["NodeID"] for node in alive], config)
    return [
        Seat(RayNode(id, node["NodeManagerHostname"], node["NodeManagerAddress"]), rooms[id], facts[id])
        for node in alive
        if (id := node["NodeID"]) in facts
    ]


def gather_from(ray: Any, ids: Iterable[str], config: EngineConfig) -> dict[str, Facts]:
    """Facts of nodes by their ids, from a task on each. Nodes that have died, of which Ray may hear late, are left out.

    Raises ConfigError for a node that does not report within --start-timeout: on a busy machine Ray takes long to start
    a worker.
    """
    # Workers of Ray run in other folders than this process.
    model = os.path.abspath(config.model) if os.path.exists(config.model) else config.model
    question = msgspec.json.encode(dataclasses.replace(config, model=model))
    task = ray.remote(report_facts)
    questions = {
        node: task.options(num_cpus=0, max_retries=0, label_selector={NODE_LABEL: node}).remote(number, question)
        for number, node in enumerate(ids)
    }
    facts = {}
    began_s = time.time()
    deadline = time.monotonic() + config.start_timeout
    for node, answer in questions.items():
        await_answer(ray, f"Ray node {node[:8]}", answer, deadline)
        try:
            one = msgspec.json.decode(ray.get(answer, timeout=0), type=Facts)
            # Its clock was read while ours went from the question to now.
            skew_s = min(0.0, one.clock_s - began_s) + max(0.0, one.clock_s - time.time())
            facts[node] = replace(one, skew_s=skew_s)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError, msgspec.DecodeError) as error:
            if _has_died(ray, node, error):
                log.warning("Ray node %s has died, and is left out", node[:8])
                continue
            lines = str(error).strip().splitlines() or [f"no answer within {config.start_timeout:g} s"]
            raise ConfigError(
                f"Ray node {node[:8]} does not report: {lines[-1]}; {way_out(error)}",
                code="ray-node-not-reporting",
            ) from None
    return facts


def await_answer(ray: Any, label: str, answer: Any, deadline: float) -> None:
    """Wait for an answer of a node until a deadline of time.monotonic(); log every SAY_S seconds whose it is."""
    while not ray.wait([answer], timeout=min(SAY_S, max(0.0, deadline - time.monotonic())))[0]:
        if time.monotonic() >= deadline:
            return
        log.info("waiting for %s to report", label, extra=event_fields("node-awaited", node=label))


def _has_died(ray: Any, node: str, error: Exception) -> bool:
    """Return True if a task has failed because its node is gone."""
    if isinstance(error, ray.exceptions.TaskUnschedulableError):
        return True
    return not any(row["NodeID"] == node and row["Alive"] for row in ray.nodes())


def way_out(error: Exception) -> str:
    """The way out for a node that does not report."""
    if "ModuleNotFoundError" in str(error) or isinstance(error, msgspec.DecodeError):
        return f"install Weft {__version__} there, for the Python that runs Ray"
    return "see `ray status`, and Ray's logs there (/tmp/ray/session_latest/logs)"


def report_facts(number: int, question: bytes) -> bytes:
    """Report of the node on which this task runs, as JSON of Facts."""
    config = msgspec.json.decode(question, type=EngineConfig)
    checkpoint: Checkpoint | WeftError
    try:
        checkpoint = resolve_checkpoint(config)
    except WeftError as error:
        checkpoint = error
    import ray

    library: Any = ray  # whose functions have no types
    settings = NodeSettings(
        nodes=0,
        node=0,
        address=library.util.get_node_ip_address(),
        port=0,
        start_timeout_s=0,
        allow_public=True,
        key=b"",
    )
    facts = gather_facts(settings, probe_host(), config.model, checkpoint, os.environ)
    return msgspec.json.encode(replace(facts, node=number))


def _other_addresses(seats: Sequence[Seat]) -> Iterator[str]:
    """A failure for each node that Ray knows by another address than its VLLM_HOST_IP."""
    for seat in seats:
        wanted = seat.facts.host_ip
        if wanted and wanted != seat.node.address:
            yield (
                f"{seat.node.label} has VLLM_HOST_IP={wanted}, another address; start Ray there with --node-ip-address "
                f"{wanted}, or unset the variable"
            )


def check_seats(seats: Sequence[Seat], config: EngineConfig, speeds: Sequence[Speed] = ()) -> None:
    """Raise ConfigError for the first node that fails the preflight, or, with `speeds`, for a network that does."""
    facts = numbered_facts(seats)
    problems = [*_other_addresses(seats), *preflight.failures(facts, speeds, preflight.fetch_command(config))]
    for failure in problems[1:]:
        log.error("%s", failure)
    if problems:
        raise ConfigError(problems[0], code="preflight")


def numbered_facts(seats: Sequence[Seat]) -> list[Facts]:
    """Facts of the nodes, which have the numbers of the plan."""
    return [replace(seat.facts, node=number) for number, seat in enumerate(seats)]
