"""Connecting a rank that is a process of its own to its groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from weft.comm.base import Comm, Links, Solo
from weft.comm.distributed import DistributedComm, peers_may_vanish
from weft.comm.line import Edge, SharedLine
from weft.comm.shared import SharedComm
from weft.comm.trial import connect_symmetric
from weft.plan.plan import Plan

# Collectives do not time out: the executor notices at once if a rank dies, and a rank that loads for long is not dead.
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
    """Connect a rank to its groups. Every rank of the plan calls this, and it returns when all have.

    Ranks that each have a GPU to themselves use NCCL. Other ranks of one stage use `memory` and `pipes` (see
    SharedComm; no pipes if the system has none), and neighbouring stages use the edges between them (see SharedLine).
    Groups that have neither use gloo. `store` is a file through which ranks that use NCCL or gloo find each other.
    """
    place, device = plan.places[rank], torch.device(plan.devices[rank])
    tensor: Comm | None = Solo() if plan.tensor_parallel == 1 else None
    pipeline: Comm | None = Solo() if plan.stages == 1 else None
    if not have_own_gpus(plan):
        if pipes:
            tensor = SharedComm(place.tp_rank, memory, pipes)
        if before is not None or after is not None:
            pipeline = SharedLine(place.stage, plan.stages, before, after, device)
    if tensor is not None and pipeline is not None:
        return Links(tensor, pipeline)
    return _connect_process_groups(plan, rank, store, tensor, pipeline)


def _connect_process_groups(plan: Plan, rank: int, path: str, tensor: Comm | None, pipeline: Comm | None) -> Links:
    """Connect the groups that are None through torch.distributed; `path` is the file of its store."""
    device = torch.device(plan.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with peers_may_vanish():
        size = len(plan.places)
        store = dist.FileStore(path, size)  # type: ignore[attr-defined]  # missing in torch's stubs
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=NEVER)
        if tensor is None:
            tensor = _connect_stage(plan, rank, device, store)
        if pipeline is None:
            pipeline = _connect_pipeline(plan, rank, device)
    return Links(tensor, pipeline)


def _connect_stage(plan: Plan, rank: int, device: torch.device, store: Store) -> Comm:
    """Connect the ranks of a stage, with symmetric memory if their GPUs can read each other's memory."""
    stages = [[place.rank for place in plan.places if place.stage == stage] for stage in range(plan.stages)]
    stage = plan.places[rank].stage
    group, ranks = _create_groups(plan, stages)[stage], stages[stage]
    if not (have_own_gpus(plan) and plan.peer_to_peer):
        return DistributedComm(group, device)
    devices = [plan.devices[peer] for peer in ranks]
    return connect_symmetric(group, device, getattr(torch, plan.dtype), store=store, ranks=ranks, devices=devices)


def _connect_pipeline(plan: Plan, rank: int, device: torch.device) -> Comm:
    """Connect the ranks of one tp_rank in every stage."""
    tp_ranks = range(plan.tensor_parallel)
    pipelines = [[place.rank for place in plan.places if place.tp_rank == tp_rank] for tp_rank in tp_ranks]
    return DistributedComm(_create_groups(plan, pipelines)[plan.places[rank].tp_rank], device)


def _create_groups(plan: Plan, groups: Sequence[list[int]]) -> list[dist.ProcessGroup]:
    """Create a process group of each list of ranks. Every rank creates every group, in the same order."""
    backend = "nccl" if have_own_gpus(plan) else "gloo"
    return [dist.new_group(ranks, backend=backend, timeout=NEVER) for ranks in groups]


def have_own_gpus(plan: Plan) -> bool:
    """Return True if each rank has a GPU to itself: NCCL refuses two ranks on one GPU."""
    return all(name.startswith("cuda") for name in plan.devices) and len(set(plan.devices)) == len(plan.devices)
