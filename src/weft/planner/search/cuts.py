"""Candidate layouts: the cuts worth trying on a cluster, before it is known if they fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import permutations

import msgspec

from weft.plan.parallelism import Parallelism
from weft.planner.question import Question
from weft.planner.search.domains import (
    Device,
    cluster_devices,
    gpu_type,
    interconnect_domains,
    node_devices,
    place_replicas,
    tensor_groups,
    tensor_sizes,
)

MAX_PERMUTED_TYPES = 3  # GPU types of which all orders are tried

Group = tuple[Device, ...]  # the GPUs of one stage
ReplicaGroups = tuple[Group, ...]  # the groups of one replica, stage by stage


class Cut(msgspec.Struct, frozen=True):
    """The sizes of a layout, whose shares are still open. `device` is the word for the device of a single rank."""

    parallelism: Parallelism
    precision: str
    device: str = "GPU"

    @property
    def flags(self) -> str:
        """The flags that ask for these sizes."""
        sizes = self.parallelism
        words = [f"-tp {sizes.tensor_parallel} -pp {sizes.pipeline_parallel} -dp {sizes.data_parallel}"]
        words += ["-ep"] * bool(sizes.deals_experts)
        words += [f"--expert-parallel-size {sizes.expert_size}"] * bool(sizes.expert_size)
        return " ".join(words)

    def __str__(self) -> str:
        sizes = self.parallelism
        named = zip(("TP", "PP", "DP", "EP"), sizes.sizes.values(), strict=True)
        words = [f"{name} {size}" for name, size in named if size > 1]
        # Without attention groups and parts, experts are cut as TP says already.
        words += [f"MoE TP {sizes.expert_columns}"] * bool(sizes.expert_size)
        return f"{' x '.join(words) or f'one {self.device}'}, {self.precision}"


class CandidateLayout(msgspec.Struct, frozen=True, dict=True):
    """A cut, and the GPUs of each stage of each replica. The shares of layers and tensors are still open."""

    cut: Cut
    replicas: tuple[ReplicaGroups, ...]

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Each rank's GPU."""
        return tuple([device for replica in self.replicas for stage in replica for device in stage])

    @cached_property
    def gpus(self) -> tuple[int, ...]:
        """The number of each rank's GPU, as `DeploymentLayout.gpus`."""
        return tuple([device.number for device in self.devices])


def candidate_layouts(question: Question) -> Iterator[CandidateLayout]:
    """Every candidate layout that the cluster has the GPUs for, within the user's constraints.

    Tensor parallelism stays in one interconnect domain. A node with several types of GPU is also tried as a whole, cut
    unevenly, and each type also without the others. Tensor parallelism across nodes is tried only if the user wants
    more ranks than a node has.
    """
    for precision in question.precisions:
        seen: set[tuple[Cut, tuple[int, ...]]] = set()
        for layout in _of_precision(question, precision):
            key = layout.cut, layout.gpus
            if key not in seen:
                seen.add(key)
                yield layout


def _of_precision(question: Question, precision: str) -> Iterator[CandidateLayout]:
    constraints = question.constraints
    if constraints.devices:
        yield _on_given_devices(question, precision, constraints.devices)
        return
    for pools in _choices_of_pools(question):
        if constraints.tensor_parallel:
            sizes = [constraints.tensor_parallel]
        else:
            sizes = tensor_sizes(pools, question.shape.q_heads)
        for tensor in sizes:
            groups = tensor_groups(pools, tensor)
            if constraints.tensor_parallel and not groups:
                across_nodes = tuple(device for node in node_devices(question.cluster) for device in node)
                groups = tensor_groups([across_nodes], tensor)
            yield from _of_groups(question, precision, tensor, groups)


def _choices_of_pools(question: Question) -> Iterator[list[Group]]:
    """Ways to choose pools of GPUs within which a tensor-parallel group may lie: the interconnect domains; on a mixed
    cluster also all GPUs of a node together, the GPUs of each type alone, and the GPUs of each name."""
    domains, nodes = interconnect_domains(question.cluster), node_devices(question.cluster)
    yield domains
    by_type: dict[object, list[Group]] = {}
    for domain in domains:
        by_type.setdefault(gpu_type(domain[0].gpu), []).append(domain)
    if len(by_type) > 1:
        yield nodes
        yield from by_type.values()
    names = dict.fromkeys(domain[0].gpu.name for domain in domains)
    if 1 < len(names) < len(by_type):
        for name in names:
            yield [tuple(device for device in node if device.gpu.name == name) for node in nodes]


def _on_given_devices(question: Question, precision: str, gpus: Sequence[int]) -> CandidateLayout:
    """One replica whose stages lie on the GPUs that the user gave."""
    devices = cluster_devices(question.cluster)
    stages = tuple((devices[number],) for number in gpus)
    sizes = Parallelism(1, len(stages), 1, 1, deals_experts=False)
    return CandidateLayout(Cut(sizes, precision, _device_word(stages[0])), (stages,))


def _device_word(group: Group) -> str:
    return "CPU" if group[0].gpu.kind == "cpu" else "GPU"


