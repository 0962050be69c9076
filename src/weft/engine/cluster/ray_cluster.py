"""The nodes of a Ray cluster for an engine: wanted and present resources, facts of each node, and their choice."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from msgspec.structs import replace

from weft.checkpoint.checkpoint import Checkpoint
from weft.config import EngineConfig
from weft.engine.cluster import preflight
from weft.engine.cluster.facts import machine_id
from weft.engine.cluster.groups import Cancelled
from weft.engine.cluster.measured import store_cluster
from weft.engine.cluster.messages import Speed
from weft.engine.cluster.ray_bundles import OwnGroup, own_group
from weft.engine.cluster.ray_facts import check_seats, find_seats, numbered_facts
from weft.engine.cluster.ray_network import measure_seats
from weft.engine.cluster.ray_seats import Occupied, Seat, choose_for_replicas, unoccupied
from weft.engine.cluster.settings import replica_count
from weft.engine.executors.ray_calls import (
    GONE,
    JOIN_S,
    NO_CLUSTER,
    call_bounded,
    call_watched,
    connect_problem,
    is_place,
    join_cluster,
)
from weft.engine.executors.ray_nodes import RayNodes
from weft.engine.processes.keys import VARIABLE, load_key
from weft.engine.processes.tls import load_certificate
from weft.errors import ConfigError
from weft.formatting import extra_hint
from weft.logs import event_fields
from weft.machine.hardware.addresses import check_private, own_interfaces
from weft.machine.hardware.host import Host
from weft.plan.devices import device_kind
from weft.plan.parallelism import asked_parallelism

log = logging.getLogger("weft.cluster")

NO_TOKEN = (
    "this Ray cluster asks for no token: whoever reaches its ports can run code on it; ray get-auth-token --generate, "
    "copy ~/.ray/auth_token to all nodes, and set RAY_AUTH_MODE=token for ray start and for Weft"
)
TOKEN = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with it (without: ~/.ray/auth_token), as the cluster "
    "has them"
)
CONNECT_FAILURE = "Failed to connect to Ray cluster at "  # begins an error of Ray, before the address
# Seconds beyond --start-timeout for what notices its end itself, and says more; and for the measurement of the network,
# which has limits of its own.
LATE_S, MEASURE_S = 10.0, 75.0
LEAVE_S = 10.0  # seconds for the end of a connection, which hangs if the head has gone
AGAIN_S = 30.0  # seconds to wait for resources before a replica that starts again looks for others


class RayGroup:
    """The nodes of one engine on Ray, checked. Each has room for exactly the ranks that it gets."""

    first = 0

    def __init__(self, nodes: RayNodes, seats: Sequence[Seat], speeds: Sequence[Speed] = ()) -> None:
        self.nodes, self.seats, self.speeds = nodes, seats, speeds

    @property
    def hosts(self) -> list[Host]:
        return [seat.facts.host for seat in self.seats]

    @property
    def rooms(self) -> list[int | None]:
        return [seat.room for seat in self.seats]

    @property
    def round_trip_s(self) -> float | None:
        return max((speed.round_trip_s for speed in self.speeds), default=None)

    def dismiss(self, error: BaseException) -> None:
        """No caller waits."""

    def hand_over(self) -> RayNodes:
        return self.nodes


class RayAssembly:
    """The nodes of an engine, or of several replicas, on Ray. `groups` are the nodes of each replica."""

    def __init__(self, groups: list[RayGroup], gather: Callable[[Occupied, int], RayGroup], *, lasting: bool) -> None:
        """`gather` finds nodes of one replica among nodes that are not occupied; it takes this many if the config has
        no sizes."""
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
        """No caller waits."""

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
    """Number of ranks by the sizes of a config; sizes that are left out count as 1."""
    return asked_parallelism(vars(config)).of_one_engine().engine_ranks


def _cluster_answers(address: str) -> bool:
    """Return True if somebody listens at an address of RAY_ADDRESS. A word such as "auto" means a cluster here."""
    if not is_place(address):
        return bool(address) and address != "local"
    if problem := connect_problem(address):
        log.warning("no Ray cluster answers at RAY_ADDRESS=%s: %s", address, problem)
    return not problem


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
        with connected(environment, float(config.start_timeout), briefly=lasting) as ray:
            own = own_group(ray, "CPU" if on_cpu else "GPU")

            head = head_address(ray)
            seats = call_watched(lambda: find_seats(ray, config, on_cpu, own), head, config.start_timeout + LATE_S)
            if own is None:
                chosen = choose_for_replicas(config, checkpoint, unoccupied(seats, occupied), replicas, share)
            else:  # bundles that engines have are not free
                where = "this process's placement group"
                chosen = choose_for_replicas(config, checkpoint, seats, replicas, share, where)

            def check() -> list[RayGroup]:
                return [_checked_group(ray, one, config, key, timeout_s) for one in chosen]

            groups = call_watched(check, head, config.start_timeout + MEASURE_S)
            return groups if own is None else with_bundles(groups, own)

    groups = gather(count, {}, float(config.start_timeout))
    _store(groups)
    # A replica that starts again looks for nodes again, rather than wait long for nodes that are gone.
    again_s = min(float(config.start_timeout), AGAIN_S)
    return RayAssembly(groups, lambda occupied, share: gather(1, occupied, again_s, share)[0], lasting=lasting)


def _store(groups: Sequence[RayGroup]) -> None:
    """Keep all nodes, each once, for `weft plan --cluster` and `weft cluster status`."""
    seats = {seat.node.id: seat for group in groups for seat in group.seats}
    numbers = {id: number for number, id in enumerate(seats)}
    speeds = []
    for group in groups:
        own = [numbers[seat.node.id] for seat in group.seats]
        speeds += [replace(speed, first=own[speed.first], second=own[speed.second]) for speed in group.speeds]
    store_cluster(numbered_facts(list(seats.values())), speeds)


def _checked_group(ray: Any, seats: Sequence[Seat], config: EngineConfig, key: bytes, timeout_s: float) -> RayGroup:
    """The group of these seats, with the network between them. Raises ConfigError if a check fails."""
    check_seats(seats, config)
    own = ray.util.get_node_ip_address()
    elsewhere = any(seat.facts.machine != machine_id() for seat in seats)
    if elsewhere:
        for address in (own, *(seat.node.address for seat in seats)):
            check_private(address, config.allow_public)
    certificate = load_certificate(config.cluster_cert_file)
    allow = config.allow_public or not elsewhere
    speeds = measure_seats(ray, seats, key, certificate, allow_public=allow, start_s=float(config.start_timeout))
    check_seats(seats, config, speeds)
    facts = numbered_facts(seats)
    for seat, one in zip(seats, facts, strict=True):
        log.info("%s: node %d of the plan", seat.label, one.node)
    for line in preflight.summary(facts, speeds):
        log.info("%s", line)
    nodes = RayNodes(head_address(ray), own, key, timeout_s, tuple(seat.node for seat in seats), certificate)
    return RayGroup(nodes, seats, speeds)


def with_bundles(groups: Sequence[RayGroup], own: OwnGroup) -> list[RayGroup]:
    """The groups of nodes, each rank of theirs with a bundle of this process's placement group."""
    placed = []
    for group in groups:
        own, taken = own.take({seat.node.id: seat.room for seat in group.seats})
        bundles = tuple(taken[seat.node.id] for seat in group.seats)
        nodes = replace(group.nodes, placement_group=own.id, bundles=bundles)
        placed.append(RayGroup(nodes, group.seats, group.speeds))
    return placed


