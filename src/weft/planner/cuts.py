"""Cuts: the layouts worth trying on a cluster, before it is known whether they fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import permutations

import msgspec

from weft.planner.deployment import Layout
from weft.planner.domains import Device, devices, groups, islands, nodes, replicas, sort, tensor_sizes
from weft.planner.question import Question

MOST_SORTS = 3  # of GPUs whose orders are all tried


class Cut(msgspec.Struct, frozen=True):
    """How many ways a model is cut and copied; `expert_parallel` is 1 where experts are cut like the rest. `device` is
    what a single rank is called to run on."""

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    expert_parallel: int
    precision: str
    device: str = "GPU"

    def __str__(self) -> str:
        words = [f"TP {self.tensor_parallel}"] * (self.tensor_parallel > 1)
        words += [f"PP {self.pipeline_parallel}"] * (self.pipeline_parallel > 1)
        words += [f"DP {self.data_parallel}"] * (self.data_parallel > 1)
        words += [f"EP {self.expert_parallel}"] * (self.expert_parallel > 1)
        return f"{' x '.join(words) or f'one {self.device}'}, {self.precision}"


def cut_of(layout: Layout) -> Cut:
    """What a layout comes down to."""
    return Cut(
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.data_parallel,
        layout.expert_parallel,
        layout.precision,
    )


class Draft(msgspec.Struct, frozen=True, dict=True):
    """A cut, and the GPUs of each stage of each replica."""

    cut: Cut
    replicas: tuple[tuple[tuple[Device, ...], ...], ...]

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Each rank's GPU."""
        return tuple([device for replica in self.replicas for stage in replica for device in stage])

    @cached_property
    def gpus(self) -> tuple[int, ...]:
        """The number of each rank's GPU, as `Layout.gpus`."""
        return tuple([device.number for device in self.devices])


def drafts(question: Question) -> Iterator[Draft]:
    """Every draft that the cluster has the GPUs for, within what the user has decided.

    Tensor parallelism stays on an island; a node with several types of GPU is also tried as a whole, cut unevenly,
    and each type also without the others. Across nodes it is tried only where the user asks for more ranks than a
    node has.
    """
    for precision in question.precisions:
        seen: set[tuple[Cut, tuple[int, ...]]] = set()
        for draft in _of_precision(question, precision):
            key = draft.cut, draft.gpus
            if key not in seen:
                seen.add(key)
                yield draft


def _of_precision(question: Question, precision: str) -> Iterator[Draft]:
    wish = question.wish
    if wish.devices:
        yield _dictated(question, precision, wish.devices)
        return
    alike, whole = islands(question.cluster), nodes(question.cluster)
    pools_of = [alike]
    types = dict.fromkeys(sort(island[0].gpu) for island in alike)
    if len(types) > 1:
        # All GPUs of a node together, and those of each type without the others.
        pools_of += [whole, *([island for island in alike if sort(island[0].gpu) == it] for it in types)]
    names = dict.fromkeys(name for name, _ in types)
    if 1 < len(names) < len(types):
        pools_of += [[tuple(it for it in node if it.gpu.name == name) for node in whole] for name in names]
    for pools in pools_of:
        sizes = [wish.tensor_parallel] if wish.tensor_parallel else tensor_sizes(pools, question.shape.q_heads)
        for tensor in sizes:
            used = pools
            if wish.tensor_parallel and not groups(pools, tensor):
                used = [tuple(device for node in whole for device in node)]
            yield from _of_groups(question, precision, tensor, groups(used, tensor))


def _dictated(question: Question, precision: str, gpus: Sequence[int]) -> Draft:
    """One replica whose stages lie where the user says."""
    there = devices(question.cluster)
    stages = tuple((there[number],) for number in gpus)
    return Draft(Cut(1, len(stages), 1, 1, precision, _called(stages[0])), (stages,))


def _called(members: Sequence[Device]) -> str:
    return "CPU" if members[0].gpu.kind == "cpu" else "GPU"


def _of_groups(question: Question, precision: str, tensor: int, members: list[tuple[Device, ...]]) -> Iterator[Draft]:
    wish, experts = question.wish, question.shape.experts
    for stages, count in _depths(question, len(members)):
        copies = tuple(replicas(members, stages, count))
        if len(copies) < count:
            continue
        for expert in _expert_choices(wish.expert_parallel, tensor * count, experts.count if experts else 0):
            # Replicas that share their experts exchange tokens in every layer: a stage of all of them lies together.
            crosswise = expert > tensor and stages > 1
            laid = _crosswise(members, stages, count) if crosswise else copies
            yield Draft(Cut(tensor, stages, count, expert, precision, _called(members[0])), laid)


