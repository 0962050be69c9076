"""Target: another system, as far as choosing a plan for it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log2

import msgspec

from weft.export.deployment import Deployment
from weft.export.files import ExportFile
from weft.planner.cuts import Cut
from weft.planner.deployment import Layout
from weft.planner.domains import devices
from weft.planner.question import Question

Unsupported = Callable[[Question, Layout], str]


class ExportTarget(msgspec.Struct, frozen=True):
    """`engines` are those that it starts, its usual one first. `cannot` says in words why a layout is nothing that it
    can do, "" where it can; `instead` are precisions that it takes in place of those that it does not read. Its first
    server answers on `port`."""

    name: str
    title: str
    engines: tuple[str, ...]
    create_files: Callable[[Deployment], Sequence[ExportFile]]
    unsupported: Unsupported = lambda question, layout: ""
    substitutes: Mapping[str, str] = {}
    port: int = 8000


def spans_nodes(question: Question, layout: Layout) -> bool:
    """Whether a replica has GPUs on more than one node."""
    there = devices(question.cluster)
    return any(len({there[at].node for _, at in layout.replica(r)}) > 1 for r in range(layout.data_parallel))


def shares_experts(layout: Layout) -> bool:
    """Whether replicas share one set of experts."""
    return layout.expert_parallel > 1 and layout.data_parallel > 1


def crowded(layout: Layout) -> bool:
    """Whether a GPU holds several ranks."""
    return len(set(layout.gpus)) < len(layout.gpus)


def cut_distance(cut: Cut) -> Callable[[Cut], float]:
    """How far another cut is from `cut`: in doublings of each size. That of a replica counts twice, so that a pipeline
    is nearer to tensor parallelism than replicas are."""

    def sizes(it: Cut) -> tuple[int, ...]:
        ranks = it.tensor_parallel * it.pipeline_parallel
        return it.tensor_parallel, it.pipeline_parallel, it.data_parallel, it.expert_parallel, ranks, ranks

    def distance(other: Cut) -> float:
        doublings = (abs(log2(one / two)) for one, two in zip(sizes(cut), sizes(other), strict=True))
        return sum(doublings) + (other.precision != cut.precision)

    return distance
