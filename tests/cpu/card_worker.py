"""A worker whose ranks on a GPU have a stand-in for it (fake_cuda.py) in their process, and whose others have none."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NoReturn

import pytest
import torch

from tests.cpu.fake_cuda import card, installed
from tests.cpu.interpreter import remember_searches
from weft.plan.plan import Plan
from weft.ranks.comm import Links
from weft.ranks.worker.worker import Worker

HERE = "tests.cpu.card_worker:CardWorker"


def refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a rank on the CPU uses CUDA")


class CardWorker(Worker):
    """The worker as it is. A rank on the card falls asleep only if it has replayed graphs there."""

    def __init__(self, plan: Plan, rank: int, links: Links) -> None:
        self._on_card = plan.devices[rank].name != "cpu"
        self._stack = ExitStack()
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        if self._on_card:
            remember_searches()
            self._stack.enter_context(installed(patch))
        else:
            for name in ("set_device", "mem_get_info", "synchronize", "current_stream", "Event", "CUDAGraph"):
                patch.setattr(torch.cuda, name, refuse)
        super().__init__(plan, rank, links)

    def sleep(self, level: int) -> None:
        assert card.replays > 0 or not self._on_card, "no step was a graph"
        super().sleep(level)
