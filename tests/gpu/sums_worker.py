"""A worker that sums over ranks in every way there is: a step's token says which of its scenarios to run."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from collectives import DTYPES, OPERATIONS, Case, check_case
from fake_worker import FakeWorker

from weft.engine.core.step import StepPlan, StepResult
from weft.ranks.comm.base import add_up
from weft.ranks.comm.symmetric import PUBLISHED_BYTES, SymmetricGroup
from weft.ranks.kernels.plain import PlainPointwise
from weft.ranks.kernels.triton.kernels import TritonPointwise
from weft.ranks.worker.graphs import CudaGraphs

WIDTH, EPS, BF16 = 4096, 1e-6, torch.bfloat16
SPEED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LATE_CYCLES = 200_000  # about 0.1 ms


class SumsWorker(FakeWorker):
    def execute(self, step: StepPlan) -> StepResult | None:
        self.device = torch.device(self.plan.devices[self.rank].name)
        comm = self.links.tensor
        if not isinstance(comm, SymmetricGroup):
            raise RuntimeError("symmetric memory is not in use: the log says why")
        self.comm, self.pointwise = comm, TritonPointwise()
        self.weight = torch.rand(WIDTH, device=self.device, dtype=BF16)
        with torch.inference_mode():
            (self.bits, self.graphs, self.speed, self.operations, self.exchange)[step.tokens[0]]()
        torch.cuda.synchronize(self.device)
        return StepResult(step.id, [0], [None], {}) if self.rank == self.plan.output_rank else None

    def brought(self, rank: int, turn: int, rows: int) -> torch.Tensor:
        seeded = torch.Generator().manual_seed(1000 * turn + rank)
        return torch.randn(rows, WIDTH, generator=seeded).to(self.device, BF16)

    def late(self) -> None:
        """Have the device come late, by turns."""
        torch.cuda._sleep(LATE_CYCLES * (1 + self.rank))

    def bits(self) -> None:
        """The residual to the bit, the norm nearly, the same bits of both on every rank."""
        for rows in (1, 3, PUBLISHED_BYTES // 2 // WIDTH, PUBLISHED_BYTES // 2 // WIDTH + 1):
            ours, theirs = (self.brought(99, 0, rows) for _ in range(2))
            for turn in range(5):
                if turn % self.comm.size == self.rank:
                    self.late()
                out = self.pointwise.sum_add_norm(
                    self.brought(self.rank, turn, rows), ours, self.weight, EPS, self.comm
                )
                parts = [self.brought(rank, turn, rows) for rank in range(self.comm.size)]
                want = PlainPointwise().add_norm(add_up(parts, torch.empty_like(out)), theirs, self.weight, EPS)
                if rows * WIDTH * 2 <= PUBLISHED_BYTES:
                    assert torch.equal(ours, theirs), (rows, turn)
                torch.testing.assert_close(out, want, atol=0.05, rtol=0.05)
                everyone = self.comm.gather(torch.cat([out, ours], dim=-1), [2 * WIDTH] * self.comm.size)
                if everyone is not None:
                    first, *others = everyone.chunk(self.comm.size, dim=-1)
                    assert all(torch.equal(first, other) for other in others), "other bits on another rank"

    def graphs(self) -> None:
        """Graphs of an odd and of an even number of such sums, one after the other with late ranks, as eagerly."""
        capture, rows = CudaGraphs(), 4
        given, made, replays = self.brought(self.rank, 1, rows), [], []
        for count in (3, 2):
            kept = torch.zeros(rows, WIDTH, device=self.device, dtype=BF16)

            def run(count: int = count, kept: torch.Tensor = kept) -> None:
                residual, x = self.comm.sum(given.clone()), given
                for _ in range(count):
                    x = self.pointwise.sum_add_norm(x, residual, self.weight, EPS, self.comm)
                kept.copy_(residual.add_(self.comm.sum(x.clone())))

            run()
            made.append((kept, kept.clone()))
            replays.append(capture(run))
        for turn in range(40):
            if turn % self.comm.size == self.rank:
                self.late()
            which = (turn // 3) % 2
            made[which][0].zero_()
            replays[which]()
            assert torch.equal(*made[which]), turn

    def operations(self) -> None:
        """Every operation against numpy: uneven sizes, zeros among them, in every dtype."""
        draw = random.Random(0)
        for number in range(20 * len(OPERATIONS)):
            rows = tuple(tuple(draw.randrange(10) for _ in range(self.comm.size)) for _ in range(self.comm.size))
            dtype, columns, source = draw.randrange(len(DTYPES)), draw.randrange(9), draw.randrange(self.comm.size)
            case = Case(number % len(OPERATIONS), self.comm.size, dtype, columns, source, number, rows)
            check_case(self.comm, case, str(self.device))

    def exchange(self) -> None:
        """A graph of the exchange of attention groups (ranks/layers/exchange.py), whose tokens are others at each
        replay."""
        capture, sizes = CudaGraphs(), [3 + rank % 2 for rank in range(self.comm.size)]
        given = torch.zeros(sizes[self.rank], WIDTH, device=self.device, dtype=BF16)
        out = torch.zeros_like(given)

        def run() -> None:
            everyone = self.comm.all_gather(given, sizes)
            out.copy_(self.comm.reduce_scatter(everyone * (self.rank + 1), sizes))

        run()
        replay = capture(run)
        for turn in range(40):
            if turn % self.comm.size == self.rank:
                self.late()
            given.copy_(self.brought(self.rank, turn, len(given)))
            replay()
            parts = [given * (rank + 1) for rank in range(self.comm.size)]
            torch.testing.assert_close(out, add_up(parts, torch.empty_like(out)), atol=0.05, rtol=0.05)

    def speed(self) -> None:
        """Microseconds of a sum with its add and norm, in a graph, by how the sum is made."""
        capture, count = CudaGraphs(), 50
        nccl = super(SymmetricGroup, self.comm).sum

        def by(add: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
            return lambda x, residual: self.pointwise.add_norm(add(x), residual, self.weight, EPS)

        def laid(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return self.pointwise.sum_add_norm(x, residual, self.weight, EPS, self.comm)

        for rows in SPEED_ROWS:
            told = []
            for name, way in (("nccl", by(nccl)), ("shots", by(self.comm.sum)), ("laid", laid)):
                if name == "laid" and rows * WIDTH * 2 > PUBLISHED_BYTES:
                    continue
                x, residual = self.brought(self.rank, 0, rows), self.brought(9, 0, rows)

                def run(
                    way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = way,
                    x: torch.Tensor = x,
                    residual: torch.Tensor = residual,
                ) -> None:
                    for _ in range(count):
                        way(x, residual)
                    self.comm.sum(x)

                run()
                replay = capture(run)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                replay()
                begin.record()
                replay()
                end.record()
                end.synchronize()
                told.append(f"{name} {begin.elapsed_time(end) * 1000 / count:.1f} us")
            if self.rank == 0:
                print(f"{rows} rows, {rows * WIDTH * 2 >> 10} KiB: {', '.join(told)}", flush=True)
