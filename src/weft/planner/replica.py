"""Replica: the stages of one replica, and what a step through them takes.

Formulas: docs/planner-accuracy.md; constants: planner.profiles, facts/data. A step of a stage is a roofline over its
slowest rank and the sums between its ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil, exp, inf, lgamma, log
from typing import TypeVar

from weft.architectures.shape import ModelShape
from weft.formats.precision import canonical
from weft.hardware.cluster import Cluster, GpuPosition
from weft.hardware.gpus import GpuSpec
from weft.hardware.links import LinkCost, LinkKind, all_reduce_cost, send_cost
from weft.planner.deployment import Layout, Workload
from weft.planner.profiles import Profile
from weft.planner.roofline import Rank, Seconds
from weft.planner.work import Work, work

HIDDEN_BYTES = 2  # of a number that passes between ranks

RARE = 1e-6  # of steps with so many prompts that none needs to be thought of

T = TypeVar("T", float, Seconds)


def replicas(shape: ModelShape, layout: Layout, cluster: Cluster, profile: Profile) -> list[Replica]:
    """The replicas of a layout in order; those that are equal are one object."""
    ranks: dict[GpuSpec, Rank] = {}
    known: dict[object, Replica] = {}
    found = []
    alike: dict[object, Replica] = {}
    homes, marks = cluster.gpu_positions, layout.marks(cluster)
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


class Stage:
    """The ranks of one stage, told apart by what they do and on which GPU; stages with the same `key` are equal."""

    def __init__(
        self,
        ranks: Sequence[tuple[Rank, Work]],
        sums: LinkCost,
        exchange: LinkCost | None,
        hop: LinkCost,
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

    def prefill_s(self, length: float, replicas: int, prompts: float = 1.0) -> float:
        """Of each of so many prompts that are read in one step."""
        tokens = length * prompts
        routed = tokens * replicas
        found = [rank.prefill_s(work, length, routed, self.dealt(work), prompts) for rank, work in self.ranks]
        return (max(it.total for it in found) + self.links_s(self.ranks[0][1], tokens, routed, prompts)) / prompts

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
        precision = canonical(layout.precision)
        exchange = link(cluster, layout.gpus, profile) if self.sharing > 1 else None
        seats, tensor = layout.replica(number), layout.tensor_parallel
        groups = [seats[start : start + tensor] for start in range(0, len(seats), tensor)]
        self.stages = []
        for group, after in zip(groups, [*groups[1:], ()], strict=True):
            distinct: dict[tuple[int, int], tuple[Rank, Work]] = {}
            for place, index in group:
                gpu = cluster.gpus[index]
                if gpu not in ranks:
                    ranks[gpu] = Rank(gpu, profile, precision)
                it = work(shape, profile.held(precision), layout.kv_dtype, place)
                distinct[id(ranks[gpu]), id(it)] = ranks[gpu], it
            indices = [index for _, index in group]
            sums = link(cluster, indices, profile)
            next_one = hop(cluster, [indices[0], *(index for _, index in after[:1])])
            self.stages.append(Stage(tuple(distinct.values()), sums, exchange, next_one, shape.vocab))
        # Stages on one GPU take turns: of each stage the first one there.
        first = [group[0][1] for group in groups]
        self.turns = tuple(first.index(index) for index in first)
        self.key = (self.turns, *(stage.key for stage in self.stages))
        self._read: dict[tuple[int, float], list[float]] = {}  # of prompts, by their length and how many a step has
        self._timed: dict[tuple[float, float], tuple[Seconds, Seconds]] = {}  # rounds, by batch and context

    def round_s(self, batch: float, workload: Workload) -> Seconds:
        """One token of each of `batch` requests in the middle of their answers. With more requests than one, as many
        groups of them as there are stages are under way at once."""
        return max(self._rounds(batch, workload), key=lambda it: it.total)

    def _rounds(self, batch: float, workload: Workload) -> tuple[Seconds, Seconds]:
        """A round as long as one group takes through all stages, and as the slowest stage takes for all groups."""
        context = workload.context(0.5)
        if (batch, context) in self._timed:
            return self._timed[batch, context]
        groups = self._groups(batch)
        each = batch / groups
        steps = self._steps(each, context)
        host = Seconds(overhead=(self.profile.step_us.value + self.profile.sequence_us.value * each) * 1e-6)
        one = host
        for step in steps:
            one = one + step
        slowest = max(self._in_turn(steps, Seconds()), key=lambda it: it.total) + host
        crowd = groups * (1 + self.profile.bubble.value * (groups - 1))
        self._timed[batch, context] = one, scaled(slowest, crowd)
        return self._timed[batch, context]

    def _groups(self, batch: float) -> float:
        """Steps that are under way at once."""
        return min(len(self.stages), max(1.0, batch)) if self.profile.pipelined.value else 1.0

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

    def _prompts(self, length: int, most: float, count: float = 1.0) -> list[float]:
        """What a prompt keeps each stage busy for, read in steps of `most` tokens with `count` prompts: each of them
        streams the weights."""
        if most >= length:
            return self._whole(length, max(1.0, min(count, most / length)))
        step = max(1, int(most))
        pairs = zip(self._whole(length), self._whole(step), strict=True)
        return [max(at_once, it * length / step) for at_once, it in pairs]

    def _whole(self, length: int, count: float = 1.0) -> list[float]:
        if (length, count) not in self._read:
            known: dict[object, float] = {}
            for stage in self.stages:
                if stage.key not in known:
                    known[stage.key] = stage.prefill_s(length, self.sharing, count)
            self._read[length, count] = [known[stage.key] for stage in self.stages]
        return self._read[length, count]

    def prefill_s(self, workload: Workload, most: float = inf, count: float = 1.0) -> float:
        """What the prompt of one request, read in steps of `most` tokens with `count` prompts, keeps the slowest stage
        from answering; every GPU, without a pipeline."""
        times = self._prompts(workload.input_len, most, count)
        return max(self._in_turn(times, 0.0)) if self.profile.pipelined.value else sum(times)

    def read_s(self, tokens: int, longest: int) -> float:
        """A step that is full of prompts of so many tokens at most, through all stages."""
        length = min(tokens, longest)
        return sum(self._whole(length)) * tokens / length + self.profile.step_us.value * 1e-6

    def prompt_s(self, workload: Workload, most: float = inf) -> float:
        """From a request to its first token, in steps of `most` tokens, with nothing else to do."""
        steps = ceil(workload.input_len / most) if most < workload.input_len else 1
        return sum(self._prompts(workload.input_len, most)) + steps * self.profile.step_us.value * 1e-6

    def tpot_s(self, batch: float, workload: Workload, batched_tokens: int) -> float:
        """Each of the others' prompts is read once in the time of an answer."""
        return self.round_s(batch, workload).total + self._reading_s(batch, batch - 1, workload, batched_tokens)

    def throughput(self, batch: float, workload: Workload, batched_tokens: int) -> float:
        """Tokens per second with `batch` requests always under way."""
        return batch / (self.round_s(batch, workload).total + self._reading_s(batch, batch, workload, batched_tokens))

    def _reading_s(self, batch: float, prompts: float, workload: Workload, batched_tokens: int) -> float:
        """What it adds to a round that so many prompts are read in the time of an answer, in steps of at most
        `batched_tokens`.

        Every stage works for as long as it takes the slowest one, p prompts a round: prompts r / answer length. But in
        a pipeline of g groups, the steps behind one that reads a prompt wait for it in every stage, and the stages
        behind it wait for work: of a round with such a step among its g, it is the whole way of the prompt through all
        stages, R, that counts, less what a step has to spare on its way where the slowest stage sets the pace. Prompts
        come to steps at random, as Poisson has it. Of those that come to the g - 1 steps after another one nothing is
        seen: they follow it through the stages. So after g - 1 steps the next of them counts, which is 1 / P steps
        away, P the probability that a step has one: g / (g - 1 + 1 / P) in a round. The same holds of steps that have
        two, and more. What of a prompt is more than `batched_tokens` goes through the stages right behind its
        beginning. Prompts that come to one step are read together, and stream the weights once: of steps that have any,
        each has r / (1 - exp(-r)) on average.
        """
        groups = self._groups(batch)
        room = max(1.0, batched_tokens - batch / groups)  # that answers leave to prompts in a step
        each = prompts / workload.output_len / groups  # prompts that come to a step
        count = each / (1 - exp(-each)) if each > RARE else 1.0
        times = self._prompts(workload.input_len, room, count)
        slowest = self.prefill_s(workload, room, count)
        busy_s = slowest * prompts / workload.output_len
        if groups == 1 or not self.profile.stages_wait.value:
            return busy_s
        one, all_groups = (it.total for it in self._rounds(batch, workload))
        fit = room / workload.input_len  # of those, in it
        spare, waiting, number, share = max(0.0, all_groups - one), 0.0, 0, 1 - exp(-each)
        while share > RARE:
            whole = min(1.0, max(0.0, fit - number))
            waiting += groups * share / (1 + (groups - 1) * share) * max(0.0, whole * sum(times) - spare)
            waiting += groups * share * (1 - whole) * slowest
            number, spare = number + 1, 0.0
            share -= exp(number * log(each) - each - lgamma(number + 1))  # whose factors alone may overflow
        return max(busy_s, waiting)


