"""Cuts: the layouts worth trying on a cluster, before it is known whether they fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from weft.planner.deployment import Layout
from weft.planner.islands import Device, groups, islands, nodes, replicas, tensor_sizes
from weft.planner.question import Question


class Cut(msgspec.Struct, frozen=True):
    """How many ways a model is cut and copied; `expert_parallel` is 1 where experts are cut like the rest."""

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    expert_parallel: int
    precision: str

    def __str__(self) -> str:
        words = [f"TP {self.tensor_parallel}"] * (self.tensor_parallel > 1)
        words += [f"PP {self.pipeline_parallel}"] * (self.pipeline_parallel > 1)
        words += [f"DP {self.data_parallel}"] * (self.data_parallel > 1)
        words += [f"EP {self.expert_parallel}"] * (self.expert_parallel > 1)
        return f"{' x '.join(words) or 'one GPU'}, {self.precision}"


def cut_of(layout: Layout) -> Cut:
    """What a layout comes down to."""
    return Cut(
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.data_parallel,
        layout.expert_parallel,
        layout.precision,
    )


class Draft(msgspec.Struct, frozen=True):
    """A cut, and the GPUs of each stage of each replica."""

    cut: Cut
    replicas: tuple[tuple[tuple[Device, ...], ...], ...]


def drafts(question: Question) -> Iterator[Draft]:
    """Every draft that the cluster has the GPUs for, within what the user has decided.

    Tensor parallelism stays on an island; a node with several types of GPU is also tried as a whole, cut unevenly,
    and each type also without the others. Across nodes it is tried only where the user asks for more ranks than a
    node has.
    """
    for precision in question.precisions:
        seen: set[tuple[Cut, tuple[tuple[tuple[int, ...], ...], ...]]] = set()
        for draft in _of_precision(question, precision):
            key = (draft.cut, tuple(tuple(tuple(d.number for d in s) for s in r) for r in draft.replicas))
            if key not in seen:
                seen.add(key)
                yield draft


def _of_precision(question: Question, precision: str) -> Iterator[Draft]:
    wish = question.wish
    alike, whole = islands(question.cluster), nodes(question.cluster)
    pools_of = [alike]
    types = dict.fromkeys(island[0].gpu.name for island in alike)
    if len(types) > 1:
        # All GPUs of a node together, and those of each type without the others.
        pools_of += [whole, *([island for island in alike if island[0].gpu.name == name] for name in types)]
    for pools in pools_of:
        sizes = [wish.tensor_parallel] if wish.tensor_parallel else tensor_sizes(pools, question.shape.q_heads)
        for tensor in sizes:
            used = pools
            if wish.tensor_parallel and not groups(pools, tensor):
                used = [tuple(device for node in whole for device in node)]
            yield from _of_groups(question, precision, tensor, groups(used, tensor))


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
            yield Draft(Cut(tensor, stages, count, expert, precision), laid)


def _crosswise(
    members: Sequence[tuple[Device, ...]], stages: int, count: int
) -> tuple[tuple[tuple[Device, ...], ...], ...]:
    """`count` replicas, the first stage of each on neighbouring groups, then the second of each, and so on."""
    return tuple(tuple(members[stage * count + replica] for stage in range(stages)) for replica in range(count))


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
