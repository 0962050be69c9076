"""Cost: how fast a layout will be. Formulas: docs/planner-accuracy.md; constants: planner.profiles, facts/data.

A step of a stage is a roofline over its slowest rank and the sums between its ranks. A request's token takes one
round of all stages, and its share of the prompts that are read meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from statistics import fmean
from typing import Literal, TypeVar

import msgspec

from weft.facts.cluster import Cluster, Home
from weft.facts.gpus import GpuSpec
from weft.facts.links import AllReduce, Kind, all_reduce, send
from weft.facts.precision import canonical
from weft.facts.shape import ModelShape
from weft.planner.deployment import Layout, Workload
from weft.planner.footprint import Footprint, footprint
from weft.planner.profiles import Profile
from weft.planner.roofline import Rank, Seconds
from weft.planner.work import Work, work

SEEN = 0.6  # of its answer is in the cache, on average over requests that run together and end at different times
HIDDEN_BYTES = 2  # of a number that passes between ranks

T = TypeVar("T", float, Seconds)
Limit = Literal["kv_cache", "max_num_seqs", "concurrency"]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a deployment. `single_tok_s` is one request alone, `ttft_s` its first token; `tpot_s` is the time
    per token and request with `concurrency` requests at once, and `saturated_tok_s` what the whole deployment
    answers with `saturated_concurrency`, which `limit` limits. `step` is where a round of the slowest replica
    goes at `concurrency`; `prefill_s` is the reading of one prompt on its slowest stage. The error band is
    relative: 0.2 is 20 % up or down."""

    single_tok_s: float
    ttft_s: float
    tpot_s: float
    concurrency: float
    saturated_tok_s: float
    saturated_concurrency: float
    limit: Limit
    step: Seconds
    prefill_s: float
    error_band: float


def predict(
    shape: ModelShape,
    layout: Layout,
    cluster: Cluster,
    workload: Workload,
    profile: Profile,
    memory: Footprint | None = None,
) -> Prediction:
    """The speed of `layout` under `workload`; `memory` is its footprint where the caller has it already."""
    memory = memory or footprint(shape, layout, cluster, profile, workload)
    runs = replicas(shape, layout, cluster, profile)
    context = workload.input_len + SEEN * workload.output_len
    limits = _limits(memory, profile, context)
    full = [room for room, _ in limits]
    share = inf if workload.concurrency is None else max(1.0, workload.concurrency / len(runs))
    asked = [min(room, share) for room in full]
    # A large cluster has many equal replicas: each is reckoned once.
    tpots = {(run, batch): run.tpot_s(batch, workload) for run, batch in set(zip(runs, asked, strict=True))}
    rates = {(run, batch): run.throughput(batch, workload) for run, batch in set(zip(runs, full, strict=True))}
    alone = {run: run.round_s(1, workload).total for run in set(runs)}
    fastest = min(alone, key=lambda run: (alone[run], runs.index(run)))
    slowest, batch = max(tpots, key=lambda it: (tpots[it], -runs.index(it[0])))
    return Prediction(
        single_tok_s=1 / alone[fastest],
        ttft_s=fastest.prompt_s(workload),
        tpot_s=fmean(tpots[it] for it in zip(runs, asked, strict=True)),
        concurrency=sum(asked) if workload.concurrency is None else min(sum(asked), workload.concurrency),
        saturated_tok_s=sum(rates[it] for it in zip(runs, full, strict=True)),
        saturated_concurrency=sum(full),
        limit=limits[0][1] if asked == full else "concurrency",
        step=slowest.round_s(batch, workload),
        prefill_s=slowest.prefill_s(workload),
        error_band=profile.error.value,
    )


def replicas(shape: ModelShape, layout: Layout, cluster: Cluster, profile: Profile) -> list[Replica]:
    """The replicas of a layout in order; those that are equal are one object."""
    ranks: dict[GpuSpec, Rank] = {}
    known: dict[object, Replica] = {}
    found = []
    alike: dict[object, Replica] = {}
    homes, marks = node_of(cluster), layout.marks(cluster)
    for number, seats in enumerate(layout.replicas()):
        # Replicas on GPUs of the same kinds in the same places, of which a large cluster has many.
        key: tuple[object, ...] = *marks[seats], homes[layout.gpus[seats.start]].link
        if layout.size > 1:
            nodes = [homes[at] for at in layout.gpus[seats]]
            key += tuple([(home.node - nodes[0].node, home.link, home.group) for home in nodes])
        if key not in alike:
            replica = Replica(shape, layout, cluster, profile, number, ranks)
            alike[key] = known.setdefault(replica.key, replica)
        found.append(alike[key])
    return found


