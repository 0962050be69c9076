"""NCCL inside CUDA graphs, as far as one card shows it: a group of one rank, its watchdog, captures and replays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from scripts.programs.gpu_check.work import Figure, Options
from weft.ranks.comm.distributed import DistributedGroup
from weft.ranks.worker.graphs import CudaGraphs

REPLAYS = 200
WATCHDOG_S = 3.0  # the watchdog looks every tenth of a second at the events of what has run


def nccl(options: Options) -> Iterator[Figure]:
    """Sums captured, replayed while the watchdog runs, and made eagerly in between: always the same numbers."""
    device = torch.device("cuda", 0)
    with TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)  # type: ignore[attr-defined]  # missing in torch's stubs
        backend = "gloo" if options["rehearse"] else "nccl"
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            group = dist.new_group([0], backend=backend)
            comm = DistributedGroup(group, device)
            assert comm.capturable or options["rehearse"]
            yield from replayed(comm, device, 0.0 if options["rehearse"] else WATCHDOG_S)
        finally:
            dist.destroy_process_group()


def replayed(comm: DistributedGroup, device: torch.device, wait_s: float) -> Iterator[Figure]:
    given = torch.arange(4096.0, device=device)
    kept = torch.zeros(4096, device=device)

    def double() -> None:
        kept.copy_(comm.sum(given * 2))

    double()
    replay = CudaGraphs()(double) if comm.capturable else double
    wrong = 0
    for turn in range(REPLAYS):
        given.fill_(turn)
        replay()
        if turn % 10 == 0:
            comm.sum(given.clone())
        wrong += int((kept != 2 * turn).sum().item())
    time.sleep(wait_s)
    replay()
    torch.cuda.synchronize()
    yield Figure("NCCL in graphs, a group of one: wrong numbers", wrong, "errors", ok=wrong == 0)
