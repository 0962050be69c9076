"""Footprint: the memory that each GPU of a layout holds, and the KV-cache tokens that it leaves room for."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.architectures.shape import DTYPE_BYTES, DType, ModelShape
from weft.checkpoint.quantised.precision import WeightBytes, canonical, sum_by_kind
from weft.machine.hardware.cluster import Cluster
from weft.machine.hardware.gpus import GpuSpec
from weft.plan.memory import CPU_KV_BYTES, CPU_KV_SHARE
from weft.planner.deployment import DeploymentLayout, Workload
from weft.planner.memory.activations import MIB, activation_bytes
from weft.planner.memory.drafts import draft_weight_bytes
from weft.planner.memory.request_kv import BLOCK, RequestKV, num_blocks, request_kv
from weft.planner.profiles import OURS, EngineProfile
from weft.planner.work.batch import KV_SHARE_FOR_STEP, TokenBudget, token_budgets, with_token_budget
from weft.planner.work.replica import PlannedReplica
from weft.planner.work.work import LayerKind, layer_kinds

RankSeat = tuple[Place, GpuSpec, int]  # a rank's place, its GPU, and the GPU's number


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank's GPU, in bytes.

    `usable_bytes` is all that the engine takes of `memory_bytes`, at most `limit_bytes` if the user set a limit.
    `kv_room_bytes` is the part of it that is left for KV; it is negative if everything else does not fit. `draft_bytes`
    are the weights of a draft model, whose KV is a part of `kv_bytes_per_token`. `kv_block_bytes` are the bytes of a KV
    block, `kv_request_bytes` the bytes of a request of the replica's `length`.
    """

    gpu: str
    memory_bytes: int
    usable_bytes: int
    weights: WeightBytes
    activation_bytes: int
    graph_bytes: int
    runtime_bytes: int
    kv_room_bytes: int
    kv_bytes_per_token: int
    kv_block_bytes: int
    kv_request_bytes: int
    draft_bytes: int = 0
    limit_bytes: int | None = None

    @property
    def other_bytes(self) -> int:
        """All but weights and KV."""
        return self.activation_bytes + self.graph_bytes + self.runtime_bytes + self.draft_bytes

    @property
    def fits(self) -> bool:
        """Return True if the weights and one KV block fit."""
        return self.kv_room_bytes >= self.kv_block_bytes


class ReplicaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one replica: its ranks in order.

    `kv_tokens` tokens of requests of `length` tokens fit on every rank, with steps of at most `batched_tokens` tokens.
    `batched_reason` says why a step has that many. `kv` counts the KV.
    """

    ranks: tuple[RankMemory, ...]
    kv: RequestKV
    kv_tokens: int
    length: int
    batched_tokens: int
    batched_reason: str

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks of every rank."""
        return num_blocks(self.ranks) if self.kv.in_blocks else self.kv_tokens // BLOCK

    def takes_more(self, other: ReplicaMemory) -> bool:
        """Return True if a rank takes more of its GPU than the same rank of `other`, which has other settings."""
        both = zip(self.ranks, other.ranks, strict=True)
        return any(mine.usable_bytes > theirs.usable_bytes for mine, theirs in both)


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a layout, replica by replica. Equal replicas are one object."""

    shape: ModelShape
    layout: DeploymentLayout
    replicas: tuple[ReplicaMemory, ...]

    @property
    def ranks(self) -> tuple[RankMemory, ...]:
        return tuple(rank for replica in self.replicas for rank in replica.ranks)

    @property
    def kv_tokens(self) -> int:
        """KV-cache tokens of all replicas together."""
        return sum(replica.kv_tokens for replica in self.replicas)

    @property
    def fits(self) -> bool:
        """Return True if every replica has room for one request of the required length."""
        return all(replica.kv_tokens >= replica.length for replica in self.replicas)

    @property
    def fullest(self) -> int:
        """The rank with the least room for KV, counted in tokens."""
        size = self.layout.parallelism.replica_size
        tokens = {
            number * size + rank: memory.kv_room_bytes / memory.kv_block_bytes
            for number, _ in self._distinct()
            for rank, memory in enumerate(self.replicas[number].ranks)
        }
        return min(tokens, key=tokens.__getitem__)

    def max_concurrency(self, length: int) -> float:
        """Number of requests of `length` tokens that fit at once."""
        return sum(self._requests(number, length) * count for number, count in self._distinct())

    @property
    def longest(self) -> int:
        """The longest single request that fits in every replica, in tokens; at most the model's own maximum."""
        distinct = [number for number, _ in self._distinct()]
        if any(self.replicas[number].kv.keeps_windows for number in distinct):
            lengths = range(1, self.shape.longest + 1)
            return bisect_left(lengths, True, key=lambda length: not self._fits_everywhere(distinct, length))
        ranks = (rank for number in distinct for rank in self.replicas[number].ranks)
        most = min(rank.kv_room_bytes // rank.kv_bytes_per_token for rank in ranks)
        return max(0, min(most, self.shape.longest))

    def _fits_everywhere(self, numbers: Sequence[int], length: int) -> bool:
        return all(self._requests(number, length) >= 1 for number in numbers)

    def _distinct(self) -> list[tuple[int, int]]:
        """(number of the first one, count) of the replicas that share one object."""
        counts = Counter(id(replica) for replica in self.replicas)
        first = {id(replica): number for number, replica in reversed(list(enumerate(self.replicas)))}
        return [(first[key], count) for key, count in counts.items()]

    def _requests(self, number: int, length: int) -> float:
        size = self.layout.parallelism.replica_size
        places = self.layout.places[number * size : (number + 1) * size]
        replica = self.replicas[number]
        return replica.kv.requests(places, replica.ranks, length)


def footprint(
    shape: ModelShape,
    layout: DeploymentLayout,
    cluster: Cluster,
    profile: EngineProfile,
    workload: Workload | None = None,
) -> Footprint:
    """Memory of every rank of `layout` on `cluster` under an engine. `workload` gives the length that must fit."""
    workload = workload or Workload()
    memory_of = EngineMemory(shape, canonical(layout.precision), layout.kv_dtype, profile)
    signatures, longest = layout.rank_signatures(cluster), workload.max_model_len or shape.max_positions
    # Replicas differ only in the experts that they hold, and in their GPUs; a large cluster has many equal ones.
    known: dict[object, ReplicaMemory] = {}
    replicas = []
    for number, ranks in enumerate(layout.replica_slices()):
        key = tuple(signatures[ranks])
        if key not in known:
            seats = [(place, cluster.devices[index], index) for place, index in layout.replica(number)]
            budgets: list[TokenBudget] = []
            if profile.hold_up_ms.value:
                replica = PlannedReplica(shape, layout, cluster, profile, number, {})
                budgets = list(token_budgets(replica, profile, longest))
            neighbours = _neighbours(layout, cluster, number)
            known[key] = _with_best_budget(memory_of, seats, neighbours, workload.longest, budgets)
        replicas.append(known[key])
    if layout.parallelism.shares_experts and profile.name == OURS:
        replicas = _with_equal_room(replicas)
    return Footprint(shape=shape, layout=layout, replicas=tuple(replicas))


def _neighbours(layout: DeploymentLayout, cluster: Cluster, number: int) -> list[RankSeat]:
    """The seats of the other attention groups if they share a host's memory with group `number`."""
    if not layout.parallelism.shares_experts or not cluster.on_cpu:
        return []
    others = (layout.replica(other) for other in range(layout.parallelism.data_parallel) if other != number)
    return [(place, cluster.gpus[index], index) for group in others for place, index in group]


def _with_equal_room(groups: Sequence[ReplicaMemory]) -> list[ReplicaMemory]:
    """The attention groups of our engine: each has as many KV blocks as the group with the least room."""
    least = min(groups, key=lambda group: group.kv_tokens)
    if not least.kv_tokens or all(group.kv_tokens == least.kv_tokens for group in groups):
        return list(groups)
    blocks = min(rank.kv_room_bytes / rank.kv_block_bytes for rank in least.ranks)

    def limited(rank: RankMemory) -> RankMemory:
        room = min(rank.kv_room_bytes, int(blocks * rank.kv_block_bytes))
        return msgspec.structs.replace(rank, kv_room_bytes=room)

    known = {
        id(group): msgspec.structs.replace(
            group, ranks=tuple(limited(rank) for rank in group.ranks), kv_tokens=least.kv_tokens
        )
        for group in groups
    }
    return [known[id(group)] for group in groups]


def _with_best_budget(
    memory_of: EngineMemory,
    seats: Sequence[RankSeat],
    neighbours: Sequence[RankSeat],
    length: int,
    budgets: Sequence[TokenBudget],
) -> ReplicaMemory:
    """One replica with the first budget that leaves at least 1 - KV_SHARE_FOR_STEP of the KV cache that the last
    budget, the smallest, leaves. Without budgets, with the engine's own."""

    def with_budget(budget: TokenBudget) -> ReplicaMemory:
        profile = with_token_budget(memory_of.profile, budget)
        return msgspec.structs.replace(memory_of, profile=profile).replica(seats, length, neighbours)

    if not budgets:
        return memory_of.replica(seats, length, neighbours)
    least = with_budget(budgets[-1])
    if least.kv_tokens >= length:
        for budget in budgets[:-1]:
            memory = with_budget(budget)
            needed = max(length, (1 - KV_SHARE_FOR_STEP) * least.kv_tokens)
            if memory.kv_tokens >= needed and not memory.takes_more(least):
                return memory
    return least


class EngineMemory(msgspec.Struct, frozen=True):
    """Memory of a model under an engine: weights in `precision`, a result of
    `checkpoint.quantised.precision.canonical`, and keys and values in `kv_dtype`."""

    shape: ModelShape
    precision: str
    kv_dtype: str
    profile: EngineProfile

    @property
    def kv(self) -> RequestKV:
        return request_kv(self.shape, self.kv_dtype, self.profile)

    def replica(self, seats: Sequence[RankSeat], length: int, neighbours: Sequence[RankSeat] = ()) -> ReplicaMemory:
        """One replica on these GPUs, for requests of `length` tokens; `neighbours` share a CPU with it.

        If the engine's usual settings leave no room for such a request, a rank takes the memory that it needs, up to
        the most that can be set.
        """
        profile = self.profile
        ranks = self._ranks_alone(seats, length)
        if all(gpu.kind == "cpu" for _, gpu, _ in seats):
            ranks = self._pooled_on_cpu([*ranks, *self._ranks_alone(neighbours, length)])[: len(seats)]
        self._share_gpus(seats, ranks, length)
        places = [place for place, _, _ in seats]
        requests = self.kv.requests(places, ranks, length)
        # A request that fits to the byte does so even if its length is no multiple of a block.
        tokens = max(int(requests * length) // BLOCK * BLOCK, length if requests >= 1 else 0)
        return ReplicaMemory(
            ranks=tuple(ranks),
            kv=self.kv,
            kv_tokens=tokens,
            length=length,
            batched_tokens=min(profile.batch_limits(gpu.memory_bytes)[0] for _, gpu, _ in seats),
            batched_reason=profile.max_num_batched_tokens.source,
        )

    def _ranks_alone(self, seats: Sequence[RankSeat], length: int) -> list[RankMemory]:
        """Each rank as if it were alone on its GPU. A long pipeline has many equal stages, computed once."""
        known: dict[object, RankMemory] = {}
        ranks = []
        for place, gpu, _ in seats:
            kinds = layer_kinds(self.shape, self.precision, place.layers)
            key = place.tp_rank, place.first, place.last, kinds, len(place.experts), len(place.expert_ffn), id(gpu)
            if key not in known:
                known[key] = self._with_room(place, gpu, length)
            ranks.append(known[key])
        return ranks

    def _pooled_on_cpu(self, ranks: Sequence[RankMemory]) -> list[RankMemory]:
        """Ranks that share the memory of one host, each of which was computed with an even part of it."""
        if self.profile.name != OURS:
            return _pooled(ranks, sum(rank.kv_room_bytes for rank in ranks))
        fixed = sum(rank.usable_bytes - rank.kv_room_bytes for rank in ranks)
        need = sum(rank.kv_request_bytes for rank in ranks)
        room = left = sum(rank.memory_bytes for rank in ranks) - fixed
        if left > 0:
            usual = min(CPU_KV_BYTES, left // CPU_KV_SHARE)
            # More only with a flag, for a request that needs it.
            room = usual if usual >= need else min(int(left * self.profile.utilization_most.value), need)
        limits = [rank.limit_bytes for rank in ranks if rank.limit_bytes is not None]
        return _pooled(ranks, min(room, sum(limits) - fixed) if limits else room)

    def _share_gpus(self, seats: Sequence[RankSeat], ranks: list[RankMemory], length: int) -> None:
        """Replace, in `ranks`, the ranks that share a GPU with others."""
        by_gpu: dict[int, list[int]] = {}
        for position, (_, _, number) in enumerate(seats):
            by_gpu.setdefault(number, []).append(position)
        for positions in by_gpu.values():
            if len(positions) > 1:
                gpu = seats[positions[0]][1]
                together = self._sharing([seats[position][0] for position in positions], gpu, length)
                for position, rank in zip(positions, together, strict=True):
                    ranks[position] = rank

    def _sharing(self, places: Sequence[Place], gpu: GpuSpec, length: int) -> list[RankMemory]:
        """Several ranks on one GPU: each holds its own weights, and they divide what is left for KV.

        `usable_bytes` of each is for all of them together.
        """
        need = sum(self.kv.request_bytes(place, length) for place in places)
        room, ranks = -1, []
        for at_most in (False, True):
            if room < need:
                ranks = [self.rank(place, gpu, length, at_most=at_most) for place in places]
                # Each was computed as if it were alone on the GPU.
                room = sum(rank.kv_room_bytes for rank in ranks) - (len(ranks) - 1) * ranks[0].usable_bytes
        rooms = [pooled.kv_room_bytes for pooled in _pooled(ranks, room)]
        both = zip(ranks, rooms, strict=True)
        return [msgspec.structs.replace(rank, kv_room_bytes=kv_room) for rank, kv_room in both]

    def _with_room(self, place: Place, gpu: GpuSpec, length: int) -> RankMemory:
        """A rank with the engine's usual settings, or with more memory if a request of `length` tokens needs it."""
        rank = self.rank(place, gpu, length)
        if rank.kv_room_bytes >= rank.kv_request_bytes:
            return rank
        rank = self.rank(place, gpu, length, at_most=True)
        spare = max(0, rank.kv_room_bytes - rank.kv_request_bytes)
        return msgspec.structs.replace(
            rank, usable_bytes=rank.usable_bytes - spare, kv_room_bytes=rank.kv_room_bytes - spare
        )

    def rank(self, place: Place, gpu: GpuSpec, length: int = 1, *, at_most: bool = False) -> RankMemory:
        """One rank alone on one GPU, with the engine's usual settings, for requests of `length` tokens.

        With `at_most`, with the share of memory and the batch limits that leave the most room for KV.
        """
        shape, profile, kv, dtype = self.shape, self.profile.on(gpu), self.kv, computed_in(self.precision)
        draft = draft_weight_bytes(profile.speculation, place, dtype)
        # A step has as many tokens on all devices.
        tokens, sequences = self.profile.batch_limits(0 if at_most else gpu.memory_bytes)
        weights = rank_weights(shape, profile.held_precision(self.precision), place)
        activations = activation_bytes(shape, place, tokens, sequences, profile, DTYPE_BYTES[dtype], context=length)
        # The steps of a draft model are graphs of their own.
        graphs = int(profile.graphs_MiB.value * MIB) * (2 if draft else 1)
        ranks = max(place.tp_size, min(place.stages, 2))
        runtime = int((profile.runtime_MiB.value + profile.nccl_MiB.at(ranks)) * MIB)
        fixed = weights.total + activations + graphs + runtime + draft
        room = self._kv_room(gpu, fixed, at_most)
        return RankMemory(
            gpu=gpu.name,
            memory_bytes=gpu.memory_bytes,
            usable_bytes=fixed + room,
            weights=weights,
            activation_bytes=activations,
            graph_bytes=graphs,
            runtime_bytes=runtime,
            kv_room_bytes=room,
            kv_bytes_per_token=kv.token_bytes(place),
            kv_block_bytes=kv.block_bytes(place),
            kv_request_bytes=kv.request_bytes(place, length),
            draft_bytes=draft,
            limit_bytes=gpu.limit_bytes,
        )

    def _kv_room(self, gpu: GpuSpec, fixed: int, at_most: bool) -> int:
        """Bytes that an engine leaves for KV on a GPU after `fixed` bytes; negative if those do not fit."""
        profile, on_cpu = self.profile.on(gpu), gpu.kind == "cpu"
        share = (profile.utilization_most if at_most else profile.utilization).value
        left = gpu.memory_bytes - gpu.held_bytes - fixed
        if on_cpu and profile.name == OURS and not at_most:
            room = min(CPU_KV_BYTES, left // CPU_KV_SHARE) if left > 0 else left
        elif on_cpu or profile.utilization_of_free.value:
            room = int(left * share) if left > 0 else left
        else:
            room = int(gpu.memory_bytes * share) - gpu.held_bytes - fixed
        return room if gpu.limit_bytes is None else min(room, gpu.limit_bytes - fixed)


def _pooled(ranks: Sequence[RankMemory], pool: int) -> list[RankMemory]:
    """Ranks that draw on one memory, of a CPU or of a GPU: each gets KV for equally many tokens of the `pool` bytes."""
    each = sum(rank.kv_block_bytes for rank in ranks)
    pooled = []
    for rank in ranks:
        room = pool * rank.kv_block_bytes // each
        usable = rank.usable_bytes - rank.kv_room_bytes + room
        pooled.append(msgspec.structs.replace(rank, usable_bytes=usable, kv_room_bytes=room))
    return pooled


def computed_in(precision: str) -> DType:
    """The dtype that engines compute in with weights of a precision. float16 takes as many bytes as bfloat16."""
    return "float32" if precision == "fp32" else "bfloat16"


@lru_cache(maxsize=8192)
def rank_weights(shape: ModelShape, precision: str, place: Place) -> WeightBytes:
    """Weight bytes of one rank. `precision` is a result of `canonical` or `held_precision` of
    `checkpoint.quantised.precision`.

    Ranks with equally many experts, and stages with equally many layers of each kind, hold equally many bytes.
    """
    share = msgspec.structs.replace(
        place,
        rank=0,
        tp_rank=0,
        dp_rank=0,
        stage=0 if place.first else 1,
        stages=3 - place.first - place.last,
        layers=Span(0, 0),
        experts=Span(0, len(place.experts)),
    )
    return _sum_of_weights(shape, precision, share, layer_kinds(shape, precision, place.layers))


@lru_cache(maxsize=4096)
def _sum_of_weights(
    shape: ModelShape, precision: str, share: Place, kinds: tuple[tuple[LayerKind, int], ...]
) -> WeightBytes:
    """Sum over layers by kind: there are few kinds, and few ways to share a layer of each."""
    parts = [(_weights_of(shape, precision, share), 1)]
    inner = msgspec.structs.replace(share, stage=1, stages=3)
    for (_, layer), count in kinds:
        one = msgspec.structs.replace(inner, layers=Span(layer, layer + 1))
        parts.append((_weights_of(shape, precision, one), count))
    names = WeightBytes.__struct_fields__
    return WeightBytes(**{name: sum(getattr(part, name) * count for part, count in parts) for name in names})


@lru_cache(maxsize=4096)
def _weights_of(shape: ModelShape, precision: str, place: Place) -> WeightBytes:
    return sum_by_kind(shape, precision, place)
