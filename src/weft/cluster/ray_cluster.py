"""The nodes of a Ray cluster for an engine: wanted and present resources, facts of each node, and their choice."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from weft import __version__
from weft.cluster import preflight
from weft.cluster.facts import gather_facts, machine_id
from weft.cluster.messages import Facts
from weft.cluster.settings import NodeSettings
from weft.config import EngineConfig
from weft.errors import ConfigError, ModelError, PlanError, WeftError
from weft.executors.keys import VARIABLE, load_key
from weft.executors.ray_nodes import NODE_LABEL, RayNode, RayNodes
from weft.executors.tls import load_certificate
from weft.formats.checkpoint import Checkpoint
from weft.hardware.addresses import check_private
from weft.hardware.host import Host, probe_host
from weft.plan.devices import device_kind
from weft.plan.layout import expert_cut, rank_cut
from weft.plan.nodes import config_over_nodes
from weft.plan.opening import resolve_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

log = logging.getLogger("weft.cluster")

NO_TOKEN = (
    "this Ray cluster asks for no token: whoever reaches its ports can run code on it; ray get-auth-token --generate, "
    "copy ~/.ray/auth_token to all nodes, and set RAY_AUTH_MODE=token for ray start and for Weft"
)
FACTS_S = 30.0  # seconds for all nodes to report


class Seat(msgspec.Struct, frozen=True):
    """A node of the cluster, the number of ranks that it has room for, and its facts."""

    node: RayNode
    room: int
    facts: Facts

    @property
    def label(self) -> str:
        return f"{self.node.label} with room for {self.room}"


class RayAssembly:
    """The nodes of an engine on Ray, checked."""

    def __init__(self, nodes: RayNodes, seats: Sequence[Seat]) -> None:
        self.nodes, self._seats = nodes, seats
        self.round_trip_s: float | None = None

    @property
    def hosts(self) -> list[Host]:
        return [seat.facts.host for seat in self._seats]

    @property
    def rooms(self) -> list[int | None]:
        """Number of ranks that each node has room for."""
        return [seat.room for seat in self._seats]

    def dismiss(self, error: BaseException) -> None:
        """Nobody waits."""

    def hand_over(self) -> RayNodes:
        return self.nodes


def uses_ray(config: EngineConfig, host: Host, environment: Mapping[str, str]) -> bool:
    """Return True if the ranks shall run on Ray.

    Without a backend in the config: if this process runs in a placement group, or if the sizes exceed this node's GPUs
    and RAY_ADDRESS names a cluster.
    """
    if config.executor is not None or config.nnodes not in (None, 1):
        return config.executor == "ray"
    ranks = (config.tensor_parallel_size or 1) * (config.pipeline_parallel_size or 1)
    if environment.get("RAY_ADDRESS") and host.gpus and ranks > len(host.gpus):
        return True
    return bool(environment.get("RAY_JOB_ID")) and _in_placement_group()


def _in_placement_group() -> bool:
    try:
        from ray.util import get_current_placement_group
    except ImportError:
        return False
    return get_current_placement_group() is not None


def assemble_on_ray(
    config: EngineConfig, checkpoint: Checkpoint, host: Host, environment: Mapping[str, str] = os.environ
) -> RayAssembly:
    """Join a Ray cluster, or start a local one, and choose the nodes of an engine.

    Raises ConfigError if Ray is missing or a check fails, and PlanError if the cluster is too small.
    """
    if config.nnodes not in (None, 1):
        raise ConfigError(
            "--nnodes is for the processes executor; Ray knows its nodes: leave it out", code="nnodes-with-ray"
        )
    ray = connect(environment)
    on_cpu = device_kind(config, host) == "cpu"
    seats = find_seats(ray, config, on_cpu)
    chosen = choose_seats(config, checkpoint, seats)
    check_seats(chosen, config)
    own = ray.util.get_node_ip_address()
    if any(seat.facts.machine != machine_id() for seat in chosen):
        for address in (own, *(seat.node.address for seat in chosen)):
            check_private(address, config.allow_public)
    cluster = ray.get_runtime_context().gcs_address
    nodes = RayNodes(
        cluster,
        own,
        actors_key(config, environment),
        float(config.start_timeout),
        tuple(seat.node for seat in chosen),
        load_certificate(config.cluster_cert_file),
    )
    return RayAssembly(nodes, chosen)


def actors_key(config: EngineConfig, environment: Mapping[str, str]) -> bytes:
    """Key by which the actors prove themselves: the user's, else a new one, which Ray brings to them.

    Raises ConfigError for a key that is short, or whose file others may read.
    """
    if config.cluster_key_file is not None or environment.get(VARIABLE, "").strip():
        return load_key(config.cluster_key_file, environment, config.nnodes or 1)
    return secrets.token_hex(32).encode()


def connect(environment: Mapping[str, str], *, may_start: bool = True) -> Any:
    """Connect to RAY_ADDRESS, a running cluster or, if it may start, a local one; return the module `ray`.

    Raises ConfigError.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed; pip install 'weft[ray]'", code="no-ray") from None
    if ray.is_initialized():
        return ray
    address = environment.get("RAY_ADDRESS")
    try:
        try:
            ray.init(address=address or "auto", logging_level=logging.WARNING)
        except ConnectionError:
            if address or not may_start:
                raise
            log.info("no Ray cluster runs here: starting a local one")
            ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)
    except ray.exceptions.AuthenticationError:
        raise ConfigError(
            f"the Ray cluster at {address or 'this machine'} asks for its token; set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN_PATH to the file with it (without: ~/.ray/auth_token)",
            code="ray-token",
        ) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cannot join the Ray cluster at {address or 'this machine'}: {' '.join(str(error).split())[:300]}; check "
            "RAY_ADDRESS, and `ray status`",
            code="no-ray-cluster",
        ) from None
    if may_start and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        log.warning("%s", NO_TOKEN)
    return ray


