"""Graphs: decode steps captured once per batch size and replayed, so that a GPU does not wait for Python."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from weft.kernels.batch import Batch
from weft.kernels.capture import capture_graph
from weft.kernels.staged import NOWHERE, StagedStep

logger = logging.getLogger("weft")

# Forward of a stage: a batch, and what the stage before sent, to [T, hidden].
Forward = Callable[[Batch, torch.Tensor | None], torch.Tensor]
# What a batch needs before each of its forwards that is no work of the GPU's, and so in no graph.
Prepare = Callable[[Batch], None]
Replay = Callable[[], None]
# Runs a function in such a way that it can be run again, on the same tensors.
Capture = Callable[[Callable[[], None]], Replay]

CAPTURE_S = 2.0  # of captures that a start waits for; the others come while no request runs


def sizes(most: int) -> list[int]:
    """Batch sizes that are worth a graph: small ones exactly, larger ones with an eighth to spare at most."""
    found = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32), *range(320, 513, 64)]
    return [size for size in found if size < most] + [min(most, found[-1])]


@dataclass(frozen=True)
class Captured:
    """A graph with the tensors that it reads and writes."""

    batch: Batch
    incoming: torch.Tensor | None
    out: list[torch.Tensor]
    replay: Replay


class Graphs:
    """Graphs of `forward` for batches of one token per row. A step replays the smallest captured one that has room.

    `width` is the number of columns of a block table, `incoming` the dims and dtype of a row that the stage before
    sends, None on the first stage. With `alone` no other rank takes part in `forward`. `clock` gives seconds.
    """

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        prepare: Prepare,
        rows: int,
        width: int,
        incoming: tuple[int, torch.dtype] | None,
        device: torch.device,
        alone: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._forward, self._capture, self._alone = forward, capture, alone
        self._prepare, self._clock = prepare, clock
        self._sizes = sizes(rows)
        self._captured: dict[int, Captured] = {}
        # All graphs read the same tensors, each the beginning of them.
        self._batch = blank(self._sizes[-1], width, device)
        self._incoming = None
        if incoming is not None:
            self._incoming = torch.zeros((self._sizes[-1], incoming[0]), dtype=incoming[1], device=device)

    @property
    def largest(self) -> int:
        """The most rows of a batch that may have a graph; 0 if there is memory for none."""
        return self._sizes[-1] if self._sizes else 0

    @property
    def uncaptured(self) -> list[int]:
        """Sizes that have no graph yet, smallest first."""
        return [size for size in self._sizes if size not in self._captured]

    def capture_at_start(self, agree: Callable[[float], float] = lambda seconds: seconds) -> None:
        """Capture the largest size, whose memory the others share, and then the smallest ones for CAPTURE_S seconds:
        all of them, if as many times the first one's time are not more. `agree` makes all ranks' seconds one number,
        for all capture the same sizes."""
        seconds, wanted = 0.0, self.largest
        while self._sizes and not self._captured:
            began = self._clock()
            self._capture_size(self._sizes[-1])
            seconds = self._clock() - began
        if self.largest < wanted:
            logger.warning(
                "No memory for CUDA graphs of more than %d rows: larger batches run without; "
                "a lower --gpu-memory-utilization leaves room",
                self.largest,
            )
        seconds, count = agree(seconds), len(self._sizes)
        if seconds * count > CAPTURE_S:
            count = int(CAPTURE_S / seconds)
        for _ in range(count):
            self.capture_next()

    def capture_next(self) -> int:
        """Capture the smallest size that has no graph yet; returns the number of those that are left."""
        if self.uncaptured:
            self._capture_size(self.uncaptured[0])
        return len(self.uncaptured)

    def room(self, staged: StagedStep) -> Batch | None:
        """The smallest captured batch that a step can be laid into, if there is one."""
        rows = staged.rows
        size = next((size for size in self._sizes if size >= rows and size in self._captured), None)
        if size is None or staged.decodes < rows:
            return None
        return replace(self._captured[size].batch, host=staged.host.padded(size), idle=size - rows)

    def run(self, batch: Batch, incoming: torch.Tensor | None) -> torch.Tensor:
        """[R, hidden] of a batch in which `room` was made, or else of any; valid until the next run."""
        self._prepare(batch)
        if not batch.fixed:
            return self._forward(batch, incoming)
        captured, rows = self._captured[batch.rows], batch.rows - batch.idle
        if incoming is not None:
            assert captured.incoming is not None
            captured.incoming[:rows].copy_(incoming)
            if batch.idle:
                # The layers add to it in place: what is left there would grow with every replay.
                captured.incoming[rows:].zero_()
        captured.replay()
        return captured.out[0][:rows]

    def _capture_size(self, size: int) -> None:
        """Capture a size; without memory for it, no size that large is tried again."""
        batch = begin(self._batch, size)
        incoming = None if self._incoming is None else self._incoming[:size]
        out: list[torch.Tensor] = []

        def run() -> None:
            result = self._forward(batch, incoming)
            if out:
                out[0].copy_(result)
            else:
                out.append(result)

        batch.slots.fill_(NOWHERE)
        batch.context.zero_()
        batch.order.copy_(batch.row_starts[:-1])
        try:
            self._prepare(batch)
            run()  # kernels are compiled, and libraries take their memory, before anything is captured
            out.clear()
            replay = self._capture(run)
        except RuntimeError as error:
            # The others, where there are any, are in the middle of sums with this rank, and would wait for the rest.
            if not (self._alone and _is_of_memory(error)):
                raise
            self._sizes = [known for known in self._sizes if known < size or known in self._captured]
        else:
            self._captured[size] = Captured(batch, incoming, out, replay)


def blank(rows: int, width: int, device: torch.device) -> Batch:
    """A batch whose rows do nothing."""

    def zeros(*dims: int) -> torch.Tensor:
        return torch.zeros(dims, dtype=torch.int32, device=device)

    return Batch(
        tokens=zeros(rows),
        positions=zeros(rows),
        slots=torch.full((rows,), NOWHERE, dtype=torch.int64, device=device),
        row_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        context=zeros(rows),
        tables=zeros(rows, width),
        order=torch.arange(rows, dtype=torch.int32, device=device),
        decodes=rows,
        fixed=True,
    )


def begin(batch: Batch, rows: int) -> Batch:
    """Its first rows, of one token each, in the same memory."""
    return Batch(
        tokens=batch.tokens[:rows],
        positions=batch.positions[:rows],
        slots=batch.slots[:rows],
        row_starts=batch.row_starts[: rows + 1],
        context=batch.context[:rows],
        tables=batch.tables[:rows],
        order=batch.order[:rows],
        decodes=rows,
        fixed=True,
    )


class CudaGraphs:
    """`Capture` on a GPU: graphs that share one pool of memory, since no two of them run at once."""

    def __init__(self) -> None:
        self._pool: object = None
        # Torch's own is one for the whole process, on the device of whoever was first.
        self._stream = torch.cuda.Stream()

    def __call__(self, run: Callable[[], None]) -> Replay:
        graph = capture_graph(run, self._stream, self._pool)
        self._pool = self._pool or graph.pool()
        return graph.replay


def _is_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: a capture that it has ended says only that it was ended."""
    within: BaseException | None = error
    while within and not isinstance(within, torch.OutOfMemoryError):
        within = within.__context__
    return within is not None
