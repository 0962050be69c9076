"""The nodes of a Ray cluster for an engine: wanted and present resources, facts of each node, and their choice."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec
from msgspec.structs import replace

from weft import __version__
from weft.cluster import preflight
from weft.cluster.facts import gather_facts, machine_id
from weft.cluster.groups import Cancelled
from weft.cluster.messages import Facts
from weft.cluster.ray_bundles import OwnGroup, own_group
from weft.cluster.ray_seats import Occupied, Seat, beside, choose_for_replicas
from weft.cluster.settings import NodeSettings, replica_count
from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError, WeftError, error_reason
from weft.executors.keys import VARIABLE, load_key
from weft.executors.ray_nodes import NODE_LABEL, RayNode, RayNodes
from weft.executors.tls import load_certificate
from weft.formats.checkpoint import Checkpoint
from weft.hardware.addresses import check_private
from weft.hardware.host import Host, probe_host
from weft.plan.devices import device_kind
from weft.plan.opening import resolve_checkpoint

log = logging.getLogger("weft.cluster")

NO_TOKEN = (
    "this Ray cluster asks for no token: whoever reaches its ports can run code on it; ray get-auth-token --generate, "
    "copy ~/.ray/auth_token to all nodes, and set RAY_AUTH_MODE=token for ray start and for Weft"
)
SAY_S = 10.0  # seconds between two log lines on a node that has not reported yet
ANSWER_S = 2.0  # for a connection to RAY_ADDRESS, before the backend is chosen
AGAIN_S = 30.0  # seconds to wait for resources before a replica that starts again looks for others


class RayGroup:
    """The nodes of one engine on Ray, checked. Each has room for exactly the ranks that it gets."""

    first = 0
    round_trip_s: float | None = None

    def __init__(self, nodes: RayNodes, seats: Sequence[Seat]) -> None:
        self.nodes, self.seats = nodes, seats

    @property
    def hosts(self) -> list[Host]:
        return [seat.facts.host for seat in self.seats]

    @property
    def rooms(self) -> list[int | None]:
        return [seat.room for seat in self.seats]

    def dismiss(self, error: BaseException) -> None:
        """Nobody waits."""

    def hand_over(self) -> RayNodes:
        return self.nodes


class RayAssembly:
    """The nodes of an engine, or of several replicas, on Ray. `groups` are those of each replica."""

    def __init__(self, groups: list[RayGroup], gather: Callable[[Occupied, int], RayGroup], *, lasting: bool) -> None:
        """`gather` finds nodes of one replica beside those that are occupied, so many if the config has no sizes."""
        self.groups, self.lasting = groups, lasting
        self._gather = gather
        self._lock = threading.Lock()  # so that two replicas do not choose the same resources

    def gather_again(self, number: int, cancelled: Cancelled) -> RayGroup:
        """Find nodes for a replica whose engine has ended. Raises ConfigError, and PlanError if there are too few."""
        with self._lock:
            others = [group for replica, group in enumerate(self.groups) if replica != number]
            self.groups[number] = self._gather(occupied_by(others), len(self.groups[number].seats))
            return self.groups[number]

    def dismiss(self, error: BaseException) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is open."""


def occupied_by(groups: Iterable[RayGroup]) -> Occupied:
    """Number of ranks that engines have on each node, by Ray's id of it."""
    ranks: Counter[str] = Counter()
    for group in groups:
        for seat in group.seats:
            ranks[seat.node.id] += seat.room
    return ranks


def uses_ray(config: EngineConfig, host: Host, environment: Mapping[str, str]) -> bool:
    """Return True if the ranks shall run on Ray.

    Without a backend in the config: if this process runs in a placement group, or if the sizes exceed this node's GPUs
    and a cluster answers at RAY_ADDRESS.
    """
    if config.executor is not None or config.nnodes not in (None, 1):
        return config.executor == "ray"
    on_cpu = config.device == "cpu" or (config.device == "auto" and not host.gpus)
    if not on_cpu and sized_ranks(config) > len(host.gpus) and _cluster_answers(environment.get("RAY_ADDRESS", "")):
        return True
    return bool(environment.get("RAY_JOB_ID")) and _in_placement_group()


