"""Connecting a rank that is a process of its own to its groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.comm.base import Comm, Links, Solo
from weft.comm.distributed import DistributedComm, peers_may_vanish
from weft.comm.line import Edge, SharedLine
from weft.comm.shared import SharedComm
from weft.comm.trial import connect_symmetric
from weft.plan.plan import Plan

# A rank that dies is noticed by the executor, at once; one that loads for long is not dead.
NEVER = timedelta(days=365)


def connect_rank(
    plan: Plan,
    rank: int,
    *,
    store: str,
    memory: int,
    pipes: Sequence[tuple[int, int]],
    before: Edge | None = None,
    after: Edge | None = None,
) -> Links:
    """The groups of a rank: every rank of the plan calls this, and it returns when all have.

    Ranks on GPUs of their own meet through NCCL. Others of one stage meet through `memory` and `pipes` (see
    SharedComm; no pipes where the system has none), those of neighbouring stages through the edges between them (see
    SharedLine), and all else goes through gloo. `store` is a file through which those of NCCL and gloo find each other.
    """
    place, device = plan.places[rank], torch.device(plan.devices[rank])
    backend = "nccl" if have_own_gpus(plan) else "gloo"
    shares = bool(pipes) and backend == "gloo"
    tensor: Comm = SharedComm(place.tp_rank, memory, pipes) if shares else Solo()
    pipeline: Comm = Solo()
    stages = [[p.rank for p in plan.places if p.stage == s] for s in range(plan.stages)]
    lines = [[p.rank for p in plan.places if p.tp_rank == t] for t in range(plan.tensor_parallel)]
    lined = backend == "gloo" and (before is not None or after is not None)
    if lined:
        pipeline = SharedLine(place.stage, plan.stages, before, after, device)
    if (plan.stages == 1 or lined) and (plan.tensor_parallel == 1 or shares):
        return Links(tensor, pipeline)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with peers_may_vanish():
        size = len(plan.places)
        meeting = dist.FileStore(store, size)  # type: ignore[attr-defined]  # lacks in its types
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=NEVER)
        # Every rank makes every group, in the same order, and keeps its own.
        if plan.tensor_parallel > 1 and not shares:
            groups = [dist.new_group(ranks, backend=backend, timeout=NEVER) for ranks in stages]
            group, ranks = groups[place.stage], stages[place.stage]
            if backend == "nccl" and plan.peer_to_peer:
                devices = [plan.devices[r] for r in ranks]
                dtype = getattr(torch, plan.dtype)
                tensor = connect_symmetric(group, device, dtype, store=meeting, ranks=ranks, devices=devices)
            else:
                tensor = DistributedComm(group, device)
        if plan.stages > 1 and not lined:
            groups = [dist.new_group(ranks, backend=backend, timeout=NEVER) for ranks in lines]
            pipeline = DistributedComm(groups[place.tp_rank], device)
    return Links(tensor, pipeline)


def have_own_gpus(plan: Plan) -> bool:
    """Whether each rank has a GPU to itself: NCCL refuses two ranks on one."""
    return all(name.startswith("cuda") for name in plan.devices) and len(set(plan.devices)) == len(plan.devices)