def actors_key(config: EngineConfig, environment: Mapping[str, str]) -> bytes:
    """Key by which the actors prove themselves: the user's, else a new one, which Ray brings to them.

    Raises ConfigError for a key that is short, or whose file others may read.
    """
    if config.cluster_key_file is not None or environment.get(VARIABLE, "").strip():
        return load_key(config.cluster_key_file, environment, config.nnodes or 1)
    return secrets.token_hex(32).encode()


def connect(environment: Mapping[str, str], *, limit_s: float = JOIN_S, may_start: bool = True) -> Any:
    """Connect to RAY_ADDRESS, a running cluster or, if it may start, a local one; return the module `ray`.

    Raises ConfigError, at the latest after `limit_s` seconds for a cluster that does not answer.
    """
    ray = _import_ray()
    _open_connection(ray, environment, limit_s, may_start=may_start)
    return ray


@contextmanager
def connected(environment: Mapping[str, str], limit_s: float, *, briefly: bool) -> Iterator[Any]:
    """The module `ray` with a connection, as of `connect`.

    With `briefly`, a connection that this makes ends with it: a process that is connected ends when its cluster does.
    A local cluster that it has started goes on.
    """
    ray = _import_ray()
    joined = _open_connection(ray, environment, limit_s, may_start=True)
    try:
        yield ray
    except ConfigError as error:
        joined = joined and error.code != GONE  # a call that hangs must not find another connection
        raise
    finally:
        if briefly and joined:
            call_bounded(ray.shutdown, LEAVE_S)


