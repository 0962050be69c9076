"""Sums that a kernel makes of the parts in other ranks' memory, in Triton's interpreter: ranks are threads, and their
memory the host's."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from tests.cpu import checkpoints
from tests.cpu.kernels import triton_kernels
from weft import LLM, SamplingParams
from weft.ranks.comm.symmetric import PUBLISHED_BYTES, TURNS, Parts, SymmetricGroup
from weft.ranks.comm.threads import Meeting, ThreadGroup
from weft.ranks.comm.trial import all_add_up
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.plain import PlainPointwise, create_plain_kernels
from weft.ranks.kernels.triton import pointwise

T = TypeVar("T")

PLAIN, CPU = create_plain_kernels(), torch.device("cpu")
DTYPES = [torch.float32, torch.float16]  # the interpreter does not round to bfloat16: tests/gpu has that
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
WAIT_S = 60.0


class Here(SymmetricGroup):
    """The part of one thread; `late` is what its device does between a meeting and the kernel that reads."""

    def __init__(self, group: Group, rank: int, late: Callable[[], None] = lambda: None) -> None:
        self.rank, self.size = rank, group.size
        self._plain = ThreadGroup(group.meeting, rank, CPU)

        def meet() -> None:
            group.barrier.wait(WAIT_S)
            late()

        self.parts = Parts(group.places(), rank, meet)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.parts.begin()
        return self._plain.sum(x)


class Group:
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype
        self.meeting, self.barrier = Meeting(size), threading.Barrier(size)
        self._memory = [
            [torch.zeros(PUBLISHED_BYTES // dtype.itemsize, dtype=dtype) for _ in range(size)] for _ in range(TURNS)
        ]

    def places(self) -> list[list[torch.Tensor]]:
        return [list(turn) for turn in self._memory]

    def run(self, job: Callable[[int], T]) -> list[T]:
        """Results of the threads of all ranks."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(job, range(self.size)))


