"""Without GPUs there is no symmetric memory: the group sums all the same, and says once why. And the trial that finds
out ends, whatever a rank does in it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from fake_worker import make_plan
from trial_worker import HERE

from tests.log_events import logged, logged_json
from tests.refusals import refuses
from weft.engine.executors.processes import ProcessExecutor
from weft.errors import EngineError
from weft.ranks.comm import symmetric, trial
from weft.ranks.comm.base import add_up
from weft.ranks.comm.distributed import DistributedGroup
from weft.ranks.comm.symmetric import PUBLISHED_BYTES, TWO_SHOT_BYTES, SymmetricGroup
from weft.ranks.comm.trial import Votes

CPU, SOON = torch.device("cpu"), timedelta(seconds=0.2)


@pytest.fixture
def store(tmp_path: Path) -> dist.Store:
    return dist.FileStore(str(tmp_path / "store"), 1)


@pytest.fixture
def group(store: dist.Store) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def join(group: dist.ProcessGroup, store: dist.Store) -> DistributedGroup:
    return trial.connect_symmetric(group, CPU, torch.bfloat16, store=store, ranks=[0], devices=["cpu"])


def test_the_group_falls_back(group: dist.ProcessGroup, store: dist.Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="weft")
    comm = join(group, store)
    assert type(comm) is DistributedGroup
    assert torch.equal(comm.sum(torch.arange(8.0)), torch.arange(8.0))
    assert len(caplog.messages) == 1
    (event,) = logged(caplog, "no-symmetric-memory")
    assert " cpu (rank 0)" in event["reason"]


# --- what torch's rendezvous makes ---


class Handle:
    """Stand-in for torch's handle, for a group of one."""

    def __init__(self, memory: torch.Tensor, begin: int = 0) -> None:
        self.memory, self.begin, self.met = memory, begin, 0

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        assert rank == 0 and dtype == self.memory.dtype
        return self.memory[self.begin + storage_offset :][: sizes[0]]

    def barrier(self, channel: int) -> None:
        assert channel >= 24
        self.met += 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_lie_behind_the_memory_of_torch_s_own_sums(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    memory = torch.zeros((TWO_SHOT_BYTES + 2 * PUBLISHED_BYTES) // 2, dtype=dtype)
    handle = Handle(memory)
    comm = SymmetricGroup(group, CPU, memory, handle)
    for turn in (0, 1, 0):
        laid = comm.publish_part(torch.full((2, 4), 3.0, dtype=dtype))
        assert laid is not None
        assert laid.tolist() == [memory.data_ptr() + TWO_SHOT_BYTES + turn * PUBLISHED_BYTES]
    assert handle.met == 3
    assert memory.nonzero().flatten().tolist() == [
        TWO_SHOT_BYTES // 2 + at for at in (*range(8), *range(PUBLISHED_BYTES // 2, PUBLISHED_BYTES // 2 + 8))
    ]


def test_a_sum_of_another_kind_begins_the_turns_anew(group: dist.ProcessGroup) -> None:
    """So that what a graph has captured follows any other."""
    memory = torch.zeros((TWO_SHOT_BYTES + 2 * PUBLISHED_BYTES) // 2, dtype=torch.float16)
    comm, x = SymmetricGroup(group, CPU, memory, Handle(memory)), torch.ones(1, 8, dtype=torch.float16)
    first = comm.publish_part(x)
    # Two parts of a dtype that torch's own sums do not know.
    assert torch.equal(comm.sum(x.clone()), x)
    again = comm.publish_part(x)
    assert first is not None and again is not None and torch.equal(first, again)


@pytest.mark.parametrize("rows", [1, 100], ids=["one shot", "two shots"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_four_parts_are_rounded_once(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int
) -> None:
    """Torch's own sums add in the dtype that they are given."""
    parts = [torch.randn(rows, 4096, generator=torch.Generator().manual_seed(at)).to(dtype) for at in range(4)]
    given: list[torch.dtype] = []

    def one_shot(part: torch.Tensor, *_: str) -> torch.Tensor:
        given.append(part.dtype)
        return sum((other.flatten().to(part.dtype) for other in parts[1:]), part.clone())

    def two_shots(part: torch.Tensor, *_: str) -> None:
        part.copy_(one_shot(part))

    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce", one_shot, raising=False)
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_", two_shots, raising=False)
    memory = torch.zeros((TWO_SHOT_BYTES + 2 * PUBLISHED_BYTES) // 2, dtype=dtype)
    comm = SymmetricGroup(group, CPU, memory, Handle(memory))
    comm.size = 4
    assert torch.equal(comm.sum(parts[0].clone()), add_up(parts, torch.empty_like(parts[0])))
    assert given == [torch.float32]


def test_memory_that_lies_elsewhere_is_not_used(group: dist.ProcessGroup) -> None:
    memory = torch.zeros((TWO_SHOT_BYTES + 2 * PUBLISHED_BYTES) // 2 + 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="where it does not lie"):
        SymmetricGroup(group, CPU, memory[:-8], Handle(memory, begin=8))


# --- sums that are wrong ---


def late() -> Callable[[torch.Tensor], torch.Tensor]:
    """A sum that brings what it was given the time before."""
    given: list[torch.Tensor] = []

    def add(x: torch.Tensor) -> torch.Tensor:
        given.append(x.clone())
        return given[-2] if len(given) > 1 else x

    return add


def test_wrong_sums_are_found() -> None:
    assert trial.adds_up(lambda x: x, 0, 1, 64, torch.bfloat16, CPU)
    assert not trial.adds_up(late(), 0, 1, 64, torch.bfloat16, CPU)


def test_a_rank_whose_sums_are_wrong_takes_part_in_all_of_them() -> None:
    """The others wait for it on their devices, without an end."""
    counts = []
    for wrong in (0.0, 1.0):
        given = []

        def add(x: torch.Tensor) -> torch.Tensor:
            given.append(x)  # noqa: B023
            return x + wrong  # noqa: B023

        assert trial.adds_up(add, 0, 1, 64, torch.bfloat16, CPU) == (not wrong)
        counts.append(len(given))
    assert counts[0] == counts[1] > 0


# --- ranks that fail, and ranks that do not come back ---


def test_none_begins_where_another_cannot(
    group: dist.ProcessGroup, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*_: object) -> None:
        raise AssertionError("it waits for the other rank")

    monkeypatch.setattr(trial, "obstacle", lambda *_: "")
    monkeypatch.setattr(symmetric, "allocate_buffer", lambda *_: torch.empty(0))
    monkeypatch.setattr(symmetric, "connect_buffers", begun)
    monkeypatch.setattr(Votes, "first_objection", lambda *_: "out of memory (rank 1)")
    assert type(join(group, store)) is DistributedGroup


@pytest.mark.parametrize("right", [True, False])
def test_wrong_sums_are_a_verdict_for_nccl_as_well(
    group: dist.ProcessGroup, store: dist.Store, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "")
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    made = DistributedGroup(group, CPU)
    monkeypatch.setattr(trial, "obstacle", lambda *_: "")
    monkeypatch.setattr(symmetric, "allocate_buffer", lambda *_: torch.empty(0))
    monkeypatch.setattr(symmetric, "connect_buffers", lambda *_: made)
    monkeypatch.setattr(trial, "all_add_up", lambda _: right)
    assert (join(group, store) is made) == right
    assert os.environ.get("NCCL_P2P_DISABLE") == (None if right else "1")


def test_the_first_objection_is_heard_by_all() -> None:
    store, heard = dist.HashStore(), {}

    def ask(rank: int) -> None:
        votes = Votes(store, [4, 5, 6], 4 + rank, timedelta(seconds=60))
        heard[rank] = [votes.first_objection("sing", ("", "no", "never")[rank]), votes.first_objection("dance", "")]

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {rank: ["no (rank 5)", ""] for rank in range(3)}


def test_a_rank_that_does_not_answer_is_named() -> None:
    with refuses(EngineError, "rank-not-answering") as caught:
        Votes(dist.HashStore(), [6, 7], 6, SOON).first_objection("sing", "")
    cause = caught.value.cause
    assert (cause.rank, cause.phase) == (7, "start") and " 0.2 s " in cause.cause and "sing" in cause.cause


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessExecutor]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    made = ProcessExecutor(worker=HERE)
    yield made
    made.close()


def test_ranks_fall_back_where_one_fails_while_others_wait_for_it(
    executor: ProcessExecutor, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_LOG_FORMAT", "json")
    plan = msgspec.structs.replace(make_plan(tensor=2), model="fail 1", checkpoint=str(tmp_path))
    executor.start(plan)
    executor.close()
    # Rank 0 too has found nobody there, and is the first to say so.
    (event,) = logged_json(capfd.readouterr().err.splitlines(), "no-symmetric-memory")
    assert "(rank 0)" in event["reason"]


@pytest.mark.parametrize("who", ["1", "all"])
def test_the_start_ends_where_ranks_do_not_come_back(
    executor: ProcessExecutor, tmp_path: Path, capfd: pytest.CaptureFixture[str], who: str
) -> None:
    plan = msgspec.structs.replace(make_plan(tensor=2), model=f"hold {who}", checkpoint=str(tmp_path))
    with pytest.raises(EngineError) as caught:
        executor.start(plan)
    cause = caught.value.cause
    if who == "1":
        assert (cause.rank, cause.code) == (1, "rank-not-answering") and " 1.9 s " in cause.cause
    else:
        assert cause.code == "process-stuck" and cause.hint
        assert "in meet" in capfd.readouterr().err