def _crosswise(
    members: Sequence[tuple[Device, ...]], stages: int, count: int
) -> tuple[tuple[tuple[Device, ...], ...], ...]:
    """`count` replicas, the first stage of each on neighbouring groups, then the second of each, and so on."""
    return tuple(tuple(members[stage * count + replica] for stage in range(stages)) for replica in range(count))


def rearranged(question: Question, draft: Draft) -> Iterator[Draft]:
    """The same cut in other orders, where the user has not said what each GPU holds. Of a pipeline on different GPUs:
    every order of a few types, else the fastest first and last; each replica with stages of all types, instead of
    replicas that differ; and where some stay idle, those of one type rather than those of another. Of ranks on
    different GPUs: the roomiest first, since the first of them samples too."""
    wish, cut = question.wish, draft.cut
    said = wish.devices or wish.spread or wish.pipeline_split or wish.tensor_split
    members = [stage for replica in draft.replicas for stage in replica]
    everything = groups(islands(question.cluster), cut.tensor_parallel)
    if cut.pipeline_parallel == 1 and not said:
        roomy = [(tuple(sorted(stage, key=lambda it: -it.gpu.usable_bytes(1.0))),) for (stage,) in draft.replicas]
        if roomy != list(draft.replicas):
            yield Draft(cut, tuple(roomy))
    if cut.pipeline_parallel == 1 or said or len({_sorts(stage) for stage in everything + members}) == 1:
        return
    choices = {frozenset(members): members}
    if set(members) <= set(everything):
        for order in _orders(everything):
            first = _ordered(everything, order)[: len(members)]
            choices.setdefault(frozenset(first), first)
    tried = {draft.gpus}
    for chosen in choices.values():
        for order in _orders(chosen):
            ordered = _ordered(chosen, order)
            mixed = _crosswise(ordered, cut.pipeline_parallel, cut.data_parallel)
            apart = tuple(replicas(ordered, cut.pipeline_parallel, cut.data_parallel))
            for laid in (mixed,) if cut.expert_parallel > cut.tensor_parallel else (apart, mixed):
                other = Draft(cut, laid)
                if len(laid) == cut.data_parallel and other.gpus not in tried:
                    tried.add(other.gpus)
                    yield other


Sorts = tuple[tuple[str, int | None], ...]


def _sorts(stage: Sequence[Device]) -> Sorts:
    return tuple(sort(device.gpu) for device in stage)


def _ordered(members: Sequence[tuple[Device, ...]], order: tuple[Sorts, ...]) -> list[tuple[Device, ...]]:
    return sorted(members, key=lambda stage: order.index(_sorts(stage)))


def _orders(members: Sequence[tuple[Device, ...]]) -> Iterable[tuple[Sorts, ...]]:
    """The orders in which groups of different GPUs may follow each other."""
    speeds = {_sorts(stage): stage[0].gpu.bandwidth_Bps for stage in members}
    fastest = sorted(speeds, key=lambda it: (-speeds[it], str(it)))
    return permutations(fastest) if len(fastest) <= MOST_SORTS else (tuple(fastest), tuple(fastest[::-1]))


def _depths(question: Question, members: int) -> list[tuple[int, int]]:
    """(stages, replicas) that so many groups of ranks can form: for each number of replicas the deepest, so that
    none is idle without need."""
    wish = question.wish
    if wish.pipeline_parallel:
        counts = [wish.data_parallel] if wish.data_parallel else [members // wish.pipeline_parallel]
        return [(wish.pipeline_parallel, count) for count in counts if 0 < count * wish.pipeline_parallel <= members]
    if wish.data_parallel:
        deepest = members // wish.data_parallel
        return [(stages, wish.data_parallel) for stages in range(1, min(deepest, question.shape.layers) + 1)]
    depths = sorted({members // count for count in range(1, members + 1)})
    return [(stages, members // stages) for stages in depths if stages <= question.shape.layers]


def _expert_choices(wished: bool | None, ranks: int, experts: int) -> list[int]:
    """Sizes of expert parallelism to try: 1, and all ranks of a stage of every replica."""
    if not experts or ranks == 1 or wished is False:
        return [1]
    return [ranks] if wished or ranks > experts else [1, ranks]