def _of_groups(question: Question, precision: str, tensor: int, groups: list[Group]) -> Iterator[CandidateLayout]:
    has_experts, device = question.shape.experts is not None, _device_word(groups[0]) if groups else "GPU"
    for stages, count in _depths(question, len(groups)):
        replicas = tuple(place_replicas(groups, stages, count))
        if len(replicas) < count:
            continue
        for parts, dealt in _expert_cuts(question.constraints, tensor, count) if has_experts else [(1, False)]:
            sizes = Parallelism(tensor, stages, count, parts, dealt)
            # Replicas that share their experts exchange tokens in every layer: a stage of all replicas lies together.
            placed = _crosswise(groups, stages, count) if sizes.shares_experts and stages > 1 else replicas
            yield CandidateLayout(Cut(sizes, precision, device), placed)


def _crosswise(groups: Sequence[Group], stages: int, count: int) -> tuple[ReplicaGroups, ...]:
    """`count` replicas: the first stage of each on neighbouring groups, then the second of each, and so on."""
    return tuple(tuple(groups[stage * count + replica] for stage in range(stages)) for replica in range(count))


def reordered_layouts(question: Question, layout: CandidateLayout) -> Iterator[CandidateLayout]:
    """The same cut with its stages or ranks in other orders, if the user has not said what each GPU holds.

    For a pipeline on different GPUs: every order of a few types, otherwise the fastest first and the fastest last; also
    each replica with stages of all types, instead of replicas that differ. If some GPUs stay idle, also the GPUs of one
    type instead of another. For ranks on different GPUs: the GPU with the most memory first, since it also samples.
    """
    constraints, cut = question.constraints, layout.cut
    if constraints.devices or constraints.device_map_strategy or constraints.pipeline_split or constraints.tensor_split:
        return
    if cut.parallelism.pipeline_parallel > 1:
        yield from _reordered_stages(question, layout)
        return
    by_memory = [
        (tuple(sorted(stage, key=lambda device: -device.gpu.usable_bytes(1.0))),) for (stage,) in layout.replicas
    ]
    if by_memory != list(layout.replicas):
        yield CandidateLayout(cut, tuple(by_memory))


def _reordered_stages(question: Question, layout: CandidateLayout) -> Iterator[CandidateLayout]:
    cut = layout.cut
    groups = [stage for replica in layout.replicas for stage in replica]
    everything = tensor_groups(interconnect_domains(question.cluster), cut.parallelism.tensor_parallel)
    if len({_types(group) for group in everything + groups}) == 1:
        return
    tried = {layout.gpus}
    for chosen in _choices_of_groups(groups, everything):
        for order in _orders(chosen):
            for replicas in _placements(cut, _ordered(chosen, order)):
                other = CandidateLayout(cut, replicas)
                if len(replicas) == cut.parallelism.data_parallel and other.gpus not in tried:
                    tried.add(other.gpus)
                    yield other


def _choices_of_groups(groups: list[Group], everything: list[Group]) -> Iterable[list[Group]]:
    """The groups of a layout, and if they are some of `everything`, the first ones in each order of the types."""
    choices = {frozenset(groups): groups}
    if set(groups) <= set(everything):
        for order in _orders(everything):
            first = _ordered(everything, order)[: len(groups)]
            choices.setdefault(frozenset(first), first)
    return choices.values()


def _placements(cut: Cut, groups: list[Group]) -> Iterator[tuple[ReplicaGroups, ...]]:
    """Ways to place the replicas of a cut on ordered groups: each by itself, and each with stages of all types."""
    if not cut.parallelism.shares_experts:
        yield tuple(place_replicas(groups, cut.parallelism.pipeline_parallel, cut.parallelism.data_parallel))
    yield _crosswise(groups, cut.parallelism.pipeline_parallel, cut.parallelism.data_parallel)


Types = tuple[tuple[str, int | None], ...]


def _types(group: Group) -> Types:
    return tuple(gpu_type(device.gpu) for device in group)


def _ordered(groups: Sequence[Group], order: tuple[Types, ...]) -> list[Group]:
    return sorted(groups, key=lambda group: order.index(_types(group)))


def _orders(groups: Sequence[Group]) -> Iterable[tuple[Types, ...]]:
    """The orders in which groups of different GPUs may follow each other."""
    speeds = {_types(group): group[0].gpu.bandwidth_Bps for group in groups}
    fastest = sorted(speeds, key=lambda types: (-speeds[types], str(types)))
    return permutations(fastest) if len(fastest) <= MAX_PERMUTED_TYPES else (tuple(fastest), tuple(fastest[::-1]))


def _depths(question: Question, groups: int) -> list[tuple[int, int]]:
    """(stages, replicas) that this number of groups can form: the deepest pipelines for each number of replicas, so
    that no group is idle without need."""
    stages, replicas = question.constraints.pipeline_parallel, question.constraints.data_parallel
    layers = len(question.shape.layers)
    if stages:
        count = replicas or groups // stages
        return [(stages, count)] if 0 < count * stages <= groups else []
    if replicas:
        deepest = min(groups // replicas, layers)
        return [(depth, replicas) for depth in range(1, deepest + 1)]
    depths = sorted({groups // count for count in range(1, groups + 1)})
    return [(depth, groups // depth) for depth in depths if depth <= layers]


def _expert_cuts(constraints: Parallelism, tensor: int, count: int) -> list[tuple[int, bool]]:
    """(parts of the experts, are they dealt out) to try for `count` replicas of `tensor` ranks per stage.

    Without the user's choice: every expert cut like all else, and whole experts dealt out to the ranks of a stage of
    all replicas.
    """
    wanted, parts = constraints.deals_experts, constraints.expert_parallel or tensor * count
    if wanted is False or max(parts, count) == 1:
        return [(1, False)]
    return [(parts, True)] if wanted else [(1, False), (parts, True)]
