"""Every kind of group does the same: threads, shared memory, torch.distributed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import torch
from collectives import MAX_RANKS, OPERATIONS, check_case
from comm_worker import BETWEEN_STAGES, WITHIN_STAGES
from drawn_collectives import cases
from fake_worker import make_plan, make_step
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.executors.base import Executor
from weft.engine.executors.inline import InlineExecutor
from weft.engine.executors.processes import ProcessExecutor
from weft.plan.plan import named_devices
from weft.plan.wiring import GroupFiles, Network, SharedMemory, Wiring
from weft.ranks.comm import Links, Solo, connect
from weft.ranks.comm.base import add_up
from weft.ranks.comm.connect import Site, connect_rank
from weft.ranks.comm.shared import SharedMemoryGroup
from weft.ranks.comm.threads import Meeting, ThreadGroup, Threads

HERE = "comm_worker:CommWorker"
WAIT_S = 60
T = TypeVar("T")


@pytest.fixture(scope="module")
def start(request: pytest.FixtureRequest) -> Iterator[Callable[[int, int], Executor]]:
    """Ranks that run scenarios, started once per layout."""
    started: dict[tuple[int, int], Executor] = {}

    def create() -> Executor:
        return (
            InlineExecutor(HERE)
            if request.param == "threads"
            else ProcessExecutor(HERE, network=request.param == "gloo")
        )

    def start(tensor: int, stages: int) -> Executor:
        if (tensor, stages) not in started:
            executor = create()
            executor.start(make_plan(tensor=tensor, stages=stages))
            started[tensor, stages] = executor
        return started[tensor, stages]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        yield start
        for executor in started.values():
            executor.close()


@pytest.mark.parametrize("start", ["threads", "shared memory", "gloo"], indirect=True)
@pytest.mark.parametrize("number", range(len(WITHIN_STAGES)), ids=lambda n: WITHIN_STAGES[n].__name__)
def test_within_a_stage(start: Callable[[int, int], Executor], number: int) -> None:
    assert start(3, 1).submit(make_step(0, [number])).result(WAIT_S).tokens == [number]


@pytest.mark.parametrize("start", ["threads", "shared memory", "gloo"], indirect=True)
@pytest.mark.parametrize("number", range(len(BETWEEN_STAGES)), ids=lambda n: BETWEEN_STAGES[n].__name__)
def test_between_stages(start: Callable[[int, int], Executor], number: int) -> None:
    assert start(1, 2).submit(make_step(0, [number])).result(WAIT_S).tokens == [number]


each_operation = pytest.mark.parametrize("operation", range(len(OPERATIONS)), ids=lambda n: OPERATIONS[n].__name__)


@pytest.fixture(scope="module")
def collectives() -> Iterator[Executor]:
    """Ranks that run cases in groups of gloo."""
    executor = ProcessExecutor("comm_worker:CollectivesWorker", network=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        executor.start(make_plan(tensor=MAX_RANKS))
    yield executor
    executor.close()


@each_operation
@given(data=st.data())
def test_operations_of_gloo(collectives: Executor, operation: int, data: st.DataObject) -> None:
    collectives.submit(make_step(0, data.draw(cases(operation)).to_tokens())).result(WAIT_S)


@each_operation
@given(data=st.data())
def test_operations_of_threads(operation: int, data: st.DataObject) -> None:
    case = data.draw(cases(operation))
    meeting = Meeting(case.ranks)
    groups = [ThreadGroup(meeting, rank, torch.device("cpu")) for rank in range(case.ranks)]
    together([partial(check_case, group, case) for group in groups])


@each_operation
@given(data=st.data(), slot_bytes=st.integers(9, 40).map(lambda n: 8 * n))
def test_operations_of_shared_memory(operation: int, data: st.DataObject, slot_bytes: int) -> None:
    """However small the slots are against what is brought."""
    case = data.draw(cases(operation))
    with open_memory(case.ranks) as (memory, pipes):
        groups = [SharedMemoryGroup(rank, memory, pipes, slot_bytes=slot_bytes) for rank in range(case.ranks)]
        together([partial(check_case, group, case) for group in groups])


@each_operation
@given(data=st.data())
def test_operations_of_a_rank_alone(operation: int, data: st.DataObject) -> None:
    case = data.draw(cases(operation, most=1))
    check_case(Solo(), case)


@contextmanager
def open_memory(size: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Memory of a group, and a pipe for each rank."""
    memory, pipes = os.memfd_create("test"), [os.pipe() for _ in range(size)]
    try:
        yield memory, pipes
    finally:
        for end in (memory, *(end for pipe in pipes for end in pipe)):
            os.close(end)


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


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sum_is_rounded_once(size: int) -> None:
    """More than two halves are added up in float32: the small ones are not lost one after the other."""
    parts = [torch.full((4,), 256.0 if r == 0 else 1.0, dtype=torch.bfloat16) for r in range(size)]
    out = torch.empty(4, dtype=torch.bfloat16)
    assert add_up(parts, out) is out
    assert out.tolist() == [torch.tensor(256.0 + size - 1).bfloat16().item()] * 4