def _limits(memory: Footprint, profile: Profile, context: float) -> list[tuple[float, Limit]]:
    """The most requests that each replica runs at once, and why."""
    stages = memory.layout.pipeline_parallel if profile.max_num_seqs_by_stage.value else 1
    known: dict[int, tuple[float, Limit]] = {}
    for replica in memory.replicas:
        if id(replica) not in known:
            most = stages * min(profile.batch(rank.memory_bytes)[1] for rank in replica.ranks)
            held = max(1.0, replica.kv_tokens / context)
            known[id(replica)] = (held, "kv_cache") if held < most else (most, "max_num_seqs")
    return [known[id(replica)] for replica in memory.replicas]


class Stage:
    """The ranks of one stage, told apart by what they do and on which GPU; stages with the same `key` are equal."""

    def __init__(
        self,
        ranks: Sequence[tuple[Rank, Work]],
        sums: AllReduce,
        exchange: AllReduce | None,
        hop: AllReduce,
        vocab: int,
    ) -> None:
        self.ranks, self.sums, self.exchange, self.hop, self.vocab = ranks, sums, exchange, hop, vocab
        self.key = (tuple((id(rank), id(work)) for rank, work in ranks), sums, exchange, hop)

    def links_s(self, work: Work, tokens: float, routed: float, logits: float) -> float:
        """Two sums a layer, the logits gathered, experts' tokens sent and fetched, and the way to the next stage."""
        size = work.hidden * HIDDEN_BYTES
        layers = sum(layer.count for layer in work.layers)
        total = 2 * layers * self.sums.seconds(tokens * size)
        if self.exchange:
            experts = sum(layer.count for layer in work.layers if layer.experts)
            # To the experts and back carries what a sum does, in two calls.
            total += experts * (self.exchange.latency_s + self.exchange.seconds(routed * size))
        if work.head:
            total += self.sums.seconds(logits * self.vocab * HIDDEN_BYTES / 2)
        return total + self.hop.seconds(tokens * size)

    def decode_s(self, batch: float, context: float, replicas: int) -> Seconds:
        routed = batch * replicas
        found = [rank.decode_s(work, batch, context, routed, self.dealt(work)) for rank, work in self.ranks]
        slowest = max(found, key=lambda it: it.total)
        return slowest + Seconds(links=self.links_s(self.ranks[0][1], batch, routed, batch))

    def prefill_s(self, length: float, replicas: int) -> float:
        routed = length * replicas
        found = [rank.prefill_s(work, length, routed, self.dealt(work)) for rank, work in self.ranks]
        return max(it.total for it in found) + self.links_s(self.ranks[0][1], length, routed, 1)

    @staticmethod
    def dealt(work: Work) -> bool:
        return any(layer.experts and layer.experts.held < layer.experts.count for layer in work.layers)


