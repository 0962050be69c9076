"""A worker that puts its groups through their paces: each step is one of the scenarios below, by number.

Every rank knows what every other one brings, so each checks what it gets; a mismatch fails the step.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from collectives import Case, check_case
from fake_worker import FakeWorker

from weft.checkpoint.architectures.place import Place
from weft.engine.core.step import StepPlan, StepResult
from weft.machine.hardware import links
from weft.plan.memory import Capacity
from weft.ranks.comm import Group, StageLink, gloo
from weft.ranks.comm.distributed import DistributedGroup
from weft.ranks.comm.gloo import GlooGroup

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def brought(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Tensor of a rank in a test of communication."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def sums(comm: Group) -> None:
    """Every dtype; scalars, rows, and more than fits a slot of shared memory; the same bits everywhere."""
    for seed, dtype in enumerate(DTYPES):
        for shape in ((), (1, 5), (7, 13), *([(1000, 1101)] if dtype == torch.float32 else [])):
            got = comm.sum(brought(comm.rank, shape, dtype, seed))
            assert got.shape == shape
            assert got.dtype == dtype
            truth = sum(brought(r, shape, torch.float64, seed).to(dtype).double() for r in range(comm.size))
            torch.testing.assert_close(got.double(), truth, rtol=0.02, atol=0.02)
            if shape:
                everyone = comm.gather(got, [shape[-1]] * comm.size)
                assert (everyone is None) == (comm.rank != 0)
                if everyone is not None:
                    assert torch.equal(everyone, torch.cat([got] * comm.size, dim=-1)), "other bits on another rank"


def strided(comm: Group) -> None:
    """A view with holes is summed like any other."""
    got = comm.sum(brought(comm.rank, (6, 4)).t())
    torch.testing.assert_close(got, sum(brought(r, (6, 4)).t() for r in range(comm.size)))


def gathers(comm: Group) -> None:
    """Uneven columns, in one row and in more than fit a slot."""
    for shape in ((6,), (2, 30), (400, 12000)):
        sizes = [shape[-1] * (r + 1) // 6 for r in range(comm.size)]
        got = comm.gather(brought(comm.rank, (*shape[:-1], sizes[comm.rank])), sizes)
        if comm.rank == 0:
            assert got is not None
            assert torch.equal(got, torch.cat([brought(r, (*shape[:-1], n)) for r, n in enumerate(sizes)], dim=-1))
        else:
            assert got is None


def stumbling(comm: Group) -> None:
    """Ranks that are early and late by turns never see each other's yesterday or tomorrow."""
    for turn in range(60):
        if turn % comm.size == comm.rank:
            time.sleep(0.001)
        x = torch.full((3,), float(turn * 10 + comm.rank))
        assert comm.sum(x).tolist() == [sum(turn * 10.0 + r for r in range(comm.size))] * 3
        x.fill_(-1.0)


def hand_on(link: StageLink, place: Place) -> None:
    """Much is sent before anything is received, from one buffer that is overwritten each time."""
    count, buffer = 40, torch.empty(2, 3)
    if not place.first:
        time.sleep(0.05)
    for turn in range(count):
        if not place.first:
            buffer = link.recv((2, 3), torch.float32)
            assert buffer.tolist() == [[float(turn)] * 3] * 2
        if not place.last:
            buffer.fill_(float(turn))
            link.send(buffer)
            buffer.fill_(-1.0)
            # What has long been received is not kept.
            assert len(getattr(link, "_sent", ())) <= place.stages


def hand_on_halves(link: StageLink, place: Place) -> None:
    for seed, dtype in enumerate(DTYPES):
        if not place.first:
            assert torch.equal(link.recv((300, 4), dtype), brought(0, (300, 4), dtype, seed))
        if not place.last:
            link.send(brought(0, (300, 4), dtype, seed))


WITHIN_STAGES = (sums, strided, gathers, stumbling)
BETWEEN_STAGES = (hand_on, hand_on_halves)


class CommWorker(FakeWorker):
    def execute(self, step: StepPlan) -> StepResult | None:
        (number,) = step.tokens
        if self.place.tp_size > 1:
            WITHIN_STAGES[number](self.links.tensor)
        if self.place.stages > 1:
            BETWEEN_STAGES[number](self.links.stage, self.place)
        return StepResult(step.id, [number], [None], {}) if self.rank == self.plan.output_rank else None


class CollectivesWorker(FakeWorker):
    """Each step is a case of `collectives`, among the first ranks of the world of torch.distributed.

    The limits of messages and sums lie within the sizes of the cases.
    """

    def load(self) -> Capacity:
        gloo.POSTED_BYTES, links.IN_FLIGHT_BYTES, links.SHOT_BYTES = 200, 60, 400
        cpu = torch.device("cpu")
        processes = [dist.new_group(list(range(size)), backend="gloo") for size in range(1, self.place.tp_size + 1)]
        self.groups: list[list[Group]] = [
            [DistributedGroup(each, cpu), GlooGroup(each, cpu)] if self.rank < size else []
            for size, each in enumerate(processes, 1)
        ]
        return super().load()

    def execute(self, step: StepPlan) -> StepResult | None:
        case = Case.from_tokens(step.tokens)
        for group in self.groups[case.ranks - 1]:
            check_case(group, case)
        return StepResult(step.id, [0], [None], {}) if self.rank == self.plan.output_rank else None
