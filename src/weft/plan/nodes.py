"""A plan whose ranks are on several nodes: how many on each, and their devices and cores there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import msgspec

from weft.checkpoint.architectures.shape import ModelShape
from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError
from weft.formatting import format_bytes
from weft.machine.hardware.host import Host
from weft.plan.devices import device_kind, rank_cores
from weft.plan.parallelism import asked_parallelism
from weft.plan.plan import Plan, RankDevice
from weft.plan.split import split


def divide_nodes(nodes: int, replicas: int) -> list[range]:
    """The nodes of each replica: neighbours, as many for each as the numbers allow.

    With as many replicas as nodes or more, each lies inside one node.
    """
    if replicas <= nodes:
        return split(nodes, [1.0] * replicas, minimum=1)
    owners = split(replicas, [1.0] * nodes, minimum=1)
    return [range(node, node + 1) for node, numbers in enumerate(owners) for _ in numbers]


def place_on_node(nodes: int, replicas: int, replica: int, node: int) -> tuple[int, int]:
    """Number of a replica among those on a node, and their count."""
    numbers = [number for number, group in enumerate(divide_nodes(nodes, replicas)) if node in group]
    return numbers.index(replica), len(numbers)


def part_of_node(host: Host, number: int, count: int, *, on_cpu: bool) -> Host:
    """The part of a machine that one of `count` replicas has: its share of the GPUs, else of the cores and memory.

    Raises ConfigError for more replicas than GPUs or cores.
    """
    if count == 1:
        return host
    have, kind = (len(host.cores), "core") if on_cpu else (len(host.gpus), "GPU")
    if count > have:
        raise ConfigError(
            f"{host.hostname} would have {count} replicas, and has {have} {kind}{'s' * (have != 1)}; "
            "lower --data-parallel-size, or add nodes",
            code="more-replicas-than-devices",
        )
    cores, gpus = split(len(host.cores), [1.0] * count)[number], split(len(host.gpus), [1.0] * count)[number]
    if len(host.cores) < count:
        cores = range(len(host.cores))
    return msgspec.structs.replace(
        host,
        gpus=host.gpus[gpus.start : gpus.stop],
        cores=host.cores[cores.start : cores.stop],
        memory_free_bytes=host.memory_free_bytes // count,
    )


def joined_host(hosts: Sequence[Host]) -> Host:
    """All nodes as if they were one machine: its GPUs are numbered through, and its cores are the first node's."""
    gpus = [gpu for host in hosts for gpu in host.gpus]
    return msgspec.structs.replace(
        hosts[0],
        memory_total_bytes=sum(host.memory_total_bytes for host in hosts),
        memory_free_bytes=sum(host.memory_free_bytes for host in hosts),
        gpus=tuple(msgspec.structs.replace(gpu, index=number) for number, gpu in enumerate(gpus)),
        pairs=(),
    )


