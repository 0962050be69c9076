"""Without GPUs there is no symmetric memory: the group sums all the same, and says once why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weft.comm import symmetric
from weft.comm.distributed import DistributedComm


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_group_falls_back(group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="weft")
    comm = symmetric.joined(group, torch.device("cpu"), torch.bfloat16)
    assert type(comm) is DistributedComm
    assert torch.equal(comm.sum(torch.arange(8.0)), torch.arange(8.0))
    assert len(caplog.records) == 1 and "NCCL alone" in caplog.text


def test_wrong_sums_are_found(group: dist.ProcessGroup) -> None:
    class Late(DistributedComm):
        """Brings what it was given the time before."""

        _buffer = torch.zeros(1, dtype=torch.bfloat16)

        def sum(self, x: torch.Tensor) -> torch.Tensor:
            before, self._last = getattr(self, "_last", x), x.clone()
            return before if before.shape == x.shape else x

    cpu = torch.device("cpu")
    plain = DistributedComm(group, cpu)
    plain._buffer = torch.zeros(1, dtype=torch.bfloat16)
    assert symmetric.adds_up(plain, torch.bfloat16)
    assert not symmetric.adds_up(Late(group, cpu), torch.bfloat16)
