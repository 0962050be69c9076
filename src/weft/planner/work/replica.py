"""Replica: the stages of one replica, and the seconds of a step through them.

Formulas: docs/planner-accuracy.md; constants: planner.profiles, hardware/data. A step of a stage takes as long as the
roofline of its slowest rank, plus the all-reduces between its ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil, exp, inf, lgamma, log
from typing import TypeVar

from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.quantised.precision import canonical
from weft.machine.hardware.cluster import Cluster, GpuPosition
from weft.machine.hardware.gpus import GpuSpec
from weft.machine.hardware.links import LinkCost, LinkKind, all_reduce_cost, send_cost
from weft.planner.deployment import DeploymentLayout, Workload
from weft.planner.profiles import OURS, EngineProfile
from weft.planner.work.exchange import HIDDEN_BYTES, ExchangeCost, exchange_cost, exchanging_ranks, stage_ranks
from weft.planner.work.roofline import Roofline, Seconds
from weft.planner.work.work import RankWork, rank_work

FP32_BYTES = 4  # bytes of a number that passes between ranks that compute in 32 bits
NEGLIGIBLE = 1e-6  # share of steps below which it does not matter that they have this many prompts

T = TypeVar("T", float, Seconds)


def build_replicas(
    shape: ModelShape, layout: DeploymentLayout, cluster: Cluster, profile: EngineProfile
) -> list[PlannedReplica]:
    """The replicas of a layout in order. Equal ones are one object."""
    rooflines: dict[GpuSpec, Roofline] = {}
    by_content: dict[object, PlannedReplica] = {}
    by_seats: dict[object, PlannedReplica] = {}
    replicas = []
    for number, seats in enumerate(_seats(layout, cluster)):
        if seats not in by_seats:
            replica = PlannedReplica(shape, layout, cluster, profile, number, rooflines)
            by_seats[seats] = by_content.setdefault(replica.key, replica)
        replicas.append(by_seats[seats])
    return replicas


def _seats(layout: DeploymentLayout, cluster: Cluster) -> list[tuple[object, ...]]:
    """A key per replica, equal for replicas on the same kinds of GPUs in the same places. A large cluster has many."""
    homes, signatures = cluster.gpu_positions, layout.rank_signatures(cluster)
    keys = []
    for ranks in layout.replica_slices():
        key: tuple[object, ...] = *signatures[ranks], homes[layout.gpus[ranks.start]].link
        if layout.parallelism.replica_size > 1:
            places = [homes[gpu] for gpu in layout.gpus[ranks]]
            key += tuple((home.node - places[0].node, home.link, home.group) for home in places)
        keys.append(key)
    return keys


class Stage:
    """The different ranks of one stage, by their work and GPU. Stages with the same `key` are equal."""

    def __init__(
        self,
        ranks: Sequence[tuple[Roofline, RankWork]],
        sums: LinkCost,
        exchange: ExchangeCost | None,
        send_on: LinkCost,
        vocab: int,
        number_bytes: int = HIDDEN_BYTES,
    ) -> None:
        self.ranks, self.sums, self.exchange, self.send_on, self.vocab = ranks, sums, exchange, send_on, vocab
        self._number_bytes = number_bytes
        self.key = (tuple((id(rank), id(work)) for rank, work in ranks), sums, exchange, send_on)

    def links_s(self, work: RankWork, tokens: float, routed: float, logits: float) -> float:
        """The sums of the layers, the gather of the logits, the exchange with the experts, and the send to the next
        stage.

        `tokens` are the replica's, `routed` the tokens of all replicas that share its experts.
        """
        size = work.hidden * self._number_bytes
        reductions = sum(layer.count * layer.sums for layer in work.layers)
        total = reductions * self.sums.seconds(tokens * size) + self.exchange_s(work, tokens, routed)
        if work.head:
            total += self.sums.seconds(logits * self.vocab * self._number_bytes / 2)
        return total + self.send_on.seconds(tokens * size)

    def exchange_s(self, work: RankWork, tokens: float, routed: float) -> float:
        """The exchange with the experts in all layers; arguments as in `links_s`."""
        if self.exchange is None:
            return 0.0
        layers = sum(layer.count for layer in work.layers if layer.experts)
        return layers * self.exchange.seconds(tokens, routed)

    def decode_s(self, batch: float, context: float, replicas: int) -> Seconds:
        """One token of each of `batch` sequences; the experts serve the tokens of `replicas` replicas."""
        routed = batch * replicas
        by_rank = [rank.decode_s(work, batch, context, routed, self.experts_dealt(work)) for rank, work in self.ranks]
        slowest = max(by_rank, key=lambda seconds: seconds.total)
        return slowest + Seconds(links=self.links_s(self.ranks[0][1], batch, routed, batch))

    def prefill_s(self, length: float, replicas: int, prompts: float = 1.0) -> float:
        """Seconds per prompt, with `prompts` prompts of `length` tokens read in one step."""
        tokens = length * prompts
        routed = tokens * replicas
        by_rank = [rank.prefill_s(work, length, routed, self.experts_dealt(work), prompts) for rank, work in self.ranks]
        slowest = max(seconds.total for seconds in by_rank)
        return (slowest + self.links_s(self.ranks[0][1], tokens, routed, prompts)) / prompts

    @staticmethod
    def experts_dealt(work: RankWork) -> bool:
        """Return True if the rank holds only some of the experts, and those whole."""
        return any(layer.experts and layer.experts.held < layer.experts.count for layer in work.layers)


class PlannedReplica:
    """One replica of a layout: its stages, and the seconds of a round through them.

    `rooflines` has the known ones, by GPU, and gets the new ones.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: DeploymentLayout,
        cluster: Cluster,
        profile: EngineProfile,
        number: int,
        rooflines: dict[GpuSpec, Roofline],
    ) -> None:
        self.profile = profile
        # Replicas that share their experts step together, and the experts serve the tokens of all of them.
        self.sharing = layout.parallelism.groups
        precision = canonical(layout.precision)
        held, tensor = profile.held_precision(precision), layout.parallelism.tensor_parallel
        number_bytes = FP32_BYTES if precision == "fp32" else HIDDEN_BYTES
        seats = layout.replica(number)

        def rank_of(place: Place, index: int) -> tuple[Roofline, RankWork]:
            gpu = cluster.devices[index]
            if gpu not in rooflines:
                rooflines[gpu] = Roofline(gpu, profile.on(gpu), precision)
            return rooflines[gpu], rank_work(shape, held, layout.kv_dtype, place)

        self.stages = []
        for start in range(0, len(seats), tensor):
            group = seats[start : start + tensor]
            ranks = [rank_of(place, index) for place, index in group]
            distinct = {(id(roofline), id(work)): (roofline, work) for roofline, work in ranks}
            sums = all_reduce_between(cluster, [index for _, index in group], profile)
            # From the first rank to the first one of the next stage.
            send_on = stage_send(cluster, [index for _, index in seats[start : start + tensor + 1 : tensor]])
            exchange = _exchange(shape, layout, cluster, profile, start // tensor) if self.sharing > 1 else None
            self.stages.append(Stage(tuple(distinct.values()), sums, exchange, send_on, shape.vocab, number_bytes))
        self.control_s = control_time(cluster, [index for _, index in seats], profile)
        # Stages on one GPU take turns: each stage has the number of the first stage on its GPU.
        first = [index for _, index in seats[::tensor]]
        self.turns = tuple(first.index(index) for index in first)
        self.key = (self.turns, self.control_s, *(stage.key for stage in self.stages))
        self._prefills: dict[tuple[int, float], list[float]] = {}  # by prompt length and prompts per step
        self._rounds_known: dict[tuple[float, float], tuple[Seconds, Seconds]] = {}  # by batch and context

    def round_s(self, batch: float, workload: Workload) -> Seconds:
        """One token of each of `batch` requests in the middle of their answers.

        With more than one request, as many groups of them as there are stages are in flight at once.
        """
        return max(self._rounds(batch, workload), key=lambda seconds: seconds.total)

    def _rounds(self, batch: float, workload: Workload) -> tuple[Seconds, Seconds]:
        """(one group through all stages, the slowest stage for all groups): the longer one is the round."""
        context = workload.context(0.5)
        if (batch, context) in self._rounds_known:
            return self._rounds_known[batch, context]
        groups = self._groups(batch)
        each = batch / groups
        steps = self._steps(each, context)
        host = Seconds(overhead=(self.profile.step_us.value + self.profile.sequence_us.value * each) * 1e-6)
        one = host + Seconds(links=self.control_s)
        for step in steps:
            one = one + step
        slowest = max(self._by_gpu(steps, Seconds()), key=lambda seconds: seconds.total) + host
        crowd = groups * (1 + self.profile.bubble.value * (groups - 1))
        self._rounds_known[batch, context] = one, scaled(slowest, crowd)
        return self._rounds_known[batch, context]

    def _groups(self, batch: float) -> float:
        """Number of steps in flight at once."""
        return min(len(self.stages), max(1.0, batch)) if self.profile.pipelined.value else 1.0

    def _steps(self, batch: float, context: float) -> list[Seconds]:
        known: dict[object, Seconds] = {}
        for stage in self.stages:
            if stage.key not in known:
                known[stage.key] = stage.decode_s(batch, context, self.sharing)
        return [known[stage.key] for stage in self.stages]

    def _by_gpu(self, steps: Sequence[T], nothing: T) -> list[T]:
        """The work of each GPU in a round, all of its stages together."""
        if len(set(self.turns)) == len(steps):
            return list(steps)
        totals: dict[int, T] = {}
        for turn, step in zip(self.turns, steps, strict=True):
            totals[turn] = totals.get(turn, nothing) + step
        return list(totals.values())

    def _prompts(self, length: int, most: float, count: float = 1.0) -> list[float]:
        """Seconds of each stage for a prompt that is read in steps of `most` tokens with `count` prompts each.

        Each step streams the weights.
        """
        if most >= length:
            return self._whole(length, max(1.0, min(count, most / length)))
        step = max(1, int(most))
        both = zip(self._whole(length), self._whole(step), strict=True)
        return [max(at_once, in_steps * length / step) for at_once, in_steps in both]

    def _whole(self, length: int, count: float = 1.0) -> list[float]:
        if (length, count) not in self._prefills:
            known: dict[object, float] = {}
            for stage in self.stages:
                if stage.key not in known:
                    known[stage.key] = stage.prefill_s(length, self.sharing, count)
            self._prefills[length, count] = [known[stage.key] for stage in self.stages]
        return self._prefills[length, count]

    def prefill_s(self, workload: Workload, most: float = inf, count: float = 1.0) -> float:
        """Seconds for which a request's prompt keeps the slowest stage (without a pipeline: every GPU) from decoding.

        The prompt is read in steps of `most` tokens with `count` prompts each.
        """
        times = self._prompts(workload.input_len, most, count)
        return max(self._by_gpu(times, 0.0)) if self.profile.pipelined.value else sum(times)

    def full_step_s(self, tokens: int, longest: int) -> float:
        """A step with `tokens` tokens of prompts, each of at most `longest` tokens, through all stages."""
        length = min(tokens, longest)
        return sum(self._whole(length)) * tokens / length + self.profile.step_us.value * 1e-6 + self.control_s

    def prompt_s(self, workload: Workload, most: float = inf) -> float:
        """Time to first token of a request alone, its prompt read in steps of `most` tokens."""
        steps = ceil(workload.input_len / most) if most < workload.input_len else 1
        step_s = self.profile.step_us.value * 1e-6 + self.control_s
        return sum(self._prompts(workload.input_len, most)) + steps * step_s

    def tpot_s(self, batch: float, workload: Workload, batched_tokens: int) -> float:
        """Time per token. During one answer, the prompt of each of the other requests is read once."""
        return self.round_s(batch, workload).total + self._reading_s(batch, batch - 1, workload, batched_tokens)

    def throughput(self, batch: float, workload: Workload, batched_tokens: int) -> float:
        """Tokens per second with `batch` requests always running."""
        return batch / (self.round_s(batch, workload).total + self._reading_s(batch, batch, workload, batched_tokens))

    def _reading_s(self, batch: float, prompts: float, workload: Workload, batched_tokens: int) -> float:
        """Seconds added to a round because `prompts` prompts are read during one answer, in steps of at most
        `batched_tokens` tokens.

        Every stage works as long as the slowest one, on p prompts per round: prompts r / answer length. In a pipeline
        of g groups the steps behind one that reads a prompt wait for it in every stage, and the stages behind it wait
        for work. So in a round with such a step among its g, the whole way of the prompt through all stages, R, counts.
        The slack that a step has on its way is subtracted if the slowest stage sets the pace. Prompts arrive at steps
        at random, as a Poisson process. Prompts that arrive at the g - 1 steps behind another one cost nothing: they
        follow it through the stages. So after g - 1 steps the next prompt counts. It is 1 / P steps away, P being the
        probability that a step has one: g / (g - 1 + 1 / P) in a round. The same holds for steps that have two, and
        more. The part of a prompt beyond `batched_tokens` goes through the stages right behind the prompt's beginning.
        Prompts that arrive at one step are read together, and stream the weights once: a step that has any has r / (1 -
        exp(-r)) on average.
        """
        groups = self._groups(batch)
        room = max(1.0, batched_tokens - batch / groups)  # tokens of a step that decoding leaves to prompts
        arrivals = prompts / workload.output_len / groups  # prompts that arrive at a step
        count = arrivals / (1 - exp(-arrivals)) if arrivals > NEGLIGIBLE else 1.0
        times = self._prompts(workload.input_len, room, count)
        slowest = self.prefill_s(workload, room, count)
        busy_s = slowest * prompts / workload.output_len
        if groups == 1 or not self.profile.stages_wait.value:
            return busy_s
        one, all_groups = (seconds.total for seconds in self._rounds(batch, workload))
        fit = room / workload.input_len  # prompts that fit into a step
        slack, waiting, number, share = max(0.0, all_groups - one), 0.0, 0, 1 - exp(-arrivals)
        while share > NEGLIGIBLE:
            whole = min(1.0, max(0.0, fit - number))
            waiting += groups * share / (1 + (groups - 1) * share) * max(0.0, whole * sum(times) - slack)
            waiting += groups * share * (1 - whole) * slowest
            number, slack = number + 1, 0.0
            share -= exp(number * log(arrivals) - arrivals - lgamma(number + 1))  # whose factors alone may overflow
        return max(busy_s, waiting)


def _exchange(
    shape: ModelShape, layout: DeploymentLayout, cluster: Cluster, profile: EngineProfile, stage: int
) -> ExchangeCost | None:
    """The exchange of tokens in a stage of replicas that share their experts.

    Other engines gather all tokens on all ranks of the stage; their constants were fitted so.
    """
    ours = profile.name == OURS
    ranks = exchanging_ranks(shape, layout, stage) if ours else stage_ranks(layout, stage)
    link = all_reduce_between(cluster, [layout.gpus[rank] for rank in ranks], profile)
    size = shape.hidden * HIDDEN_BYTES
    graphs = bool(profile.graphs.value) and not cluster.on_cpu
    return exchange_cost(shape, layout, link, graphs=graphs) if ours else ExchangeCost(link, size, size)


def scaled(seconds: Seconds, by: float) -> Seconds:
    """Each part multiplied by `by`."""
    return Seconds(*(getattr(seconds, name) * by for name in seconds.__struct_fields__))


def slowest_link_between(cluster: Cluster, indices: Sequence[int]) -> LinkKind:
    """The slowest link between any two of these GPUs, by their numbers."""
    return slowest_link({cluster.gpu_positions[index] for index in indices})


def slowest_link(homes: Collection[GpuPosition]) -> LinkKind:
    """The slowest link between GPUs in these places."""
    first, *others = homes
    if any(other.node != first.node for other in others):
        return "network"
    if others and "pcie" in {home.link for home in homes}:
        return "pcie"
    return "nvlink" if first.group is not None and not others else first.link


def all_reduce_between(cluster: Cluster, indices: Sequence[int], profile: EngineProfile) -> LinkCost:
    """An all-reduce between these GPUs, at the pace of their slowest link."""
    kind = slowest_link_between(cluster, indices)
    gpu, nodes = _slowest_sender(cluster, indices, kind), nodes_of(cluster, indices)
    graphs = bool(profile.graphs.value)
    return all_reduce_cost(gpu, kind, len(indices), cluster.network_Bps, graphs, cluster.network_s, nodes)


def nodes_of(cluster: Cluster, indices: Sequence[int]) -> int:
    """Number of nodes that these GPUs are on."""
    return len({cluster.gpu_positions[index].node for index in indices})


def control_time(cluster: Cluster, indices: Sequence[int], profile: EngineProfile) -> float:
    """Seconds in which a step of our engine waits for a message between the head and other nodes, 0 on one node.

    The first node's ranks begin with the plan of a step, and the last node's result ends it; of a group that spans
    nodes, the other ranks begin later by a message.
    """
    if profile.name != OURS or nodes_of(cluster, indices) == 1:
        return 0.0
    return send_cost(cluster.devices[indices[0]], "network", cluster.network_Bps, cluster.network_s).latency_s


def stage_send(cluster: Cluster, indices: Sequence[int]) -> LinkCost:
    """The send from a stage's GPU to the next stage's; free if there is no next one."""
    if len(indices) < 2:
        return LinkCost(0.0, 0.0)
    kind = slowest_link_between(cluster, indices)
    return send_cost(_slowest_sender(cluster, indices, kind), kind, cluster.network_Bps, cluster.network_s)


def _slowest_sender(cluster: Cluster, indices: Sequence[int], kind: LinkKind) -> GpuSpec:
    first, *others = {id(gpu): gpu for gpu in (cluster.devices[index] for index in indices)}.values()
    if not others:
        return first
    return max((first, *others), key=lambda gpu: send_cost(gpu, kind, cluster.network_Bps).s_per_byte)
