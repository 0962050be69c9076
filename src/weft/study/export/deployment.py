"""Deployment: a plan's servers, with their nodes, GPUs and ports, for the target that starts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from weft.machine.hardware.gpus import GpuSpec
from weft.machine.hardware.topology import DRIVER_BYTES
from weft.planner.memory.footprint import EngineMemory, RankMemory
from weft.planner.note import Note
from weft.planner.profiles import engine_profile
from weft.planner.question import Question
from weft.planner.search.domains import cluster_devices
from weft.planner.search.ranking import Candidate
from weft.study.export.checkpoint import CheckpointSource

SURE = 0.9  # of the longest planned request: the engine measures its memory, the plan only computes it
ROUND = 1024  # tokens; a length that memory limits is a multiple of this


class NodeShare(msgspec.Struct, frozen=True):
    """The part of a replica on one node: `gpus` are the GPUs' names there in rank order; a GPU that holds several ranks
    is listed for each."""

    node: int
    gpus: tuple[str, ...]


class ReplicaServer(msgspec.Struct, frozen=True):
    """A server on one port of its first node: one replica, or all replicas if they share their experts."""

    number: int
    replicas: tuple[tuple[NodeShare, ...], ...]
    port: int

    @property
    def node(self) -> int:
        """The node whose port the server answers on."""
        return self.replicas[0][0].node

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes of its GPUs, its own node first."""
        return tuple(dict.fromkeys(share.node for replica in self.replicas for share in replica))

    def gpus(self, node: int) -> tuple[str, ...]:
        """Its GPUs on a node, each once."""
        shares = (share for replica in self.replicas for share in replica if share.node == node)
        return tuple(dict.fromkeys(gpu for share in shares for gpu in share.gpus))


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a target's files. `names` are the model's names in the API; `gaps` are the differences from the plan
    that the user asked for."""

    question: Question
    candidate: Candidate
    checkpoint: CheckpointSource
    names: tuple[str, ...]
    servers: tuple[ReplicaServer, ...]
    gaps: tuple[Note, ...] = ()

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes in use, in ascending order."""
        return tuple(sorted({node for server in self.servers for node in server.nodes}))

    @property
    def spans_nodes(self) -> bool:
        """True if one server's GPUs are on several nodes."""
        return any(len(server.nodes) > 1 for server in self.servers)

    @property
    def gpu(self) -> GpuSpec:
        """Type of the first GPU."""
        return self.question.cluster.gpus[self.candidate.layout.gpus[0]]

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens: the user's setting, else the model's context length, or less if the KV cache is
        not sure to hold one such request per replica."""
        work, memory, most = self.question.workload, self.candidate.memory, self.question.shape.longest
        if work.max_model_len:
            return work.max_model_len
        if memory.max_concurrency(most) * SURE >= self.candidate.layout.parallelism.data_parallel:
            return most
        sure = int(memory.longest * SURE)
        return max(work.longest, sure - sure % ROUND)

    def memory_shares(self, server: ReplicaServer | None = None, *, held: bool = False) -> tuple[float, ...]:
        """Share of its GPU's memory that each rank of a replica takes: the largest over a server's replicas, or over
        all.

        With `held` the shares include what other processes hold.
        """
        shares = [
            [_round_up((rank.usable_bytes + held * gpu.held_bytes) / rank.memory_bytes) for rank, gpu in ranks]
            for ranks in self._ranks(server)
        ]
        return tuple(map(max, zip(*shares, strict=True)))

    def free_share(self, server: ReplicaServer | None = None) -> float:
        """Share of memory that is free on every GPU of a server, or of all; 1.0 if other processes hold nothing."""
        gpus = (gpu for ranks in self._ranks(server) for _, gpu in ranks if gpu.held_bytes)
        return min((_round_down(1 - (gpu.held_bytes + DRIVER_BYTES) / gpu.memory_bytes) for gpu in gpus), default=1.0)

    def _ranks(self, server: ReplicaServer | None) -> Iterator[list[tuple[RankMemory, GpuSpec]]]:
        """Ranks of each replica with their GPUs."""
        layout, gpus, replicas = self.candidate.layout, self.question.cluster.gpus, self.candidate.memory.replicas
        numbers = [server.number] if server and len(server.replicas) == 1 else range(layout.parallelism.data_parallel)
        for number in numbers:
            own_gpus = (gpus[index] for _, index in layout.replica(number))
            yield list(zip(replicas[number].ranks, own_gpus, strict=True))

    @property
    def batch(self) -> tuple[int, int]:
        """Most tokens of a step and most requests at once, as assumed by the plan's memory."""
        question, layout, memory = self.question, self.candidate.layout, self.candidate.memory
        profile, gpus = engine_profile(question), question.cluster.gpus
        holding = EngineMemory(question.shape, layout.precision, layout.kv_dtype, profile)
        limits = []
        for (place, index), rank in zip(layout.replica(0), memory.replicas[0].ranks, strict=True):
            usual = holding.rank(place, gpus[index])
            is_smaller = rank.activation_bytes != usual.activation_bytes
            limits.append(profile.batch_limits(0 if is_smaller else gpus[index].memory_bytes))
        return min(tokens for tokens, _ in limits), min(requests for _, requests in limits)


def plan_servers(
    question: Question, candidate: Candidate, port: int, visible: Sequence[str] = ()
) -> tuple[ReplicaServer, ...]:
    """Servers of a plan; ports count up from `port` on each node, or are 0 if `port` is 0.

    `visible` are the GPUs' names if the plan sees only a part of the machine's GPUs (CUDA_VISIBLE_DEVICES).
    """
    layout, gpus = candidate.layout, cluster_devices(question.cluster)
    first = {device.node: device.number for device in reversed(gpus)}
    replicas: list[tuple[NodeShare, ...]] = []
    for number in range(layout.parallelism.data_parallel):
        by_node: dict[int, list[str]] = {}
        for _, index in layout.replica(number):
            node = gpus[index].node
            local = index - first[node]
            by_node.setdefault(node, []).append(visible[local] if visible else f"{local}")
        replicas.append(tuple(NodeShare(node, tuple(names)) for node, names in by_node.items()))
    if layout.parallelism.shares_experts:
        return (ReplicaServer(0, tuple(replicas), port),)
    planned: list[ReplicaServer] = []
    for number, replica in enumerate(replicas):
        before = sum(server.node == replica[0].node for server in planned)
        planned.append(ReplicaServer(number, (replica,), port and port + before))
    return tuple(planned)


def _round_up(share: float) -> float:
    """Round up to three digits."""
    return -(-round(share * 1e6) // 1000) / 1000


def _round_down(share: float) -> float:
    """Round down to three digits."""
    return round(share * 1e6) // 1000 / 1000
