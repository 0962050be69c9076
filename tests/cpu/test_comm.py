"""Every kind of Comm does the same: threads, shared memory, torch.distributed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from comm_worker import BETWEEN_STAGES, WITHIN_STAGES, brought
from fake_worker import make_plan, make_step
from hypothesis import given
from hypothesis import strategies as st

from weft.comm import Comm, Solo
from weft.comm.base import add_up
from weft.comm.connect import have_own_gpus
from weft.comm.shared import SharedComm
from weft.comm.threads import ThreadGroups
from weft.executors import processes
from weft.executors.base import Executor
from weft.executors.inline import InlineExecutor
from weft.executors.processes import ProcessExecutor

HERE = "comm_worker:CommWorker"
WAIT_S = 60
T = TypeVar("T")


@pytest.fixture(scope="module")
def start(request: pytest.FixtureRequest) -> Iterator[Callable[[int, int], Executor]]:
    """Ranks that run scenarios, started once per layout."""
    started: dict[tuple[int, int], Executor] = {}

    def start(tensor: int, stages: int) -> Executor:
        if (tensor, stages) not in started:
            executor = InlineExecutor(HERE) if request.param == "threads" else ProcessExecutor(HERE)
            executor.start(make_plan(tensor=tensor, stages=stages))
            started[tensor, stages] = executor
        return started[tensor, stages]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        if request.param == "gloo":
            patch.setattr(processes, "create_stage_files", lambda ranks: None)
        yield start
        for executor in started.values():
            executor.close()


@pytest.mark.parametrize("start", ["threads", "shared memory", "gloo"], indirect=True)
@pytest.mark.parametrize("number", range(len(WITHIN_STAGES)), ids=lambda n: WITHIN_STAGES[n].__name__)
def test_within_a_stage(start: Callable[[int, int], Executor], number: int) -> None:
    assert start(3, 1).submit(make_step(0, [number])).result(WAIT_S).tokens == [number]


@pytest.mark.parametrize("start", ["threads", "gloo"], indirect=True)
@pytest.mark.parametrize("number", range(len(BETWEEN_STAGES)), ids=lambda n: BETWEEN_STAGES[n].__name__)
def test_between_stages(start: Callable[[int, int], Executor], number: int) -> None:
    assert start(1, 2).submit(make_step(0, [number])).result(WAIT_S).tokens == [number]


def together(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run all at the same time. Threads of no pool: where one fails, the others wait for it for ever."""
    futures: list[Future[T]] = [Future() for _ in jobs]

    def run(future: Future[T], job: Callable[[], T]) -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    for future, job in zip(futures, jobs, strict=True):
        threading.Thread(target=run, args=(future, job), daemon=True).start()
    for future in as_completed(futures, WAIT_S):
        future.result()
    return [future.result() for future in futures]


@given(
    size=st.integers(2, 4),
    rows=st.integers(0, 9),
    columns=st.lists(st.integers(0, 12), min_size=4, max_size=4).filter(lambda c: c[0] + c[1] > 0),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    slot_bytes=st.integers(6, 40).map(lambda n: 8 * n),
)
def test_shared_memory_in_pieces(size: int, rows: int, columns: list[int], dtype: torch.dtype, slot_bytes: int) -> None:
    """However small the slots are against what is brought."""
    columns = columns[:size]
    memory, pipes = os.memfd_create("test"), [os.pipe() for _ in range(size)]
    try:
        comms = [SharedComm(r, memory, pipes, slot_bytes=slot_bytes) for r in range(size)]

        def job(comm: SharedComm) -> tuple[torch.Tensor, torch.Tensor | None]:
            total = comm.sum(brought(comm.rank, (rows, 5), dtype))
            return total, comm.gather(brought(comm.rank, (rows, columns[comm.rank]), dtype), columns)

        got = together([lambda comm=comm: job(comm) for comm in comms])  # type: ignore[misc]
    finally:
        for end in (memory, *(end for pipe in pipes for end in pipe)):
            os.close(end)
    truth = add_up([brought(r, (rows, 5), dtype) for r in range(size)], torch.empty(rows, 5, dtype=dtype))
    for total, _ in got:
        assert torch.equal(total, truth)
    whole = got[0][1]
    assert whole is not None
    assert torch.equal(whole, torch.cat([brought(r, (rows, n), dtype) for r, n in enumerate(columns)], dim=-1))
    assert [part for _, part in got[1:]] == [None] * (size - 1)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sum_is_rounded_once(size: int) -> None:
    """More than two halves are added up in float32: the small ones are not lost one after the other."""
    parts = [torch.full((4,), 256.0 if r == 0 else 1.0, dtype=torch.bfloat16) for r in range(size)]
    out = torch.empty(4, dtype=torch.bfloat16)
    assert add_up(parts, out) is out
    assert out.tolist() == [torch.tensor(256.0 + size - 1).bfloat16().item()] * 4


@pytest.mark.parametrize("wait", [lambda comm: comm.sum(torch.ones(2)), lambda comm: comm.recv((2,), torch.float32, 1)])
def test_a_thread_that_waits_for_one_that_has_ended(wait: Callable[[Comm], object]) -> None:
    groups = ThreadGroups(make_plan(tensor=2))
    comm = groups.links[0].tensor
    timer = threading.Timer(0.05, groups.abort)
    timer.start()
    with pytest.raises(ConnectionError, match="ended"):
        wait(comm)
    timer.join()
    with pytest.raises(ConnectionError, match="ended"):
        wait(comm)


def test_groups_of_one() -> None:
    groups = ThreadGroups(make_plan(tensor=1, stages=2))
    assert [link.pipeline.rank for link in groups.links] == [0, 1]
    x = torch.ones(2, 3)
    solo = groups.links[0].tensor
    assert isinstance(solo, Solo)
    assert solo.sum(x) is x
    assert solo.gather(x, [3]) is x


def test_nccl_is_for_ranks_with_a_gpu_each() -> None:
    import msgspec

    plan = make_plan(tensor=2)
    for devices, own in ((("cpu", "cpu"), False), (("cuda:0", "cuda:1"), True), (("cuda:0", "cuda:0"), False)):
        assert have_own_gpus(msgspec.structs.replace(plan, devices=devices)) == own
