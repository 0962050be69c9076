"""Memory and pipes through which ranks of one host exchange tensors: descriptors that their processes inherit."""

from __future__ import annotations

import os
from collections.abc import Sequence

from weft.plan.plan import Plan
from weft.plan.wiring import EdgeFiles, GroupFiles, SharedMemory


def open_shared_memory(plan: Plan, node: int = 0) -> dict[int, SharedMemory]:
    """Open the memory and the pipes of every rank of a node, by rank.

    Groups and pairs of stages that span nodes have none.
    """
    size, own = plan.tensor_parallel, plan.ranks_of(node)
    partitions = [*plan.tensor_groups, *plan.exchange_groups]
    groups = [open_group_files(ranks) for ranks in partitions if len(ranks) > 1 and set(ranks) <= set(own)]
    # edges[rank]: from that rank to the same tensor-parallel rank of the next stage.
    edges = {rank: open_edge_files() for rank in own if not plan.places[rank].last and rank + size in own}
    return {
        rank: SharedMemory(
            groups=tuple(files for files in groups if rank in files.ranks),
            before=None if plan.places[rank].first else edges.get(rank - size),
            after=edges.get(rank),
        )
        for rank in own
    }


def open_group_files(ranks: Sequence[int]) -> GroupFiles:
    """Open memory and pipes for the ranks of a group."""
    return GroupFiles(tuple(ranks), os.memfd_create("weft"), tuple(os.pipe() for _ in ranks))


def open_edge_files() -> EdgeFiles:
    """Open memory and pipes between two stages."""
    return EdgeFiles(os.memfd_create("weft"), os.pipe(), os.pipe())


def shared_descriptors(memory: SharedMemory) -> list[int]:
    """Return all descriptors of a rank's memory and pipes."""
    pipes = [pipe for edge in (memory.before, memory.after) if edge for pipe in (edge.full, edge.free)]
    for group in memory.groups:
        pipes += group.pipes
    files = [files.memory for files in (*memory.groups, memory.before, memory.after) if files]
    return [*files, *(end for pipe in pipes for end in pipe)]
