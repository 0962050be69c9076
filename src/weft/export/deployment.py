"""Deployment: a plan as whoever starts it sees it: which GPUs of which node answer on which port."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from weft.export.checkpoint import Checkpoint
from weft.hardware.gpus import GpuSpec
from weft.hardware.topology import DRIVER_BYTES
from weft.planner.domains import devices
from weft.planner.footprint import Holding, RankMemory
from weft.planner.question import Question
from weft.planner.ranking import Candidate
from weft.planner.search import engine_profile

SURE = 0.9  # of the longest request that a plan sees: an engine measures its memory, the plan reckons it
ROUND = 1024  # tokens; lengths that memory limits are multiples of it


class NodeShare(msgspec.Struct, frozen=True):
    """The part of a replica that lies on one node: `gpus` are their numbers there, in rank order; one that holds
    several ranks is named for each."""

    node: int
    gpus: tuple[str, ...]


class ReplicaServer(msgspec.Struct, frozen=True):
    """What answers on one port of its first node: a replica, or all of them where they share their experts."""

    number: int
    replicas: tuple[tuple[NodeShare, ...], ...]
    port: int

    @property
    def node(self) -> int:
        return self.replicas[0][0].node

    @property
    def nodes(self) -> tuple[int, ...]:
        """Where its GPUs are, its own node first."""
        return tuple(dict.fromkeys(share.node for replica in self.replicas for share in replica))

    def gpus(self, node: int) -> tuple[str, ...]:
        """Those on a node, each once."""
        shares = (share for replica in self.replicas for share in replica if share.node == node)
        return tuple(dict.fromkeys(gpu for share in shares for gpu in share.gpus))


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What a target writes down. `names` are what the API knows the model by; `gaps` tell what the target could not
    do of the plan that was asked for."""

    question: Question
    candidate: Candidate
    checkpoint: Checkpoint
    names: tuple[str, ...]
    servers: tuple[ReplicaServer, ...]
    gaps: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[int, ...]:
        """Those that are used, in order."""
        return tuple(sorted({node for server in self.servers for node in server.nodes}))

    @property
    def spans_nodes(self) -> bool:
        """Whether one server's GPUs are on several nodes."""
        return any(len(server.nodes) > 1 for server in self.servers)

    @property
    def gpu(self) -> GpuSpec:
        """The first one's type."""
        return self.question.cluster.gpus[self.candidate.layout.gpus[0]]

    @property
    def max_model_len(self) -> int:
        """The longest request in tokens: what was asked for, else the model's own length, or less where the KV cache
        is not sure to hold one."""
        work, memory, most = self.question.workload, self.candidate.memory, self.question.shape.longest
        if work.max_model_len:
            return work.max_model_len
        if memory.max_concurrency(most) * SURE >= self.candidate.layout.data_parallel:
            return most
        sure = int(memory.longest * SURE)
        return max(work.longest, sure - sure % ROUND)

    def memory_shares(self, server: ReplicaServer | None = None, *, held: bool = False) -> tuple[float, ...]:
        """Each rank's share of its GPU's memory in a replica, with `held` also what others hold of it; of the replicas
        of a server, or of all, the most that any of them needs."""
        shares = [
            [_up((rank.usable_bytes + held * gpu.held_bytes) / rank.memory_bytes) for rank, gpu in ranks]
            for ranks in self._ranks(server)
        ]
        return tuple(map(max, zip(*shares, strict=True)))

    def free_share(self, server: ReplicaServer | None = None) -> float:
        """The share of its memory that no GPU of a server, or of all, lacks; all of it where others hold nothing."""
        gpus = (gpu for ranks in self._ranks(server) for _, gpu in ranks if gpu.held_bytes)
        return min((_down(1 - (gpu.held_bytes + DRIVER_BYTES) / gpu.memory_bytes) for gpu in gpus), default=1.0)

    def _ranks(self, server: ReplicaServer | None) -> Iterator[list[tuple[RankMemory, GpuSpec]]]:
        """The ranks of each replica with their GPUs."""
        layout, gpus, replicas = self.candidate.layout, self.question.cluster.gpus, self.candidate.memory.replicas
        numbers = [server.number] if server and len(server.replicas) == 1 else range(layout.data_parallel)
        for number in numbers:
            seats = (gpus[at] for _, at in layout.replica(number))
            yield list(zip(replicas[number].ranks, seats, strict=True))

    @property
    def batch(self) -> tuple[int, int]:
        """The most tokens of a step, and the most requests at once, that the plan's memory was reckoned with."""
        question, layout, memory = self.question, self.candidate.layout, self.candidate.memory
        profile, gpus = engine_profile(question), question.cluster.gpus
        holding = Holding(question.shape, layout.precision, layout.kv_dtype, profile)
        found = []
        for (place, at), rank in zip(layout.replica(0), memory.replicas[0].ranks, strict=True):
            usual = holding.rank(place, gpus[at])
            smaller = rank.activation_bytes != usual.activation_bytes
            found.append(profile.batch(0 if smaller else gpus[at].memory_bytes))
        return min(tokens for tokens, _ in found), min(requests for _, requests in found)


def plan_servers(
    question: Question, candidate: Candidate, port: int, visible: Sequence[str] = ()
) -> tuple[ReplicaServer, ...]:
    """Those of a plan; on each node ports count up from `port`, which is 0 where there are none. `visible` are the
    names of the GPUs where the plan does not see all that are there (CUDA_VISIBLE_DEVICES)."""
    layout, there = candidate.layout, devices(question.cluster)
    first = {device.node: device.number for device in reversed(there)}
    replicas: list[tuple[NodeShare, ...]] = []
    for number in range(layout.data_parallel):
        by_node: dict[int, list[str]] = {}
        for _, at in layout.replica(number):
            local = at - first[there[at].node]
            by_node.setdefault(there[at].node, []).append(visible[local] if visible else f"{local}")
        replicas.append(tuple(NodeShare(node, tuple(gpus)) for node, gpus in by_node.items()))
    if layout.expert_parallel > 1:
        return (ReplicaServer(0, tuple(replicas), port),)
    found: list[ReplicaServer] = []
    for number, replica in enumerate(replicas):
        before = sum(server.node == replica[0].node for server in found)
        found.append(ReplicaServer(number, (replica,), port and port + before))
    return tuple(found)


def _up(share: float) -> float:
    """To three digits, never less."""
    return -(-round(share * 1e6) // 1000) / 1000


def _down(share: float) -> float:
    """To three digits, never more."""
    return round(share * 1e6) // 1000 / 1000