def sized_ranks(config: EngineConfig) -> int:
    """Number of ranks by the sizes of a config; those that are left out count as 1."""
    tensor = len(config.tensor_split) if config.tensor_split else config.tensor_parallel_size or 1
    stages = len(config.pipeline_split) if config.pipeline_split else config.pipeline_parallel_size or 1
    groups = config.data_parallel_size or 1 if config.enable_expert_parallel else 1
    return tensor * stages * groups


def _cluster_answers(address: str) -> bool:
    """Return True if somebody listens at an address of RAY_ADDRESS. A word such as "auto" means a cluster here."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return bool(address) and address != "local"
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError as error:
        log.warning("no Ray cluster answers at RAY_ADDRESS=%s: %s", address, error_reason(error))
        return False
    return True


def _in_placement_group() -> bool:
    try:
        from ray.util import get_current_placement_group
    except ImportError:
        return False
    return get_current_placement_group() is not None


def assemble_on_ray(
    config: EngineConfig,
    checkpoint: Checkpoint,
    host: Host,
    environment: Mapping[str, str] = os.environ,
    *,
    lasting: bool = False,
) -> RayAssembly:
    """Join a Ray cluster, or start a local one, and choose the nodes of an engine, or of several replicas.

    With `lasting`, and for several replicas, engines start again after a failure. Raises ConfigError if Ray is missing
    or a check fails, and PlanError if the cluster is too small.
    """
    if config.nnodes not in (None, 1):
        raise ConfigError(
            "--nnodes is for the processes executor; Ray knows its nodes: leave it out", code="nnodes-with-ray"
        )
    on_cpu = device_kind(config, host) == "cpu"
    key, count = actors_key(config, environment), replica_count(config)
    lasting = lasting or count > 1

    def gather(replicas: int, occupied: Occupied, timeout_s: float, share: int | None = None) -> list[RayGroup]:
        with connected(environment, briefly=lasting) as ray:
            own = own_group(ray, "CPU" if on_cpu else "GPU")
            seats = find_seats(ray, config, on_cpu, own)
            if own is None:
                chosen = choose_for_replicas(config, checkpoint, beside(seats, occupied), replicas, share)
            else:  # bundles that engines have are not free
                where = "this process's placement group"
                chosen = choose_for_replicas(config, checkpoint, seats, replicas, share, where)
            groups = [_checked_group(ray, one, config, key, timeout_s) for one in chosen]
            return groups if own is None else with_bundles(groups, own)

    groups = gather(count, {}, float(config.start_timeout))
    # A replica that starts again looks anew, rather than wait long for nodes that are gone.
    again_s = min(float(config.start_timeout), AGAIN_S)
    return RayAssembly(groups, lambda occupied, share: gather(1, occupied, again_s, share)[0], lasting=lasting)


def _checked_group(ray: Any, seats: Sequence[Seat], config: EngineConfig, key: bytes, timeout_s: float) -> RayGroup:
    """The group of these seats. Raises ConfigError if a check fails."""
    check_seats(seats, config)
    own = ray.util.get_node_ip_address()
    if any(seat.facts.machine != machine_id() for seat in seats):
        for address in (own, *(seat.node.address for seat in seats)):
            check_private(address, config.allow_public)
    cluster = ray.get_runtime_context().gcs_address
    certificate = load_certificate(config.cluster_cert_file)
    nodes = RayNodes(cluster, own, key, timeout_s, tuple(seat.node for seat in seats), certificate)
    return RayGroup(nodes, seats)


def with_bundles(groups: Sequence[RayGroup], own: OwnGroup) -> list[RayGroup]:
    """The groups of nodes, each rank of theirs with a bundle of this process's placement group."""
    placed = []
    for group in groups:
        own, taken = own.take({seat.node.id: seat.room for seat in group.seats})
        bundles = tuple(taken[seat.node.id] for seat in group.seats)
        placed.append(RayGroup(replace(group.nodes, placement_group=own.id, bundles=bundles), group.seats))
    return placed


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
    ray = _import_ray()
    _open_connection(ray, environment, may_start=may_start)
    return ray


