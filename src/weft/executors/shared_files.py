"""Memory and pipes through which ranks of one host exchange tensors: descriptors that their processes inherit."""

from __future__ import annotations

import os

from weft.plan.plan import Plan
from weft.plan.wiring import EdgeFiles, GroupFiles, SharedMemory


def open_shared_memory(plan: Plan) -> list[SharedMemory]:
    """Open the memory and the pipes of every rank, in rank order."""
    size = plan.tensor_parallel
    groups = [open_group_files(size) for _ in range(plan.stages)]
    # edges[rank]: from that rank to the same tensor-parallel rank of the next stage.
    edges = [open_edge_files() for _ in plan.places[:-size]]
    return [
        SharedMemory(
            tensor=groups[place.stage],
            before=None if place.first else edges[place.rank - size],
            after=None if place.last else edges[place.rank],
        )
        for place in plan.places
    ]


def open_group_files(ranks: int) -> GroupFiles | None:
    """Open memory and pipes for the ranks of a group; None for one rank."""
    if ranks == 1:
        return None
    return GroupFiles(os.memfd_create("weft"), tuple(os.pipe() for _ in range(ranks)))


def open_edge_files() -> EdgeFiles:
    """Open memory and pipes between two stages."""
    return EdgeFiles(os.memfd_create("weft"), os.pipe(), os.pipe())


def shared_descriptors(memory: SharedMemory) -> list[int]:
    """Return all descriptors of a rank's memory and pipes."""
    pipes = [pipe for edge in (memory.before, memory.after) if edge for pipe in (edge.full, edge.free)]
    if memory.tensor:
        pipes += memory.tensor.pipes
    files = [files.memory for files in (memory.tensor, memory.before, memory.after) if files]
    return [*files, *(end for pipe in pipes for end in pipe)]