def divide_ranks(tensor_parallel: int, stages: int, most: Sequence[int | None]) -> tuple[int, ...]:
    """Number of ranks on each node, in rank order.

    `stages` counts the tensor-parallel groups. `most` is the number of devices of each node, None for any number. A
    group stays inside a node if the sizes allow it. Raises PlanError if the nodes have fewer devices, or if one would
    get no rank.
    """
    ranks = tensor_parallel * stages
    rooms = [ranks if room is None else room for room in most]
    if ranks < len(most):
        raise PlanError(
            f"{ranks} {'rank' if ranks == 1 else 'ranks'} for {len(most)} nodes leave some without one; raise "
            f"--pipeline-parallel-size, or start --nnodes {ranks}",
            code="fewer-ranks-than-nodes",
        )
    if sum(rooms) < ranks:
        raise PlanError(
            f"{ranks} ranks need as many devices, and the {len(rooms)} nodes have {' + '.join(map(str, rooms))}; lower "
            "--tensor-parallel-size or --pipeline-parallel-size, or add nodes",
            code="more-ranks-than-gpus",
        )
    groups = _fill([room // tensor_parallel for room in rooms], stages)
    if groups is not None:
        return tuple(count * tensor_parallel for count in groups)
    counts = _fill(rooms, ranks)
    if counts is None:
        raise PlanError(
            f"a node without a GPU cannot take any of the {ranks} ranks; leave it out, or use --device cpu",
            code="node-without-gpu",
        )
    return tuple(counts)


def _fill(rooms: Sequence[int], total: int) -> list[int] | None:
    """Divide `total` over nodes with these limits, at least one on each, as evenly as they allow; None if not."""
    if total < len(rooms) or sum(rooms) < total or not all(rooms):
        return None
    counts = [len(part) for part in split(total, [1.0] * len(rooms), minimum=1)]
    surplus = sum(max(0, count - room) for count, room in zip(counts, rooms, strict=True))
    counts = [min(count, room) for count, room in zip(counts, rooms, strict=True)]
    for node, room in enumerate(rooms):
        more = min(surplus, room - counts[node])
        counts[node] += more
        surplus -= more
    return counts


def config_over_nodes(config: EngineConfig, shape: ModelShape, hosts: Sequence[Host]) -> EngineConfig:
    """The config with what it leaves open: a stage per node, cut over the GPUs of the node that has the fewest.

    Raises ConfigError for options that say how one machine's devices are used.
    """
    for name in ("device_ids", "device_map", "max_memory"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} numbers the devices of one node; with --nnodes leave it out, and limit "
                "each node with its own CUDA_VISIBLE_DEVICES",
                code="devices-of-one-node",
            )
    if config.executor == "inline":
        raise ConfigError(
            "--distributed-executor-backend inline runs all ranks in one process; leave it out with --nnodes",
            code="inline-over-nodes",
        )
    cut = asked_parallelism(vars(config))
    if cut.tensor_parallel or cut.pipeline_parallel or config.plan is not None:
        return config
    gpus = min(len(host.gpus) for host in hosts) if device_kind(config, joined_host(hosts)) == "cuda" else 1
    tensor = max(size for size in range(1, max(1, gpus) + 1) if shape.kv_heads % size == 0)
    return replace(config, tensor_parallel_size=tensor, pipeline_parallel_size=len(hosts))


def seats(config: EngineConfig, hosts: Sequence[Host], counts: Sequence[int]) -> EngineConfig:
    """The config with the GPUs of `joined_host` that the ranks run on: the first ones of each node."""
    if device_kind(config, joined_host(hosts)) == "cpu":
        return config
    before = accumulate((len(host.gpus) for host in hosts), initial=0)
    ids = tuple(first + number for first, count in zip(before, counts, strict=False) for number in range(count))
    return replace(config, device_ids=ids)


def over_nodes(plan: Plan, hosts: Sequence[Host], counts: Sequence[int]) -> Plan:
    """A plan for `joined_host`, with each rank's node, and its device and cores there."""
    nodes = [node for node, count in enumerate(counts) for _ in range(count)]
    before = list(accumulate((len(host.gpus) for host in hosts), initial=0))
    devices = tuple(
        RankDevice(
            node, device.kind, hosts[node].gpus[device.index - before[node]].index if device.kind == "cuda" else 0
        )
        for node, device in zip(nodes, plan.devices, strict=True)
    )
    cores = tuple(
        part
        for node, host in enumerate(hosts)
        for part in rank_cores(host, [device.name for device in devices if device.node == node])
    )
    return msgspec.structs.replace(plan, devices=devices, cores=cores)


def on_other_nodes(plan: Plan, first: int) -> Plan:
    """The plan with its nodes numbered from `first`."""
    devices = tuple(msgspec.structs.replace(device, node=device.node + first) for device in plan.devices)
    return msgspec.structs.replace(plan, devices=devices)


@contextmanager
def named_gpus(hosts: Sequence[Host]) -> Iterator[None]:
    """Have a PlanError about a GPU of `joined_host`, for example about taken memory, say which host it is on."""
    try:
        yield
    except PlanError as error:
        gpus = [(node, number) for node, host in enumerate(hosts) for number in range(len(host.gpus))]
        device = re.search(r"\bcuda:(\d+)", str(error))
        if device is None or int(device[1]) >= len(gpus):
            raise
        node, number = gpus[int(device[1])]
        where = f"{device[0]} is GPU {number} of node {node} ({hosts[node].hostname})"
        raise PlanError(f"{error}; {where}", code=error.code) from None


def check_node_memory(plan: Plan, hosts: Sequence[Host]) -> None:
    """Raise PlanError for a node whose free memory does not hold the weights of its CPU ranks."""
    if not plan.on_cpu:
        return
    for node, host in enumerate(hosts[: plan.nodes]):
        need = sum(plan.weight_bytes(rank) for rank in plan.ranks_of(node))
        if need > host.memory_free_bytes:
            raise PlanError(
                f"the ranks of node {node} ({host.hostname}) have {format_bytes(need)} of weights, and "
                f"{format_bytes(host.memory_free_bytes)} of its memory are free; free some, add nodes, or give it "
                "fewer layers with --pipeline-split",
                code="node-without-memory",
            )


def crossing_groups(plan: Plan) -> list[list[int]]:
    """Tensor-parallel groups with ranks on several nodes."""
    return [ranks for ranks in plan.tensor_groups if not plan.on_one_node(ranks)]


def crossing_warning(plan: Plan, round_trip_s: float | None) -> str:
    """Warning about tensor-parallel groups that span nodes, with the predicted cost; "" if there are none.

    Each layer adds up two partial results, and the embedding one. In each of them a decode step waits for a message,
    half a round trip, on CPUs (comm.gloo), and for one there and one back on GPUs, where NCCL adds up.
    """
    groups = crossing_groups(plan)
    if not groups:
        return ""
    layers = sum(len(plan.places[ranks[0]].layers) for ranks in groups)
    sums = 2 * layers + 1
    cost = f"{sums} sums per token cross the network"
    if round_trip_s is not None:
        each_s = round_trip_s / 2 if plan.on_cpu else round_trip_s
        cost += f", at least {1000 * sums * each_s:.1f} ms at {1e6 * each_s:.0f} us each"
    nodes, ranks = plan.nodes, len(plan.places)
    tensor = max(size for size in range(1, ranks // nodes + 1) if ranks % size == 0)
    return (
        f"a tensor-parallel group of {plan.tensor_parallel} ranks spans nodes: {cost}; --tensor-parallel-size {tensor} "
        f"--pipeline-parallel-size {ranks // tensor // plan.data_parallel} keeps each group inside a node"
    )
