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


def test_a_rank_whose_sums_are_wrong_takes_part_in_all_of_them(group: dist.ProcessGroup) -> None:
    """The others wait for it on their devices, without an end."""
    counts = []
    for wrong in (0.0, 1.0):

        class Counted(DistributedComm):
            _buffer = torch.zeros(1, dtype=torch.bfloat16)
            sums = 0

            def sum(self, x: torch.Tensor) -> torch.Tensor:
                self.sums += 1
                return x + wrong  # noqa: B023

        comm = Counted(group, torch.device("cpu"))
        assert symmetric.adds_up(comm, torch.bfloat16) == (not wrong)
        counts.append(comm.sums)
    assert counts[0] == counts[1]


def test_none_begins_to_sum_where_another_cannot(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here(DistributedComm):
        def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
            super().__init__(group, device)

    def begun(*_: object) -> bool:
        raise AssertionError("it waits for the other rank")

    monkeypatch.setattr(symmetric, "SymmetricComm", Here)
    monkeypatch.setattr(symmetric, "adds_up", begun)
    monkeypatch.setattr(DistributedComm, "sum", lambda self, x: x * 0.0)
    assert type(symmetric.joined(group, torch.device("cpu"), torch.bfloat16)) is DistributedComm