@contextmanager
def connected(environment: Mapping[str, str], *, briefly: bool) -> Iterator[Any]:
    """The module `ray` with a connection, as of `connect`.

    With `briefly`, a connection that this makes ends with it: a process that is connected ends when its cluster does.
    A local cluster that it has started goes on.
    """
    ray = _import_ray()
    joined = _open_connection(ray, environment, may_start=True)
    try:
        yield ray
    finally:
        if briefly and joined:
            ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed; pip install 'weft[ray]'", code="no-ray") from None
    return ray


def _open_connection(ray: Any, environment: Mapping[str, str], *, may_start: bool) -> bool:
    """Connect this process to a cluster, or start a local one; return True if it has joined one that was there.

    Raises ConfigError.
    """
    if ray.is_initialized():
        return False
    address = environment.get("RAY_ADDRESS")
    try:
        try:
            ray.init(address=address or "auto", logging_level=logging.WARNING)
            if may_start:
                _warn_without_token()
            return True
        except ConnectionError:
            if address or not may_start:
                raise
            log.info("no Ray cluster runs here: starting a local one")
            ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)
            _warn_without_token()
            return False
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


@cache
def _warn_without_token() -> None:
    """Warn once that the cluster asks for no token."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        log.warning("%s", NO_TOKEN)


def find_seats(ray: Any, config: EngineConfig, on_cpu: bool, group: OwnGroup | None = None) -> list[Seat]:
    """The cluster's nodes with room for ranks, this process's own first, each with its facts.

    With a placement group of this process the room is that of its free bundles. Raises ConfigError, and PlanError if no
    node has room.
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
        Seat(
            RayNode(node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"]),
            rooms[node["NodeID"]],
            one,
        )
        for node, one in zip(alive, facts, strict=True)
    ]


def gather_from(ray: Any, ids: Iterable[str], config: EngineConfig) -> list[Facts]:
    """Facts of nodes, from a task on each. Raises ConfigError for a node that does not report within --start-timeout,
    or that dies before, which Ray finds out by itself: on a busy machine Ray takes long to start a worker."""
    question = msgspec.json.encode(config)
    task = ray.remote(report_facts)
    questions = {
        node: task.options(num_cpus=0, max_retries=0, label_selector={NODE_LABEL: node}).remote(number, question)
        for number, node in enumerate(ids)
    }
    facts = []
    deadline = time.monotonic() + config.start_timeout
    for node, answer in questions.items():
        while not ray.wait([answer], timeout=min(SAY_S, max(0.0, deadline - time.monotonic())))[0]:
            if time.monotonic() >= deadline:
                break
            log.info("waiting for Ray node %s to report", node[:8])
        try:
            facts.append(msgspec.json.decode(ray.get(answer, timeout=0), type=Facts))
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError, msgspec.DecodeError) as error:
            lines = str(error).strip().splitlines() or [f"no answer within {config.start_timeout:g} s"]
            raise ConfigError(
                f"Ray node {node[:8]} does not report: {lines[-1]}; {way_out(error)}",
                code="ray-node-not-reporting",
            ) from None
    return facts


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


def check_seats(seats: Sequence[Seat], config: EngineConfig) -> None:
    """Raise ConfigError for the first node that fails the preflight."""
    facts = [replace(seat.facts, node=number) for number, seat in enumerate(seats)]
    problems = [*_other_addresses(seats), *preflight.failures(facts, (), f"weft pull {shlex.quote(config.model)}")]
    for failure in problems[1:]:
        log.error("%s", failure)
    if problems:
        raise ConfigError(problems[0], code="preflight")
    for seat, one in zip(seats, facts, strict=True):
        log.info("%s: node %d of the plan, %d cores", seat.label, one.node, len(one.host.cores))
