"""Export targets: the limits of another system that the choice of a plan needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log2

import msgspec

from weft.planner.deployment import DeploymentLayout
from weft.planner.question import Question
from weft.planner.search.cuts import Cut
from weft.planner.search.domains import Device, cluster_devices
from weft.study.export.deployment import Deployment
from weft.study.export.files import ExportFile

Unsupported = Callable[[Question, DeploymentLayout], str]


class ExportTarget(msgspec.Struct, frozen=True):
    """A system that a plan can be exported to.

    `engines` are the engines that it can start, the usual one first. `create_files` makes the files. `unsupported`
    returns the reason why a layout is impossible, "" if it is possible. `substitutes` maps precisions that the target
    does not read to precisions that it takes instead. Its first server answers on `port`.
    """

    name: str
    title: str
    engines: tuple[str, ...]
    create_files: Callable[[Deployment], Sequence[ExportFile]]
    unsupported: Unsupported = lambda question, layout: ""
    substitutes: Mapping[str, str] = {}
    port: int = 8000


def spans_nodes(question: Question, layout: DeploymentLayout) -> bool:
    """Return True if a replica has GPUs on more than one node."""
    devices = used_devices(question, layout)
    return any(len({device.node for device in devices[ranks]}) > 1 for ranks in layout.replica_slices())


def used_devices(question: Question, layout: DeploymentLayout) -> list[Device]:
    """The device of each rank."""
    devices = cluster_devices(question.cluster)
    return [devices[index] for index in layout.gpus]


def crowded(layout: DeploymentLayout) -> bool:
    """Return True if a GPU holds several ranks."""
    return len(set(layout.gpus)) < len(layout.gpus)


def cut_distance(wanted: Cut, other: Cut) -> float:
    """Distance between two cuts: the doublings between their sizes, and 1 if their precisions differ.

    The size of a replica counts twice, so that a pipeline is nearer to tensor parallelism than replicas are.
    """
    doublings = (abs(log2(one / two)) for one, two in zip(_sizes(wanted), _sizes(other), strict=True))
    return sum(doublings) + (other.precision != wanted.precision)


def _sizes(cut: Cut) -> tuple[int, ...]:
    sizes = cut.parallelism
    return *sizes.sizes.values(), sizes.replica_size, sizes.replica_size, 1 + sizes.shares_experts