def head_address(ray: Any) -> str:
    """The address, HOST:PORT, of the head of the cluster to which this process is connected."""
    return str(ray.get_runtime_context().gcs_address)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError(f"Ray is not installed: {extra_hint('ray')}", code="no-ray") from None
    return ray


def _open_connection(ray: Any, environment: Mapping[str, str], limit_s: float, *, may_start: bool) -> bool:
    """Connect this process to a cluster, or start a local one; return True if it has joined one that was there.

    Raises ConfigError.
    """
    if ray.is_initialized():
        return False
    address = environment.get("RAY_ADDRESS")
    try:
        try:
            join_cluster(ray, address or _last_cluster(may_start), limit_s)
            if may_start:
                _warn_without_token()
            return True
        except ConnectionError as error:
            if address or not may_start or _is_refused(error):
                raise
            log.info("no Ray cluster runs here: starting a local one", extra=event_fields("local-ray-cluster"))
            ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)
            _warn_without_token()
            return False
    except ray.exceptions.AuthenticationError:
        raise ConfigError(
            f"the Ray cluster at {address or 'this machine'} asks for its token; {TOKEN}", code="ray-token"
        ) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _not_joined(address, error) from None


def _last_cluster(may_start: bool) -> str:
    """Address of the cluster that Ray would join here: of its processes, else of the file that `ray start` has left.

    Raises ConnectionError if there is none, or if the file's cluster was on this machine, is dead, and another one may
    start; and ConfigError for a dead one otherwise.
    """
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:  # another version of Ray has it elsewhere
        return "auto"
    address = str(canonicalize_bootstrap_address("auto"))
    if is_place(address) and (problem := connect_problem(address)):
        dead = (
            f"the Ray cluster at {address}, the last that was started or joined here, does not answer: {problem}; "
            "start it again, set RAY_ADDRESS to another, or forget it with `ray stop`"
        )
        if may_start and address.rpartition(":")[0].strip("[]") in own_interfaces():
            log.warning("%s", dead, extra=event_fields("ray-cluster-dead", address=address))
            raise ConnectionError(dead)
        raise ConfigError(dead, code=GONE)
    return address


def _is_refused(error: Exception) -> bool:
    """Return True if Ray could not connect to a cluster although somebody listens at its address."""
    _, failure, place = str(error).partition(CONNECT_FAILURE)
    return bool(failure) and not connect_problem(place.strip())


def _not_joined(address: str | None, error: Exception) -> ConfigError:
    """The error for a cluster that cannot be joined. Ray does not say that one refuses a program without its token."""
    reason = " ".join(str(error).split())[:300]
    if _is_refused(error):
        return ConfigError(
            f"the Ray cluster at {address or 'this machine'} answers, and does not let this program in: if it has a "
            f"token, {TOKEN}; if not, compare the versions of Ray",
            code="ray-token",
        )
    return ConfigError(
        f"cannot join the Ray cluster at {address or 'this machine'}: {reason}; check RAY_ADDRESS, and `ray status`",
        code=NO_CLUSTER,
    )


@cache
def _warn_without_token() -> None:
    """Warn once that the cluster asks for no token."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        log.warning("%s", NO_TOKEN)
