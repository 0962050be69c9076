"""Footprint: what each GPU of a layout holds, and how many tokens of KV cache that leaves room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from weft.facts import gguf_types
from weft.facts.cluster import Cluster
from weft.facts.gpus import GpuSpec
from weft.facts.kv import kv_bytes, kv_bytes_per_token
from weft.facts.place import Place, Span
from weft.facts.precision import WeightBytes, canonical, weights
from weft.facts.shape import ModelShape
from weft.planner.deployment import Layout, Workload
from weft.planner.memory import LOGITS_BYTES, step_bytes
from weft.planner.profiles import Profile

BLOCK = 16  # tokens of a KV block, EngineConfig.block_size
MIB = 1 << 20
ACTIVATION_BYTES = 2  # engines compute in 16 bits


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's GPU, in bytes. `usable_bytes` is what the engine takes of `memory_bytes` for everything;
    `kv_room_bytes` is what of it is left for KV, below 0 where the rest does not fit."""

    gpu: str
    memory_bytes: int
    usable_bytes: int
    weights: WeightBytes
    activation_bytes: int
    graph_bytes: int
    runtime_bytes: int
    kv_room_bytes: int
    kv_bytes_per_token: int

    @property
    def other_bytes(self) -> int:
        """All but weights and KV."""
        return self.activation_bytes + self.graph_bytes + self.runtime_bytes

    @property
    def fits(self) -> bool:
        """Whether the weights and one block do."""
        return self.kv_room_bytes >= BLOCK * self.kv_bytes_per_token


class ReplicaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: its ranks in order. `kv_tokens` of requests of `length` tokens fit on every rank."""

    ranks: tuple[RankMemory, ...]
    kv_tokens: int
    length: int


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
        ranks = self.ranks
        return min(range(len(ranks)), key=lambda r: ranks[r].kv_room_bytes / ranks[r].kv_bytes_per_token)

    def max_concurrency(self, length: int) -> float:
        """How many requests of `length` tokens fit at once."""
        return sum(self._requests(number, length) * count for number, count in self._distinct())

    @property
    def longest(self) -> int:
        """The longest single request that fits in every replica, in tokens; at most the model's own length."""
        distinct = [number for number, _ in self._distinct()]
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
        replica = self.replicas[number]
        places = [place for place, _ in self.layout.replica(number)]
        rooms = [rank.kv_room_bytes for rank in replica.ranks]
        return requests(self.shape, self.layout.kv_dtype, places, rooms, length, self.window_cache)


def footprint(
    shape: ModelShape, layout: Layout, cluster: Cluster, profile: Profile, workload: Workload | None = None
) -> Footprint:
    """What every rank of `layout` on `cluster` holds under an engine. `workload` gives the length that must fit."""
    workload, precision = workload or Workload(), canonical(layout.precision)
    gpus = cluster.gpus
    # Replicas differ in nothing but which experts they hold, and on what; a large cluster has many that are equal.
    known: dict[tuple[tuple[int, int], ...], ReplicaMemory] = {}
    replicas = []
    for number in range(layout.data_parallel):
        seats = tuple((place, gpus[index]) for place, index in layout.replica(number))
        key = tuple((len(place.experts), id(gpu)) for place, gpu in seats)
        if key not in known:
            known[key] = replica_memory(shape, precision, layout.kv_dtype, seats, profile, workload.longest)
        replicas.append(known[key])
    return Footprint(
        shape=shape, layout=layout, replicas=tuple(replicas), window_cache=bool(profile.window_cache.value)
    )