@pytest.fixture(autouse=True)
def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than that the interpreter does not know."""
    lock, made = threading.Lock(), pointwise.sum_add_norm

    def sum_add_norm(*given: Any) -> torch.Tensor:
        with lock:
            return made(*given)

    monkeypatch.setattr(pointwise, "sum_add_norm", sum_add_norm)


def brought(rank: int, turn: int, dims: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(dims, generator=torch.Generator().manual_seed(1000 * turn + rank)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "dims"), [(1, (2, 64)), (2, (1, 50)), (3, (5, 576)), (8, (3, 2048))])
def test_the_result_is_the_sum_and_the_norm(size: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """The residual to the bit on every rank; the norm as near as another order of adding leaves it."""
    weight, eps = torch.rand(dims[1]).to(dtype), 1e-6

    def ran(kernels: Kernels) -> list[tuple[torch.Tensor, torch.Tensor]]:
        group = Group(size, dtype)

        def job(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
            comm, residual = Here(group, rank), brought(99, 0, dims, dtype)
            for turn in range(3):
                x = brought(rank, turn, dims, dtype)
                out = kernels.pointwise.sum_add_norm(x, residual, weight, eps, comm)
                assert torch.equal(x, brought(rank, turn, dims, dtype)) or kernels is PLAIN
            return residual, out

        return group.run(job)

    got, want = ran(triton_kernels(1)), ran(PLAIN)
    for residual, out in got:
        assert torch.equal(residual, want[0][0])
        assert torch.equal(out, got[0][1])
        torch.testing.assert_close(out, want[0][1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_late_change_no_bit(seed: int) -> None:
    """Steps as a decoder makes them, an odd number of sums in the kernel between two of another kind, as where a graph
    of one step follows that of another."""
    size, dims, dtype = 3, (2, 24), torch.float32
    weight = torch.rand(dims[1])

    def ran(kernels: Kernels, late: bool) -> list[torch.Tensor]:
        group = Group(size, dtype)

        def job(rank: int) -> torch.Tensor:
            chance = random.Random(f"{seed} {rank}")

            def wait() -> None:
                if late and chance.random() < 0.3:
                    time.sleep(chance.random() * 0.003)

            comm, turns, kept = Here(group, rank, wait), count(), []

            def part() -> torch.Tensor:
                return brought(rank, next(turns), dims, dtype)

            for sums in (1, 3, 3, 2, 5):
                residual = comm.sum(part())
                for _ in range(sums):
                    wait()
                    kept.append(kernels.pointwise.sum_add_norm(part(), residual, weight, 1e-6, comm))
                kept.append(residual.add_(comm.sum(part())))
            return torch.stack(kept)

        return group.run(job)

    calm, wild = ran(triton_kernels(1), late=False), ran(triton_kernels(1), late=True)
    assert all(torch.equal(calm[0], other) for other in calm + wild)
    torch.testing.assert_close(calm[0], ran(PLAIN, late=False)[0])


def test_a_rank_that_is_far_ahead_overwrites_nothing_that_another_still_reads() -> None:
    """It comes as far as the next meeting, for which the late one is still missing."""
    group, dims, weight = Group(2, torch.float32), (1, 8), torch.ones(8)
    ahead = threading.Event()

    def job(rank: int) -> torch.Tensor:
        def late() -> None:
            # Until the other has laid its next part, and waits for this rank.
            if rank == 1 and not ahead.is_set():
                ahead.set()
                while group.barrier.n_waiting == 0:
                    time.sleep(0.001)

        comm, residual = Here(group, rank, late), torch.zeros(dims)
        kernels = triton_kernels(1)
        for turn in range(2):
            kernels.pointwise.sum_add_norm(torch.full(dims, 10.0**turn), residual, weight, 1e-6, comm)
        return residual

    assert [residual.tolist() for residual in group.run(job)] == [[[22.0] * 8]] * 2
    assert ahead.is_set()


def test_large_tensors_and_other_dtypes_are_not_published() -> None:
    group = Group(1, torch.bfloat16)
    comm = Here(group, 0)
    most = PUBLISHED_BYTES // 2
    assert comm.publish_part(torch.ones(1, most, dtype=torch.bfloat16)) is not None
    for x in (torch.ones(1, most + 1, dtype=torch.bfloat16), torch.ones(1, 8)):
        assert comm.publish_part(x) is None
        residual, weight = torch.ones_like(x), torch.ones(x.shape[1], dtype=x.dtype)
        out = triton_kernels(1).pointwise.sum_add_norm(x, residual, weight, 0.0, comm)
        assert residual.unique().item() == 2 and out.unique().item() == 1


def test_the_trial_tells_memory_that_both_turns_share() -> None:
    """A rank that is ahead overwrites such memory before the other has read it."""
    for shared in (False, True):
        group = Group(2, torch.float32)
        if shared:
            group._memory[1] = group._memory[0]

        def job(rank: int, group: Group = group) -> bool:
            def late() -> None:
                if rank == 1:
                    deadline = time.monotonic() + 0.02
                    while group.barrier.n_waiting == 0 and time.monotonic() < deadline:
                        time.sleep(0.001)

            return all_add_up(Here(group, rank, late))

        assert all(group.run(job)) == (not shared)


def test_every_layer_sums_so_and_each_step_ends_with_a_sum_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On which the turns of captured steps rest."""
    path, events = checkpoints.make("llama", tmp_path), defaultdict(list)
    add_up, fused = ThreadGroup.sum, PlainPointwise.sum_add_norm

    def count_sum(self: ThreadGroup, x: torch.Tensor) -> torch.Tensor:
        events[self].append("sum")
        return add_up(self, x)

    def count_fused(
        self: PlainPointwise, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: Any
    ) -> torch.Tensor:
        out = fused(self, x, residual, weight, eps, comm)
        events[comm][-1] = "fused"
        return out

    config = {"executor": "inline", "attention_backend": "torch", "skip_tokenizer_init": True}
    with LLM(str(path), tensor_parallel_size=2, pipeline_split=(2, checkpoints.LAYERS - 2), **config) as llm:
        monkeypatch.setattr(ThreadGroup, "sum", count_sum)
        monkeypatch.setattr(PlainPointwise, "sum_add_norm", count_fused)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    per_step = (
        ["sum", *["fused"] * (2 * 2 - 1), "sum"],  # the embedding, two layers
        [*["fused"] * (2 * (checkpoints.LAYERS - 2) - 1), "sum"],
    )
    assert sorted(events.values()) == sorted([step * 3 for step in per_step for _ in range(2)])
