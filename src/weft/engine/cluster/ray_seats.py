"""Choice of the nodes of a Ray cluster for engines. Pure: takes nodes with room, returns each engine's nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from weft.checkpoint.checkpoint import Checkpoint
from weft.config import EngineConfig
from weft.engine.cluster.messages import Facts
from weft.engine.executors.ray_nodes import RayNode
from weft.errors import PlanError
from weft.plan.layout import engine_parallelism
from weft.plan.nodes import config_over_nodes, divide_ranks
from weft.plan.split import split

CLUSTER = "the Ray cluster"
Occupied = Mapping[str, int]  # number of ranks of other engines on a node, by its id


class Seat(msgspec.Struct, frozen=True):
    """A node of the cluster, the number of ranks that it has room for, and its facts."""

    node: RayNode
    room: int
    facts: Facts

    @property
    def label(self) -> str:
        return f"{self.node.label} with room for {self.room}"


def unoccupied(seats: Sequence[Seat], occupied: Occupied) -> list[Seat]:
    """The seats with the room that others leave."""
    left = [replace(seat, room=seat.room - occupied.get(seat.node.id, 0)) for seat in seats]
    return [seat for seat in left if seat.room > 0]


def choose_for_replicas(
    config: EngineConfig,
    checkpoint: Checkpoint,
    seats: Sequence[Seat],
    replicas: int,
    share: int | None = None,
    where: str = CLUSTER,
) -> list[list[Seat]]:
    """The nodes of each replica, see `choose_seats`. Raises PlanError if the cluster is too small.

    `share` is the number of nodes of a replica without sizes, None for an even share. `where` names the whole of the
    seats in messages.
    """
    chosen: list[list[Seat]] = []
    left, share = list(seats), share or max(1, len(seats) // replicas)
    # Without sizes each replica has nodes of its own, if there are as many.
    hosts = [seat.facts.host for seat in seats]
    whole = len(seats) >= replicas and config_over_nodes(config, checkpoint.shape, hosts) is not config
    for _ in range(replicas):
        taken = choose_seats(config, checkpoint, left, replicas, share, where)
        chosen.append(taken)
        if whole:
            left = left[share:]
        else:
            left = unoccupied(left, {seat.node.id: seat.room for seat in taken})
    return _shared_cores(chosen)


def _shared_cores(chosen: Sequence[Sequence[Seat]]) -> list[list[Seat]]:
    """The seats, each with its share of the cores of a node that several replicas have."""
    counts = Counter(seat.node.id for seats in chosen for seat in seats)
    numbers: Counter[str] = Counter()
    shared = []
    for seats in chosen:
        shared.append([_with_cores(seat, numbers[seat.node.id], counts[seat.node.id]) for seat in seats])
        numbers.update(seat.node.id for seat in seats)
    return shared


def _with_cores(seat: Seat, number: int, count: int) -> Seat:
    host = seat.facts.host
    if not 1 < count <= len(host.cores):
        return seat
    part = split(len(host.cores), [1.0] * count)[number]
    host = replace(host, cores=host.cores[part.start : part.stop], memory_free_bytes=host.memory_free_bytes // count)
    return replace(seat, facts=replace(seat.facts, host=host))


def choose_seats(
    config: EngineConfig,
    checkpoint: Checkpoint,
    seats: Sequence[Seat],
    replicas: int,
    share: int,
    where: str = CLUSTER,
) -> list[Seat]:
    """The nodes for one of `replicas` engines, each node with room for exactly the ranks that it gets.

    One node if one holds all ranks; else the first nodes that hold them with every tensor-parallel group inside a node;
    else the first that hold them. Without sizes in the config, the first `share` nodes. Raises PlanError, with the
    wanted and the present resources, if there are too few.
    """
    shape = checkpoint.shape
    hosts = [seat.facts.host for seat in seats[:share]]
    sized = config_over_nodes(config, shape, hosts) if hosts else config
    cut = engine_parallelism(sized, shape)
    tensor, groups, ranks = cut.tensor_parallel, cut.pipeline_parallel * cut.groups, cut.engine_ranks
    fitting = _first_fitting(seats, tensor, groups) if sized is config else list(seats[:share])
    nodes = 1 if sized is config else share
    if len(fitting) >= nodes and sum(seat.room for seat in fitting) >= ranks:
        counts = divide_ranks(tensor, groups, [seat.room for seat in fitting])
        return [replace(seat, room=count) for seat, count in zip(fitting, counts, strict=True)]
    wanted = f"{ranks} ranks" if nodes == 1 or len(seats) >= nodes else f"{nodes} nodes"
    raise _too_small(wanted, seats, replicas, where)


def _too_small(wanted: str, seats: Sequence[Seat], replicas: int, where: str) -> PlanError:
    """The error for a cluster that has no room for `wanted`, for each of `replicas`."""
    present = ", ".join(seat.label for seat in seats) or "no room left"
    more = "start Ray on more machines" if where == CLUSTER else "give it more bundles"
    if replicas > 1:
        wanted, present = f"{replicas} replicas of {wanted}", f"{present} for the next one"
    return PlanError(
        f"{wanted} are wanted, and {where} has {present}; lower --tensor-parallel-size or --pipeline-parallel-size, or "
        f"{more}",
        code="ray-too-small",
    )


def _first_fitting(seats: Sequence[Seat], tensor: int, groups: int) -> list[Seat]:
    """The first nodes with room for these tensor-parallel groups; [] if there are none."""
    for seat in seats:
        if seat.room >= tensor * groups:
            return [seat]
    whole = [seat for seat in seats if seat.room >= tensor]
    for count in range(1, len(whole) + 1):
        if sum(seat.room // tensor for seat in whole[:count]) >= groups:
            return whole[:count]
    for count in range(1, len(seats) + 1):
        if sum(seat.room for seat in seats[:count]) >= tensor * groups:
            return list(seats[:count])
    return []