def scaled(seconds: Seconds, by: float) -> Seconds:
    return Seconds(*(getattr(seconds, name) * by for name in seconds.__struct_fields__))


def kind_of(cluster: Cluster, indices: Sequence[int]) -> LinkKind:
    """The slowest link between any two of these GPUs."""
    return slowest_link({cluster.gpu_positions[index] for index in indices})


def slowest_link(homes: Collection[GpuPosition]) -> LinkKind:
    """Between GPUs in these places."""
    first, *others = homes
    if any(other.node != first.node for other in others):
        return "network"
    return "nvlink" if first.group is not None and not others else first.link


def link(cluster: Cluster, indices: Sequence[int], profile: Profile) -> LinkCost:
    """How these GPUs sum; the slowest link of them sets the pace."""
    kind = kind_of(cluster, indices)
    gpu = _slowest(cluster, indices, kind)
    return all_reduce_cost(gpu, kind, len(indices), cluster.network_Bps, bool(profile.graphs.value))


def hop(cluster: Cluster, indices: Sequence[int]) -> LinkCost:
    """How a stage sends to the next; nothing after the last."""
    if len(indices) < 2:
        return LinkCost(0.0, 0.0)
    kind = kind_of(cluster, indices)
    return send_cost(_slowest(cluster, indices, kind), kind, cluster.network_Bps)


def _slowest(cluster: Cluster, indices: Sequence[int], kind: LinkKind) -> GpuSpec:
    first, *others = {id(gpu): gpu for gpu in (cluster.gpus[index] for index in indices)}.values()
    return (
        max((first, *others), key=lambda gpu: send_cost(gpu, kind, cluster.network_Bps).s_per_byte) if others else first
    )
