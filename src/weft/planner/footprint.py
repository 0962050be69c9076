"""Footprint: what each GPU of a layout holds, and how many tokens of KV cache that leaves room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from weft.architectures.kv import kv_bytes, kv_bytes_per_token
from weft.architectures.place import Place, whole
from weft.architectures.shape import DTYPE_BYTES, DType, ModelShape
from weft.formats.precision import WeightBytes, canonical
from weft.hardware.cluster import Cluster
from weft.hardware.gpus import GpuSpec
from weft.plan.memory import CPU_KV_BYTES, CPU_KV_SHARE, LOGITS_BYTES, step_bytes
from weft.planner.batch import KV_SHARE, Choice, choices, chosen
from weft.planner.deployment import Layout, Workload
from weft.planner.draft_memory import DraftBytes, draft_bytes, drafting, guesses
from weft.planner.profiles import OURS, Profile
from weft.planner.rank_weights import rank_weights
from weft.planner.replica import Replica
from weft.planner.work import kinds

BLOCK = 16  # tokens of a KV block, EngineConfig.block_size
MIB = 1 << 20

Seat = tuple[Place, GpuSpec, int]  # of a rank: the number is its GPU's


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's GPU, in bytes. `usable_bytes` is what the engine takes of `memory_bytes` for everything, at most
    `limit_bytes` where the user set one; `kv_room_bytes` is what of it is left for KV, below 0 where the rest does not
    fit. `draft_bytes` are the weights of a draft model, whose KV is a part of `kv_bytes_per_token`."""

    gpu: str
    memory_bytes: int
    usable_bytes: int
    weights: WeightBytes
    activation_bytes: int
    graph_bytes: int
    runtime_bytes: int
    kv_room_bytes: int
    kv_bytes_per_token: int
    draft_bytes: int = 0
    limit_bytes: int | None = None

    @property
    def other_bytes(self) -> int:
        """All but weights and KV."""
        return self.activation_bytes + self.graph_bytes + self.runtime_bytes + self.draft_bytes

    @property
    def fits(self) -> bool:
        """Whether the weights and one block do."""
        return self.kv_room_bytes >= BLOCK * self.kv_bytes_per_token


class ReplicaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: its ranks in order. `kv_tokens` of requests of `length` tokens fit on every rank beside a step of at
    most `batched_tokens`, which are as many for the reason given."""

    ranks: tuple[RankMemory, ...]
    kv_tokens: int
    length: int
    batched_tokens: int
    batched_reason: str

    def takes_more(self, other: ReplicaMemory) -> bool:
        """Whether it needs more of a GPU than the same ranks with other settings."""
        return any(it.usable_bytes > its.usable_bytes for it, its in zip(self.ranks, other.ranks, strict=True))


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a layout, replica by replica."""

    shape: ModelShape
    layout: Layout
    replicas: tuple[ReplicaMemory, ...]
    window_cache: bool

    @property
    def ranks(self) -> tuple[RankMemory, ...]:
        return tuple(rank for replica in self.replicas for rank in replica.ranks)

    @property
    def kv_tokens(self) -> int:
        """Of all replicas together."""
        return sum(replica.kv_tokens for replica in self.replicas)

    @property
    def fits(self) -> bool:
        """Whether every replica can answer one request of the length that was asked for."""
        return all(replica.kv_tokens >= replica.length for replica in self.replicas)

    @property
    def fullest(self) -> int:
        """The rank with the least room for KV, counted in tokens."""
        size = self.layout.size
        ranks = {
            number * size + rank: memory.kv_room_bytes / memory.kv_bytes_per_token
            for number, _ in self._distinct()
            for rank, memory in enumerate(self.replicas[number].ranks)
        }
        return min(ranks, key=ranks.__getitem__)

    def max_concurrency(self, length: int) -> float:
        """How many requests of `length` tokens fit at once."""
        return sum(self._requests(number, length) * count for number, count in self._distinct())

    @property
    def longest(self) -> int:
        """The longest single request that fits in every replica, in tokens; at most the model's own length."""
        distinct = [number for number, _ in self._distinct()]
        if not (self.window_cache and self.shape.windows):
            ranks = (rank for number in distinct for rank in self.replicas[number].ranks)
            most = min(rank.kv_room_bytes // rank.kv_bytes_per_token for rank in ranks)
            return max(0, min(most, self.shape.longest))
        low, high = 0, self.shape.longest
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if all(self._requests(r, middle) >= 1 for r in distinct) else (low, middle - 1)
        return low

    def _distinct(self) -> list[tuple[int, int]]:
        """(number, count) of the replicas that share their memory's object."""
        counts = Counter(id(replica) for replica in self.replicas)
        first = {id(replica): number for number, replica in reversed(list(enumerate(self.replicas)))}
        return [(first[key], count) for key, count in counts.items()]

    def _requests(self, number: int, length: int) -> float:
        places = self.layout.places[number * self.layout.size : (number + 1) * self.layout.size]
        ranks = self.replicas[number].ranks
        return requests(self.shape, self.layout.kv_dtype, places, ranks, length, self.window_cache)


def footprint(
    shape: ModelShape, layout: Layout, cluster: Cluster, profile: Profile, workload: Workload | None = None
) -> Footprint:
    """What every rank of `layout` on `cluster` holds under an engine. `workload` gives the length that must fit."""
    workload = workload or Workload()
    holding = Holding(shape, canonical(layout.precision), layout.kv_dtype, profile)
    marks, longest = layout.marks(cluster), workload.max_model_len or shape.max_positions
    # Replicas differ in nothing but which experts they hold, and on what; a large cluster has many that are equal.
    known: dict[object, ReplicaMemory] = {}
    found = []
    for number, ranks in enumerate(layout.replicas()):
        key = tuple(marks[ranks])
        if key not in known:
            seats = [(place, cluster.gpus[index], index) for place, index in layout.replica(number)]
            tried: list[Choice] = []
            if profile.hold_up_ms.value:
                tried = list(choices(Replica(shape, layout, cluster, profile, number, {}), profile, longest))
            known[key] = _chosen(holding, seats, workload.longest, tried)
        found.append(known[key])
    return Footprint(shape=shape, layout=layout, replicas=tuple(found), window_cache=bool(profile.window_cache.value))


def _chosen(holding: Holding, seats: Sequence[Seat], length: int, tried: Sequence[Choice]) -> ReplicaMemory:
    """One replica with the first of these choices that leaves the KV cache what it has beside the last, the smallest,
    but for KV_SHARE of it; without any, with what the engine takes by itself."""

    def beside(choice: Choice) -> ReplicaMemory:
        return msgspec.structs.replace(holding, profile=chosen(holding.profile, choice)).replica(seats, length)

    if not tried:
        return holding.replica(seats, length)
    least = beside(tried[-1])
    if least.kv_tokens >= length:
        for choice in tried[:-1]:
            memory = beside(choice)
            if memory.kv_tokens >= max(length, (1 - KV_SHARE) * least.kv_tokens) and not memory.takes_more(least):
                return memory
    return least


class Holding(msgspec.Struct, frozen=True):
    """A model as an engine holds it: weights in `precision`, as `formats.precision.canonical` gives it, and keys and
    values in `kv_dtype`."""

    shape: ModelShape
    precision: str
    kv_dtype: str
    profile: Profile

    def replica(self, seats: Sequence[Seat], length: int) -> ReplicaMemory:
        """One replica on these GPUs, for requests of `length` tokens. Where an engine's usual settings leave no room
        for one, a rank takes as much more as that needs, up to the most that can be asked for."""
        profile = self.profile
        # A long pipeline has many stages that are equal.
        known: dict[object, RankMemory] = {}
        ranks = []
        for place, gpu, _ in seats:
            key = place.tp_rank, place.first, place.last, kinds(self.shape, self.precision, place.layers), id(gpu)
            if key not in known:
                known[key] = self._with_room(place, gpu, length)
            ranks.append(known[key])
        if seats[0][1].kind == "cpu":
            room = sum(rank.kv_room_bytes for rank in ranks)
            if profile.name == OURS:  # which takes no more by itself, and a flag for a request that needs it
                room = min(room, max(CPU_KV_BYTES, length * sum(rank.kv_bytes_per_token for rank in ranks)))
            ranks = _pooled(ranks, room)
        for number in (it for it, count in Counter(number for _, _, number in seats).items() if count > 1):
            at = [position for position, seat in enumerate(seats) if seat[2] == number]
            together = self._sharing([seats[position][0] for position in at], seats[at[0]][1], length)
            for position, rank in zip(at, together, strict=True):
                ranks[position] = rank
        places = [place for place, _, _ in seats]
        held = requests(self.shape, self.kv_dtype, places, ranks, length, bool(profile.window_cache.value))
        # A request that fits to the byte does so whatever its length is a multiple of.
        tokens = max(int(held * length) // BLOCK * BLOCK, length if held >= 1 else 0)
        return ReplicaMemory(
            ranks=tuple(ranks),
            kv_tokens=tokens,
            length=length,
            batched_tokens=min(profile.batch(gpu.memory_bytes)[0] for _, gpu, _ in seats),
            batched_reason=profile.max_num_batched_tokens.source,
        )

    def _sharing(self, places: Sequence[Place], gpu: GpuSpec, length: int) -> list[RankMemory]:
        """Several ranks on one GPU: each holds its own, and what is left for KV is shared out; `usable_bytes` are those
        of all of them."""
        need = sum(self._need(place, length) for place in places)
        room, ranks = -1, []
        for at_most in (False, True):
            if room < need:
                ranks = [self.rank(place, gpu, at_most=at_most) for place in places]
                # Each was reckoned as if it were alone there.
                room = sum(rank.kv_room_bytes for rank in ranks) - (len(ranks) - 1) * ranks[0].usable_bytes
        rooms = [pooled.kv_room_bytes for pooled in _pooled(ranks, room)]
        return [msgspec.structs.replace(rank, kv_room_bytes=it) for rank, it in zip(ranks, rooms, strict=True)]

    def _need(self, place: Place, length: int) -> int:
        """KV of one request of `length` tokens on a rank. With a window's cache a layer keeps no more than its
        window."""
        if self.profile.window_cache.value and self.shape.windows:
            return _kv_bytes(self.shape, length, self.kv_dtype, place)
        return length * (kv_bytes_per_token(self.shape, self.kv_dtype, place) + self._draft(place).kv_per_token)

    def _draft(self, place: Place) -> DraftBytes:
        return draft_bytes(self.profile.speculation, place, computed_in(self.precision), self.kv_dtype)

    def _with_room(self, place: Place, gpu: GpuSpec, length: int) -> RankMemory:
        """A rank with the engine's usual settings, or with so much of the others that a request of `length` fits."""
        rank, need = self.rank(place, gpu), self._need(place, length)
        if rank.kv_room_bytes >= need:
            return rank
        rank = self.rank(place, gpu, at_most=True)
        spare = max(0, rank.kv_room_bytes - need)
        return msgspec.structs.replace(
            rank, usable_bytes=rank.usable_bytes - spare, kv_room_bytes=rank.kv_room_bytes - spare
        )

    def rank(self, place: Place, gpu: GpuSpec, *, at_most: bool = False) -> RankMemory:
        """One rank on one GPU, with the engine's usual settings, or (`at_most`) with the share of memory and the batch
        that leave the most room for KV."""
        shape, profile, draft = self.shape, self.profile, self._draft(place)
        share = (profile.utilization_most if at_most else profile.utilization).value
        tokens, sequences = profile.batch(0 if at_most else gpu.memory_bytes)
        held = rank_weights(shape, profile.held(self.precision), place)
        number_bytes = DTYPE_BYTES[computed_in(self.precision)]
        activations = activation_bytes(shape, place, tokens, sequences, profile, number_bytes)
        # A draft's steps are graphs of their own.
        graphs = int(profile.graphs_MiB.value * MIB) * (2 if draft.weights else 1)
        ranks = max(place.tp_size, min(place.stages, 2))
        runtime = int((profile.runtime_MiB.value + profile.nccl_MiB.at(ranks)) * MIB)
        fixed = held.total + activations + graphs + runtime + draft.weights
        left = gpu.memory_bytes - gpu.held_bytes - fixed
        if gpu.kind == "cpu" and profile.name == OURS and not at_most:
            room = left // CPU_KV_SHARE if left > 0 else left
        elif gpu.kind == "cpu" or profile.utilization_of_free.value:
            room = int(left * share) if left > 0 else left
        else:
            room = int(gpu.memory_bytes * share) - gpu.held_bytes - fixed
        if gpu.limit_bytes is not None:
            room = min(room, gpu.limit_bytes - fixed)
        return RankMemory(
            gpu=gpu.name,
            memory_bytes=gpu.memory_bytes,
            usable_bytes=fixed + room,
            weights=held,
            activation_bytes=activations,
            graph_bytes=graphs,
            runtime_bytes=runtime,
            kv_room_bytes=room,
            kv_bytes_per_token=kv_bytes_per_token(shape, self.kv_dtype, place) + draft.kv_per_token,
            draft_bytes=draft.weights,
            limit_bytes=gpu.limit_bytes,
        )


def _pooled(ranks: Sequence[RankMemory], rooms: int) -> list[RankMemory]:
    """Ranks that draw on one memory, of a CPU or of a GPU: they get KV for as many tokens each."""
    each = sum(rank.kv_bytes_per_token for rank in ranks)
    found = []
    for rank in ranks:
        room = rooms * rank.kv_bytes_per_token // each
        usable = rank.usable_bytes - rank.kv_room_bytes + room
        found.append(msgspec.structs.replace(rank, usable_bytes=usable, kv_room_bytes=room))
    return found


def computed_in(precision: str) -> DType:
    """What engines compute in beside weights of a precision; float16 takes as many bytes as bfloat16."""
    return "float32" if precision == "fp32" else "bfloat16"


def activation_bytes(
    shape: ModelShape,
    place: Place,
    tokens: int,
    rows: int,
    profile: Profile,
    number_bytes: int,
) -> int:
    """What a step of `tokens` tokens takes beside weights and KV, of which `rows` sequences sample. A draft model's
    steps come after those of the large one, in the same memory."""
    if profile.own_activations.value:
        how = profile.speculation
        own, draft = (
            step_bytes(shape, place, tokens, rows, number_bytes, draft_tokens=guesses(how)),
            drafting(how, place),
        )
        return max(own, step_bytes(draft, whole(draft), tokens, rows, number_bytes)) if draft else own
    factors = profile.activations_experts if shape.experts else profile.activations_dense
    hidden = shape.q_heads * shape.head_dim if not shape.mla else shape.hidden
    passes = int(2 * tokens * hidden * factors.at(place.tp_size))
    return max(passes, int(profile.activations_least_MiB.value * MIB)) + LOGITS_BYTES * rows * shape.vocab * place.last


def requests(
    shape: ModelShape,
    kv_dtype: str,
    places: Sequence[Place],
    ranks: Sequence[RankMemory],
    length: int,
    window_cache: bool,
) -> float:
    """How many requests of `length` tokens fit on all ranks: the minimum over them. With `window_cache` a layer keeps
    no more than its window."""
    if window_cache and shape.windows:
        pairs = zip(places, ranks, strict=True)
        needs = {(rank.kv_room_bytes, _kv_bytes(shape, length, kv_dtype, place)) for place, rank in pairs}
    else:
        needs = {(rank.kv_room_bytes, length * rank.kv_bytes_per_token) for rank in ranks}
    return min(max(0, room) / need for room, need in needs)


@lru_cache(maxsize=4096)
def _kv_bytes(shape: ModelShape, tokens: int, kv_dtype: str, place: Place) -> int:
    return kv_bytes(shape, tokens, kv_dtype, place)
