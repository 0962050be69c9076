"""Footprint: the memory that each GPU of a layout holds, and the KV-cache tokens that it leaves room for."""

from __future__ import annotations

from bisect import bisect_left
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
from weft.planner.batch import KV_SHARE_FOR_STEP, TokenBudget, token_budgets, with_token_budget
from weft.planner.deployment import DeploymentLayout, Workload
from weft.planner.draft_memory import DraftBytes, draft_bytes, draft_on_rank, draft_tokens
from weft.planner.profiles import OURS, Profile
from weft.planner.rank_weights import rank_weights
from weft.planner.replica import Replica
from weft.planner.work import layer_kinds

BLOCK = 16  # tokens of a KV block, EngineConfig.block_size
MIB = 1 << 20

RankSeat = tuple[Place, GpuSpec, int]  # a rank's place, its GPU, and the GPU's number


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank's GPU, in bytes.

    `usable_bytes` is all that the engine takes of `memory_bytes`, at most `limit_bytes` if the user set a limit.
    `kv_room_bytes` is the part of it that is left for KV; it is negative if everything else does not fit.
    `draft_bytes` are the weights of a draft model, whose KV is a part of `kv_bytes_per_token`.
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
    draft_bytes: int = 0
    limit_bytes: int | None = None

    @property
    def other_bytes(self) -> int:
        """All but weights and KV."""
        return self.activation_bytes + self.graph_bytes + self.runtime_bytes + self.draft_bytes

    @property
    def fits(self) -> bool:
        """Return True if the weights and one KV block fit."""
        return self.kv_room_bytes >= BLOCK * self.kv_bytes_per_token


class ReplicaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one replica: its ranks in order.

    `kv_tokens` tokens of requests of `length` tokens fit on every rank, beside steps of at most `batched_tokens`
    tokens. `batched_reason` says why a step has that many.
    """

    ranks: tuple[RankMemory, ...]
    kv_tokens: int
    length: int
    batched_tokens: int
    batched_reason: str

    def takes_more(self, other: ReplicaMemory) -> bool:
        """Return True if a rank takes more of its GPU than the same rank of `other`, which has other settings."""
        both = zip(self.ranks, other.ranks, strict=True)
        return any(mine.usable_bytes > theirs.usable_bytes for mine, theirs in both)


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a layout, replica by replica. Equal replicas are one object."""

    shape: ModelShape
    layout: DeploymentLayout
    replicas: tuple[ReplicaMemory, ...]
    window_cache: bool

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
        size = self.layout.replica_size
        tokens = {
            number * size + rank: memory.kv_room_bytes / memory.kv_bytes_per_token
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
        if self.window_cache and self.shape.has_windows:
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
        size = self.layout.replica_size
        places = self.layout.places[number * size : (number + 1) * size]
        ranks = self.replicas[number].ranks
        return requests_that_fit(self.shape, self.layout.kv_dtype, places, ranks, length, self.window_cache)


def footprint(
    shape: ModelShape, layout: DeploymentLayout, cluster: Cluster, profile: Profile, workload: Workload | None = None
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
            seats = [(place, cluster.gpus[index], index) for place, index in layout.replica(number)]
            budgets: list[TokenBudget] = []
            if profile.hold_up_ms.value:
                replica = Replica(shape, layout, cluster, profile, number, {})
                budgets = list(token_budgets(replica, profile, longest))
            known[key] = _with_best_budget(memory_of, seats, workload.longest, budgets)
        replicas.append(known[key])
    return Footprint(
        shape=shape, layout=layout, replicas=tuple(replicas), window_cache=bool(profile.window_cache.value)
    )


def _with_best_budget(
    memory_of: EngineMemory, seats: Sequence[RankSeat], length: int, budgets: Sequence[TokenBudget]
) -> ReplicaMemory:
    """One replica with the first budget that leaves the KV cache almost the size that it has beside the last budget,
    the smallest: all but KV_SHARE_FOR_STEP of it. Without budgets, with the engine's own."""

    def beside(budget: TokenBudget) -> ReplicaMemory:
        profile = with_token_budget(memory_of.profile, budget)
        return msgspec.structs.replace(memory_of, profile=profile).replica(seats, length)

    if not budgets:
        return memory_of.replica(seats, length)
    least = beside(budgets[-1])
    if least.kv_tokens >= length:
        for budget in budgets[:-1]:
            memory = beside(budget)
            needed = max(length, (1 - KV_SHARE_FOR_STEP) * least.kv_tokens)
            if memory.kv_tokens >= needed and not memory.takes_more(least):
                return memory
    return least


class EngineMemory(msgspec.Struct, frozen=True):
    """Memory of a model under an engine: weights in `precision`, a result of `formats.precision.canonical`, and keys
    and values in `kv_dtype`."""

    shape: ModelShape
    precision: str
    kv_dtype: str
    profile: Profile

    def replica(self, seats: Sequence[RankSeat], length: int) -> ReplicaMemory:
        """One replica on these GPUs, for requests of `length` tokens.

        If the engine's usual settings leave no room for such a request, a rank takes the memory that it needs, up to
        the most that can be set.
        """
        profile = self.profile
        ranks = self._ranks_alone(seats, length)
        if seats[0][1].kind == "cpu":
            ranks = self._pooled_on_cpu(ranks, length)
        self._share_gpus(seats, ranks, length)
        places = [place for place, _, _ in seats]
        requests = requests_that_fit(self.shape, self.kv_dtype, places, ranks, length, bool(profile.window_cache.value))
        # A request that fits to the byte does so even if its length is no multiple of a block.
        tokens = max(int(requests * length) // BLOCK * BLOCK, length if requests >= 1 else 0)
        return ReplicaMemory(
            ranks=tuple(ranks),
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
            key = place.tp_rank, place.first, place.last, kinds, id(gpu)
            if key not in known:
                known[key] = self._with_room(place, gpu, length)
            ranks.append(known[key])
        return ranks

    def _pooled_on_cpu(self, ranks: Sequence[RankMemory], length: int) -> list[RankMemory]:
        """Ranks that share the memory of one host."""
        room = sum(rank.kv_room_bytes for rank in ranks)
        if self.profile.name == OURS:  # takes more than CPU_KV_BYTES only with a flag, for a request that needs it
            room = min(room, max(CPU_KV_BYTES, length * sum(rank.kv_bytes_per_token for rank in ranks)))
        return _pooled(ranks, room)

    def _share_gpus(self, seats: Sequence[RankSeat], ranks: list[RankMemory], length: int) -> None:
        """Replace, in `ranks`, those that share a GPU with others."""
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

        `usable_bytes` of each is that of all of them together.
        """
        need = sum(self._kv_of_request(place, length) for place in places)
        room, ranks = -1, []
        for at_most in (False, True):
            if room < need:
                ranks = [self.rank(place, gpu, at_most=at_most) for place in places]
                # Each was computed as if it were alone on the GPU.
                room = sum(rank.kv_room_bytes for rank in ranks) - (len(ranks) - 1) * ranks[0].usable_bytes
        rooms = [pooled.kv_room_bytes for pooled in _pooled(ranks, room)]
        both = zip(ranks, rooms, strict=True)
        return [msgspec.structs.replace(rank, kv_room_bytes=kv_room) for rank, kv_room in both]

    def _kv_of_request(self, place: Place, length: int) -> int:
        """KV bytes of one request on a rank. With a window cache a layer keeps at most its window."""
        if self.profile.window_cache.value and self.shape.has_windows:
            return _kv_bytes(self.shape, length, self.kv_dtype, place)
        return length * (kv_bytes_per_token(self.shape, self.kv_dtype, place) + self._draft(place).kv_per_token)

    def _draft(self, place: Place) -> DraftBytes:
        return draft_bytes(self.profile.speculation, place, computed_in(self.precision), self.kv_dtype)

    def _with_room(self, place: Place, gpu: GpuSpec, length: int) -> RankMemory:
        """A rank with the engine's usual settings, or with more memory if a request of `length` tokens needs it."""
        rank, need = self.rank(place, gpu), self._kv_of_request(place, length)
        if rank.kv_room_bytes >= need:
            return rank
        rank = self.rank(place, gpu, at_most=True)
        spare = max(0, rank.kv_room_bytes - need)
        return msgspec.structs.replace(
            rank, usable_bytes=rank.usable_bytes - spare, kv_room_bytes=rank.kv_room_bytes - spare
        )

    def rank(self, place: Place, gpu: GpuSpec, *, at_most: bool = False) -> RankMemory:
        """One rank alone on one GPU, with the engine's usual settings.

        With `at_most`, with the share of memory and the batch limits that leave the most room for KV.
        """
        shape, profile, draft = self.shape, self.profile, self._draft(place)
        tokens, sequences = profile.batch_limits(0 if at_most else gpu.memory_bytes)
        weights = rank_weights(shape, profile.held_precision(self.precision), place)
        number_bytes = DTYPE_BYTES[computed_in(self.precision)]
        activations = activation_bytes(shape, place, tokens, sequences, profile, number_bytes)
        # The steps of a draft model are graphs of their own.
        graphs = int(profile.graphs_MiB.value * MIB) * (2 if draft.weights else 1)
        ranks = max(place.tp_size, min(place.stages, 2))
        runtime = int((profile.runtime_MiB.value + profile.nccl_MiB.at(ranks)) * MIB)
        fixed = weights.total + activations + graphs + runtime + draft.weights
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
            kv_bytes_per_token=kv_bytes_per_token(shape, self.kv_dtype, place) + draft.kv_per_token,
            draft_bytes=draft.weights,
            limit_bytes=gpu.limit_bytes,
        )

    def _kv_room(self, gpu: GpuSpec, fixed: int, at_most: bool) -> int:
        """Bytes that an engine leaves for KV on a GPU beside `fixed` bytes; negative if those do not fit."""
        profile, on_cpu = self.profile, gpu.kind == "cpu"
        share = (profile.utilization_most if at_most else profile.utilization).value
        left = gpu.memory_bytes - gpu.held_bytes - fixed
        if on_cpu and profile.name == OURS and not at_most:
            room = left // CPU_KV_SHARE if left > 0 else left
        elif on_cpu or profile.utilization_of_free.value:
            room = int(left * share) if left > 0 else left
        else:
            room = int(gpu.memory_bytes * share) - gpu.held_bytes - fixed
        return room if gpu.limit_bytes is None else min(room, gpu.limit_bytes - fixed)


def _pooled(ranks: Sequence[RankMemory], pool: int) -> list[RankMemory]:
    """Ranks that draw on one memory, of a CPU or of a GPU: each gets KV for equally many tokens of the `pool` bytes."""
    each = sum(rank.kv_bytes_per_token for rank in ranks)
    pooled = []
    for rank in ranks:
        room = pool * rank.kv_bytes_per_token // each
        usable = rank.usable_bytes - rank.kv_room_bytes + room
        pooled.append(msgspec.structs.replace(rank, usable_bytes=usable, kv_room_bytes=room))
    return pooled


def computed_in(precision: str) -> DType:
    """The dtype that engines compute in with weights of a precision. float16 takes as many bytes as bfloat16."""
    return "float32" if precision == "fp32" else "bfloat16"


def activation_bytes(
    shape: ModelShape, place: Place, tokens: int, rows: int, profile: Profile, number_bytes: int
) -> int:
    """Bytes of a step of `tokens` tokens beside weights and KV, if `rows` of its sequences sample.

    The steps of a draft model come after those of the large one, in the same memory.
    """
    if profile.own_activations.value:
        speculation = profile.speculation
        own = step_bytes(shape, place, tokens, rows, number_bytes, draft_tokens=draft_tokens(speculation))
        draft = draft_on_rank(speculation, place)
        return max(own, step_bytes(draft, whole(draft), tokens, rows, number_bytes)) if draft else own
    factors = profile.activations_experts if shape.experts else profile.activations_dense
    hidden = shape.q_heads * shape.head_dim if not shape.latent else shape.hidden
    passes = int(2 * tokens * hidden * factors.at(place.tp_size))
    logits = LOGITS_BYTES * rows * shape.vocab * place.last
    return max(passes, int(profile.activations_least_MiB.value * MIB)) + logits


def requests_that_fit(
    shape: ModelShape,
    kv_dtype: str,
    places: Sequence[Place],
    ranks: Sequence[RankMemory],
    length: int,
    window_cache: bool,
) -> float:
    """Number of requests of `length` tokens that fit: the minimum over the ranks.

    With `window_cache` a layer keeps at most its window.
    """
    if window_cache and shape.has_windows:
        pairs = zip(places, ranks, strict=True)
        needs = {(rank.kv_room_bytes, _kv_bytes(shape, length, kv_dtype, place)) for place, rank in pairs}
    else:
        needs = {(rank.kv_room_bytes, length * rank.kv_bytes_per_token) for rank in ranks}
    return min(max(0, room) / need for room, need in needs)


@lru_cache(maxsize=4096)
def _kv_bytes(shape: ModelShape, tokens: int, kv_dtype: str, place: Place) -> int:
    return kv_bytes(shape, tokens, kv_dtype, place)
