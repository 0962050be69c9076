"""A worker whose ranks try symmetric memory when they load, and of which some misbehave: the plan's `model` is
"fail 1", "hold 1" or "hold all" (who is stuck in C, and lets no other thread of Python run). Its `checkpoint` is a
folder."""

from __future__ import annotations

import ctypes
import logging
from datetime import timedelta

import torch
import torch.distributed as dist
from fake_worker import FakeWorker

from weft.plan.memory import Capacity
from weft.plan.plan import Plan
from weft.ranks.comm import Links, symmetric, trial

HERE = "trial_worker:TrialWorker"
TIMEOUT = timedelta(seconds=1.9)


class TrialWorker(FakeWorker):
    def __init__(self, plan: Plan, rank: int, links: Links) -> None:
        self.plan, self.rank, self.links, self.place = plan, rank, links, plan.places[rank]
        self.deed = self.phase = ""

    def load(self) -> Capacity:
        size = len(self.plan.places)
        store = dist.FileStore(f"{self.plan.checkpoint}/store", size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size)
        group = dist.group.WORLD
        assert group is not None
        deed, who = self.plan.model.split()

        def meet(*_: object) -> None:
            if who in (str(self.rank), "all"):
                if deed == "fail":
                    raise RuntimeError("CUDA driver error: invalid argument\nand more")
                ctypes.PyDLL(None).sleep(600)  # which keeps Python's lock
            store.get("what the other rank never says")

        symmetric.allocate_buffer = lambda *_: torch.empty(0)  # type: ignore[assignment]
        symmetric.connect_buffers = meet  # type: ignore[assignment]
        trial.obstacle = lambda *_: ""
        logging.getLogger("weft").setLevel(logging.INFO)
        cpu, ranks = torch.device("cpu"), range(size)
        names = ["cpu"] * size
        made = trial.connect_symmetric(
            group, cpu, torch.float32, store=store, ranks=ranks, devices=names, timeout=TIMEOUT
        )
        assert type(made).__name__ == "DistributedGroup"
        # And the store is as patient as it was.
        assert made.sum(torch.ones(1)).item() == size and store.timeout > TIMEOUT
        dist.destroy_process_group()
        return super().load()