def replica_memory(
    shape: ModelShape,
    precision: str,
    kv_dtype: str,
    seats: Sequence[tuple[Place, GpuSpec]],
    profile: Profile,
    length: int,
) -> ReplicaMemory:
    """One replica on these (place, GPU), for requests of `length` tokens. Where an engine's usual settings leave no
    room for one, a rank takes as much more as that needs, up to the most that can be asked for."""
    window_cache = bool(profile.window_cache.value)
    ranks = []
    for place, gpu in seats:
        rank = rank_memory(shape, precision, kv_dtype, place, gpu, profile)
        need = request_bytes(shape, kv_dtype, place, length, window_cache)
        if rank.kv_room_bytes < need:
            rank = rank_memory(shape, precision, kv_dtype, place, gpu, profile, at_most=True)
            spare = max(0, rank.kv_room_bytes - need)
            rank = msgspec.structs.replace(
                rank, usable_bytes=rank.usable_bytes - spare, kv_room_bytes=rank.kv_room_bytes - spare
            )
        ranks.append(rank)
    rooms = [rank.kv_room_bytes for rank in ranks]
    held = requests(shape, kv_dtype, [place for place, _ in seats], rooms, length, window_cache)
    # A request that fits to the byte does so whatever its length is a multiple of.
    tokens = max(int(held * length) // BLOCK * BLOCK, length if held >= 1 else 0)
    return ReplicaMemory(ranks=tuple(ranks), kv_tokens=tokens, length=length)


def rank_memory(
    shape: ModelShape,
    precision: str,
    kv_dtype: str,
    place: Place,
    gpu: GpuSpec,
    profile: Profile,
    *,
    at_most: bool = False,
) -> RankMemory:
    """One rank on one GPU, with the engine's usual settings, or (`at_most`) with the share of memory and the batch
    that leave the most room for KV."""
    share = (profile.utilization_most if at_most else profile.utilization).value
    tokens, sequences = profile.batch(0 if at_most else gpu.memory_bytes)
    held = _weights(shape, precision, place)
    activations = activation_bytes(shape, place, tokens, sequences, profile)
    graphs = int(profile.graphs_MiB.value * MIB)
    ranks = max(place.tp_size, min(place.stages, 2))
    runtime = int((profile.runtime_MiB.value + profile.nccl_MiB.at(ranks)) * MIB)
    fixed = held.total + activations + graphs + runtime
    if profile.utilization_of_free.value:
        left = gpu.memory_bytes - fixed
        room = int(left * share) if left > 0 else left
    else:
        room = int(gpu.memory_bytes * share) - fixed
    return RankMemory(
        gpu=gpu.name,
        memory_bytes=gpu.memory_bytes,
        usable_bytes=fixed + room,
        weights=held,
        activation_bytes=activations,
        graph_bytes=graphs,
        runtime_bytes=runtime,
        kv_room_bytes=room,
        kv_bytes_per_token=kv_bytes_per_token(shape, kv_dtype, place),
    )


def activation_bytes(
    shape: ModelShape,
    place: Place,
    tokens: int,
    rows: int,
    profile: Profile,
    number_bytes: int = ACTIVATION_BYTES,
) -> int:
    """What a step of `tokens` tokens takes beside weights and KV, of which `rows` sequences sample."""
    if profile.own_activations.value:
        return step_bytes(shape, place, tokens, min(rows, tokens), number_bytes)
    factors = profile.activations_experts if shape.experts else profile.activations_dense
    hidden = shape.q_heads * shape.head_dim if not shape.mla else shape.hidden
    passes = int(2 * tokens * hidden * factors.at(place.tp_size))
    return max(passes, int(profile.activations_least_MiB.value * MIB)) + LOGITS_BYTES * rows * shape.vocab * place.last


def request_bytes(shape: ModelShape, kv_dtype: str, place: Place, length: int, window_cache: bool) -> int:
    """KV of one request of `length` tokens on a rank. With `window_cache` a layer keeps no more than its window."""
    if window_cache and shape.windows:
        return _kv_bytes(shape, length, kv_dtype, place)
    return length * kv_bytes_per_token(shape, kv_dtype, place)


def requests(
    shape: ModelShape,
    kv_dtype: str,
    places: Sequence[Place],
    rooms: Sequence[int],
    length: int,
    window_cache: bool,
) -> float:
    """How many requests of `length` tokens fit on all ranks, whose KV may take `rooms` bytes: the minimum over them."""
    return min(
        max(0, room) / request_bytes(shape, kv_dtype, place, length, window_cache)
        for place, room in zip(places, rooms, strict=True)
    )


def _weights(shape: ModelShape, precision: str, place: Place) -> WeightBytes:
    """A rank's weights. Ranks that hold as many experts hold as many bytes, whichever they are."""
    share = msgspec.structs.replace(place, rank=0, tp_rank=0, experts=Span(0, len(place.experts)))
    return _sum_of_weights(shape, precision, share)


@lru_cache(maxsize=4096)
def _sum_of_weights(shape: ModelShape, precision: str, place: Place) -> WeightBytes:
    """Summed over layers by kind: of those there are few, and few ways to share them."""
    kinds = Counter(
        # GGUF's mixes give some layers more bits than others.
        layer if precision in gguf_types.MIXES else _first_like(shape, shape.has_experts(layer))
        for layer in range(place.layers.start, place.layers.stop)
    )
    ends = _weights_of(shape, precision, msgspec.structs.replace(place, layers=Span(0, 0)))
    inner = msgspec.structs.replace(place, stage=1, stages=3)
    parts = [(ends, 1)]
    for layer, count in kinds.items():
        one = msgspec.structs.replace(inner, layers=Span(layer, layer + 1))
        parts.append((_weights_of(shape, precision, one), count))
    names = WeightBytes.__struct_fields__
    return WeightBytes(**{name: sum(getattr(part, name) * count for part, count in parts) for name in names})


@lru_cache(maxsize=4096)
def _first_like(shape: ModelShape, has_experts: bool) -> int:
    """The first layer with, or without, experts."""
    return next(layer for layer in range(shape.layers) if shape.has_experts(layer) == has_experts)


@lru_cache(maxsize=4096)
def _weights_of(shape: ModelShape, precision: str, place: Place) -> WeightBytes:
    return weights(shape, precision, place)


@lru_cache(maxsize=4096)
def _kv_bytes(shape: ModelShape, tokens: int, kv_dtype: str, place: Place) -> int:
    return kv_bytes(shape, tokens, kv_dtype, place)