class Replica:
    """One replica of a layout: its stages, and what a round through them takes. `ranks` are those known already."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        cluster: Cluster,
        profile: Profile,
        number: int,
        ranks: dict[GpuSpec, Rank],
    ) -> None:
        self.profile = profile
        # Replicas that share their experts step together, and the experts meet the tokens of all.
        self.sharing = layout.data_parallel if layout.expert_parallel > layout.tensor_parallel else 1
        precision, gpus, nodes = canonical(layout.precision), cluster.gpus, node_of(cluster)
        exchange = link(gpus, nodes, layout.gpus, cluster, profile) if self.sharing > 1 else None
        seats, tensor = layout.replica(number), layout.tensor_parallel
        groups = [seats[start : start + tensor] for start in range(0, len(seats), tensor)]
        self.stages = []
        for group, after in zip(groups, [*groups[1:], ()], strict=True):
            distinct: dict[tuple[int, int], tuple[Rank, Work]] = {}
            for place, index in group:
                gpu = gpus[index]
                if gpu not in ranks:
                    ranks[gpu] = Rank(gpu, profile, precision)
                it = work(shape, precision, layout.kv_dtype, place)
                distinct[id(ranks[gpu]), id(it)] = ranks[gpu], it
            indices = [index for _, index in group]
            sums = link(gpus, nodes, indices, cluster, profile)
            next_one = hop(gpus, nodes, [indices[0], *(index for _, index in after[:1])], cluster)
            self.stages.append(Stage(tuple(distinct.values()), sums, exchange, next_one, shape.vocab))
        # Stages on one GPU take turns: of each stage the first one there.
        first = [group[0][1] for group in groups]
        self.turns = tuple(first.index(index) for index in first)
        self.key = (self.turns, *(stage.key for stage in self.stages))

    def round_s(self, batch: float, workload: Workload) -> Seconds:
        """One token of each of `batch` requests in the middle of their answers. With more requests than one, as many
        groups of them as there are stages are under way at once."""
        context = workload.input_len + workload.output_len / 2
        groups = min(len(self.stages), max(1.0, batch)) if self.profile.pipelined.value else 1.0
        each = batch / groups
        steps = self._steps(each, context)
        host = Seconds(overhead=(self.profile.step_us.value + self.profile.sequence_us.value * each) * 1e-6)
        one = host
        for step in steps:
            one = one + step
        slowest = max(self._in_turn(steps, Seconds()), key=lambda it: it.total) + host
        crowd = groups * (1 + self.profile.bubble.value * (groups - 1))
        return scaled(slowest, crowd) if slowest.total * crowd > one.total else one

    def _steps(self, batch: float, context: float) -> list[Seconds]:
        known: dict[object, Seconds] = {}
        for stage in self.stages:
            if stage.key not in known:
                known[stage.key] = stage.decode_s(batch, context, self.sharing)
        return [known[stage.key] for stage in self.stages]

    def _in_turn(self, steps: Sequence[T], nothing: T) -> list[T]:
        """What each GPU does in a round, all of its stages together."""
        if len(set(self.turns)) == len(steps):
            return list(steps)
        found: dict[int, T] = {}
        for turn, step in zip(self.turns, steps, strict=True):
            found[turn] = found.get(turn, nothing) + step
        return list(found.values())

    def _prompts(self, length: int) -> list[float]:
        known: dict[object, float] = {}
        for stage in self.stages:
            if stage.key not in known:
                known[stage.key] = stage.prefill_s(length, self.sharing)
        return [known[stage.key] for stage in self.stages]

    def prefill_s(self, workload: Workload) -> float:
        """What the prompt of one request keeps the slowest stage from answering; every GPU, without a pipeline."""
        times = self._prompts(workload.input_len)
        return max(self._in_turn(times, 0.0)) if self.profile.pipelined.value else sum(times)

    def prompt_s(self, workload: Workload) -> float:
        """From a request to its first token, with nothing else to do."""
        return sum(self._prompts(workload.input_len)) + self.profile.step_us.value * 1e-6

    def tpot_s(self, batch: float, workload: Workload) -> float:
        """Each of the others' prompts is read once in the time of an answer."""
        return self.round_s(batch, workload).total + self.prefill_s(workload) * (batch - 1) / workload.output_len

    def throughput(self, batch: float, workload: Workload) -> float:
        """Tokens per second with `batch` requests always under way."""
        prompts = self.prefill_s(workload) * batch / workload.output_len
        return batch / (self.round_s(batch, workload).total + prompts)


def scaled(seconds: Seconds, by: float) -> Seconds:
    return Seconds(*(getattr(seconds, name) * by for name in seconds.__struct_fields__))


Nodes = Sequence[Home]


def node_of(cluster: Cluster) -> Nodes:
    """Of each GPU where it is."""
    return cluster.homes


def kind_of(nodes: Nodes, indices: Sequence[int]) -> Kind:
    """The slowest link between any two of these GPUs."""
    return slowest_link({nodes[index] for index in indices})


def slowest_link(homes: Collection[Home]) -> Kind:
    """Between GPUs in these places."""
    first, *others = homes
    if any(other.node != first.node for other in others):
        return "network"
    return "nvlink" if first.group is not None and not others else first.link


def link(
    gpus: Sequence[GpuSpec], nodes: Nodes, indices: Sequence[int], cluster: Cluster, profile: Profile
) -> AllReduce:
    """How these GPUs sum; the slowest link of them sets the pace."""
    kind = kind_of(nodes, indices)
    gpu = _slowest(gpus, kind, indices, cluster)
    return all_reduce(gpu, kind, len(indices), cluster.network_Bps, bool(profile.graphs.value))


def hop(gpus: Sequence[GpuSpec], nodes: Nodes, indices: Sequence[int], cluster: Cluster) -> AllReduce:
    """How a stage sends to the next; nothing after the last."""
    if len(indices) < 2:
        return AllReduce(0.0, 0.0)
    kind = kind_of(nodes, indices)
    return send(_slowest(gpus, kind, indices, cluster), kind, cluster.network_Bps)


def _slowest(gpus: Sequence[GpuSpec], kind: Kind, indices: Sequence[int], cluster: Cluster) -> GpuSpec:
    distinct = {id(gpus[index]): gpus[index] for index in indices}.values()
    if len(distinct) == 1:
        return gpus[indices[0]]
    return max(distinct, key=lambda gpu: send(gpu, kind, cluster.network_Bps).s_per_byte)