def find_seats(ray: Any, config: EngineConfig, on_cpu: bool) -> list[Seat]:
    """The cluster's nodes with room for ranks, this process's own first, each with its facts. Raises ConfigError."""
    own = ray.get_runtime_context().get_node_id()
    kind = "CPU" if on_cpu else "GPU"
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(kind, 0) >= 1]
    alive.sort(key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"], node["NodeID"]))
    if not alive:
        raise PlanError(
            f"no node of the Ray cluster has a {kind}; ray start --num-{kind.lower()}s N gives it some",
            code="ray-without-devices",
        )
    facts = gather_from(ray, [node["NodeID"] for node in alive], config)
    return [
        Seat(
            RayNode(node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"]),
            int(node["Resources"][kind]),
            one,
        )
        for node, one in zip(alive, facts, strict=True)
    ]


def gather_from(ray: Any, ids: Iterable[str], config: EngineConfig) -> list[Facts]:
    """Facts of nodes, from a task on each. Raises ConfigError for a node that does not report in time."""
    question = msgspec.json.encode(config)
    task = ray.remote(report_facts)
    asked = {
        node: task.options(num_cpus=0, max_retries=0, label_selector={NODE_LABEL: node}).remote(number, question)
        for number, node in enumerate(ids)
    }
    facts = []
    for node, answer in asked.items():
        try:
            facts.append(msgspec.json.decode(ray.get(answer, timeout=FACTS_S), type=Facts))
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError, msgspec.DecodeError) as error:
            lines = str(error).strip().splitlines() or [f"no answer within {FACTS_S:g} s"]
            raise ConfigError(
                f"Ray node {node[:8]} does not report: {lines[-1]}; install Weft {__version__} there, for the Python "
                "that runs Ray",
                code="ray-node-not-reporting",
            ) from None
    return facts


def report_facts(number: int, question: bytes) -> bytes:
    """Report of the node on which this task runs, as JSON of Facts."""
    config = msgspec.json.decode(question, type=EngineConfig)
    checkpoint: Checkpoint | WeftError
    try:
        checkpoint = resolve_checkpoint(config)
    except ModelError as error:
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
    return msgspec.json.encode(msgspec.structs.replace(facts, node=number))


def choose_seats(config: EngineConfig, checkpoint: Checkpoint, seats: Sequence[Seat]) -> list[Seat]:
    """The first nodes that hold all ranks with every tensor-parallel group inside a node, else that hold all ranks.

    Raises PlanError, with the wanted and the present resources, if the cluster is too small.
    """
    shape = checkpoint.shape
    config = config_over_nodes(config, shape, [seat.facts.host for seat in seats])
    weights, stages = rank_cut(config, shape)
    groups = len(stages) * expert_cut(config, shape, len(weights)).data_parallel
    tensor = len(weights)
    for count in range(1, len(seats) + 1):
        if sum(seat.room // tensor for seat in seats[:count]) >= groups:
            return [seat for seat in seats[:count] if seat.room >= tensor]
    for count in range(1, len(seats) + 1):
        if sum(seat.room for seat in seats[:count]) >= tensor * groups:
            return list(seats[:count])
    present = ", ".join(seat.label for seat in seats)
    raise PlanError(
        f"{tensor * groups} ranks are wanted, and the Ray cluster has {present}; lower --tensor-parallel-size or "
        "--pipeline-parallel-size, or start Ray on more machines",
        code="ray-too-small",
    )


def check_seats(seats: Sequence[Seat], config: EngineConfig) -> None:
    """Raise ConfigError for the first node that fails the preflight."""
    facts = [msgspec.structs.replace(seat.facts, node=number) for number, seat in enumerate(seats)]
    found = preflight.failures(facts, (), f"weft pull {shlex.quote(config.model)}")
    for failure in found[1:]:
        log.error("%s", failure)
    if found:
        raise ConfigError(found[0], code="preflight")
    for seat, one in zip(seats, facts, strict=True):
        log.info("%s: node %d of the plan, %d cores", seat.label, one.node, len(one.host.cores))