@pytest.mark.parametrize(
    "wait",
    [
        lambda links: links.tensor.sum(torch.ones(2)),
        lambda links: links.tensor.all_to_all(torch.ones(2), [1, 1], [1, 1]),
        lambda links: links.stage.recv((2,), torch.float32),
    ],
)
def test_a_thread_that_waits_for_one_that_has_ended(wait: Callable[[Links], object]) -> None:
    plan = make_plan(tensor=2, stages=2)
    threads = Threads(plan)
    links = connect_rank(Site(plan, 2, threads))
    timer = threading.Timer(0.05, threads.abort)
    timer.start()
    with pytest.raises(ConnectionError, match="ended"):
        wait(links)
    timer.join()
    with pytest.raises(ConnectionError, match="ended"):
        wait(links)


def test_links_that_a_plan_does_not_need_are_those_of_a_rank_alone() -> None:
    plan = make_plan(tensor=1, stages=2)
    links = connect_rank(Site(plan, 0, Threads(plan)))
    assert [isinstance(link, Solo) for link in (links.tensor, links.stage, links.expert, links.data)] == [
        *(True, False, True, True)
    ]
    x, solo = torch.ones(2, 3), Solo()
    assert solo.sum(x) is x
    # A single stage is its own neighbour.
    solo.send(x)
    x.fill_(2.0)
    assert solo.recv((2, 3), torch.float32).tolist() == [[1.0] * 3] * 2


GPUS, SHARED = ("cuda:0", "cuda:1", "cuda:2", "cuda:3"), ("cuda:0", "cuda:0", "cuda:1", "cuda:1")
FILES = SharedMemory(groups=(GroupFiles((0, 1), 3, ()),), before=None, after=None)


@pytest.mark.parametrize(
    ("devices", "wiring", "peer_to_peer", "group", "link"),
    [
        (("cpu",) * 4, FILES, True, connect.create_shared_memory_group, connect.create_shared_memory_link),
        (("cpu",) * 4, Network(), True, connect.create_gloo_group, connect.create_gloo_link),
        (SHARED, FILES, True, connect.create_shared_memory_group, connect.create_shared_memory_link),
        (SHARED, Network(), True, connect.create_gloo_group, connect.create_gloo_link),
        (GPUS, Network(), True, connect.create_symmetric_group, connect.create_nccl_link),
        (GPUS, Network(), False, connect.create_nccl_group, connect.create_nccl_link),
    ],
)
def test_transport_by_devices_and_wiring(
    devices: tuple[str, ...], wiring: Wiring, peer_to_peer: bool, group: object, link: object
) -> None:
    """NCCL is for ranks with a GPU each; the others share memory, or have the network."""
    plan = msgspec.structs.replace(
        make_plan(tensor=2, stages=2), devices=named_devices(*devices), peer_to_peer=peer_to_peer
    )
    site = Site(plan, 1, wiring)
    for transports, ranks, chosen in (
        (connect.GROUP_TRANSPORTS, [0, 1], group),
        (connect.LINK_TRANSPORTS, [1, 3], link),
    ):
        assert next(create for applies, create in transports if applies(site, ranks)) is chosen
