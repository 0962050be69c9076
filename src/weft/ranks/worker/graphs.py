"""CUDA graphs of decode steps, captured once per batch size and replayed, so that a GPU does not wait for Python."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from weft.ranks.kernels.batch import NO_ROWS, Batch, Lengths, split_groups, table_columns
from weft.ranks.kernels.capture import capture_graph
from weft.ranks.kernels.staged import NOWHERE, StagedStep

logger = logging.getLogger("weft")

# Forward pass of a stage: a batch, and the hidden states from the stage before, to [T, hidden].
Forward = Callable[[Batch, torch.Tensor | None], torch.Tensor]
# Host work that a batch needs before each of its forward passes, and that no graph can hold.
Prepare = Callable[[Batch], None]
Replay = Callable[[], None]
# Runs a function in such a way that it can be replayed, on the same tensors.
Capture = Callable[[Callable[[], None]], Replay]
# Takes the number of graphs that are captured, and of those for which a start waits.
ReportCaptured = Callable[[int, int], None]

CAPTURE_S = 2.0  # time of the captures that a start waits for; the others come between later steps
# Rows of a graph per row of a step, at most, if weights are quantised. Products with few rows of such weights take as
# long as reading them, products with 256 rows several times as long: then a step without a graph is faster.
MOST_PADDING = 2.0


def graph_sizes(most: int) -> list[int]:
    """Batch sizes that are worth a graph, up to `most` rows: small ones exactly, larger ones with an eighth to spare at
    most."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32), *range(320, 513, 64)]
    return [size for size in sizes if size < most] + [min(most, sizes[-1])]


def capture_order(sizes: list[int]) -> list[int]:
    """Sizes in the order in which they are captured.

    The largest comes first, since the others share its memory. With the powers of two, which follow, a step has a graph
    of less than twice its rows.
    """
    return sorted(sizes, key=lambda size: (size != sizes[-1], size.bit_count() > 1, size))


@dataclass(frozen=True)
class CapturedGraph:
    """A graph with the tensors that it reads and writes."""

    batch: Batch
    incoming: torch.Tensor | None
    out: list[torch.Tensor]
    replay: Replay


class Graphs:
    """Graphs of `forward` for batches of one token per row. A step replays the smallest captured graph that has room.

    `rows` is the largest batch, `width` the number of columns of a block table, `groups` the number of KV groups.
    `attention_groups` is the number of groups that exchange tokens in `forward`: all of them pad to the same graph.
    `incoming` is the width and dtype of the hidden states from the stage before, None on the first stage. A step runs
    without a graph if all that have room have more than `padding` times its rows. With `alone` no other rank takes part
    in `forward`. `clock` gives seconds.
    """

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        prepare: Prepare,
        rows: int,
        width: int,
        groups: int = 1,
        attention_groups: int = 1,
        incoming: tuple[int, torch.dtype] | None,
        device: torch.device,
        padding: float = math.inf,
        alone: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._forward, self._capture, self._alone = forward, capture, alone
        self._prepare, self._clock = prepare, clock
        self._attention_groups, self._padding = attention_groups, padding
        self._sizes = graph_sizes(rows)
        self._captured: dict[int, CapturedGraph] = {}
        # All graphs read the same tensors, each graph the first rows of them.
        self._batch = blank_batch(self._sizes[-1], width, device, groups)
        self._incoming = None
        if incoming is not None:
            self._incoming = torch.zeros((self._sizes[-1], incoming[0]), dtype=incoming[1], device=device)

    @property
    def largest(self) -> int:
        """Number of rows of the largest batch that may have a graph, 0 if there is memory for none."""
        return self._sizes[-1] if self._sizes else 0

    @property
    def uncaptured(self) -> list[int]:
        """Sizes that have no graph yet, in the order in which they are captured."""
        return [size for size in capture_order(self._sizes) if size not in self._captured]

    def capture_at_start(
        self,
        slowest: Callable[[float], float] = lambda seconds: seconds,
        report: ReportCaptured = lambda done, total: None,
    ) -> None:
        """Capture the first size of `capture_order`, and then others for CAPTURE_S seconds by the time of the first.

        All ranks capture the same sizes at the same time: `slowest` turns the seconds of this rank into the slowest
        rank's, the same bits on each. `report` is called after each capture.
        """
        began = self._clock()
        self._capture_largest()
        seconds = slowest(self._clock() - began)
        if not self._captured:
            return
        later = len(self.uncaptured)
        if seconds * later > CAPTURE_S:
            later = int(CAPTURE_S / seconds)
        goal = len(self._captured) + later
        for _ in range(later):
            report(len(self._captured), goal)
            self.capture_next()
        report(len(self._captured), goal)

    def capture_next(self) -> int:
        """Capture the next size of `capture_order` that has no graph yet; return how many are left."""
        if not self._captured:
            self._capture_largest()
        elif self.uncaptured:
            self._capture_size(self.uncaptured[0])
        return len(self.uncaptured)

    def capture_between_steps(self) -> None:
        """Capture the next size, if there is one. A capture that fails is the last one: steps of other sizes go on
        without graphs. With several ranks it is an error, since the others wait in the middle of the same capture."""
        try:
            self.capture_next()
        except RuntimeError as error:
            if not self._alone:
                raise
            self.stop_captures(str(error).strip().partition("\n")[0])

    def stop_captures(self, reason: str) -> None:
        """Capture no more sizes than there are graphs."""
        logger.warning("No more CUDA graphs are captured: %s. Batches of other sizes run without", reason)
        self._sizes = [size for size in self._sizes if size in self._captured]

    def has_graph(self, rows: int) -> bool:
        """Return True if a step of `rows` rows of one token replays a graph."""
        return self._smallest_graph(rows) is not None

    def captured_batch(self, staged: StagedStep) -> Batch | None:
        """The batch of the smallest graph that has room for a step, in all attention groups; None if there is none."""
        rows = staged.rows
        if self._attention_groups > 1:
            size = self._smallest_graph(staged.graph_rows) if staged.graph_rows else None
        else:
            size = self._smallest_graph(rows) if staged.decodes == rows else None
        return None if size is None else self._padded_batch(size, staged.host)

    def run_idle(self, rows: int) -> bool:
        """Replay the graph of a step in which another attention group has `rows` rows, and this one has none.

        Return False if there is no such graph: if no rank replays one, or if `rows` is 0.
        """
        size = self._smallest_graph(rows) if rows else None
        if size is None:
            return False
        batch = self._padded_batch(size, NO_ROWS)
        clear_rows(batch)
        self.run_batch(batch, None)
        return True

    def _smallest_graph(self, rows: int) -> int | None:
        """Number of rows of the smallest captured graph that has room for `rows`; None if that has too many."""
        smallest = next((size for size in self._sizes if size >= rows and size in self._captured), None)
        return None if smallest is None or smallest > self._padding * rows else smallest

    def _padded_batch(self, size: int, lengths: Lengths) -> Batch:
        """The batch of the graph of `size` rows, for a step whose rows have these lengths."""
        batch, host, idle = self._captured[size].batch, lengths.padded(size), size - len(lengths.context)
        others = tuple(replace(other, host=host, idle=idle) for other in batch.others)
        return replace(batch, host=host, idle=idle, others=others)

    def run_batch(self, batch: Batch, incoming: torch.Tensor | None) -> torch.Tensor:
        """Replay the graph of a batch from `captured_batch`, or run any other batch without a graph.

        Returns [R, hidden], valid until the next call.
        """
        self._prepare(batch)
        if not batch.fixed:
            return self._forward(batch, incoming)
        graph, rows = self._captured[batch.rows], batch.rows - batch.idle
        if graph.incoming is not None:
            if incoming is not None:
                graph.incoming[:rows].copy_(incoming)
            if batch.idle:
                # The layers add to it in place: what is left in idle rows would grow with every replay.
                graph.incoming[rows:].zero_()
        graph.replay()
        return graph.out[0][:rows]

    def _capture_largest(self) -> None:
        """Capture the largest size for which there is memory, if there is one."""
        largest_before = self.largest
        while self._sizes and not self._captured:
            self._capture_size(self.largest)
        if self.largest < largest_before:
            logger.warning(
                "No memory for CUDA graphs of more than %d rows: larger batches run without; "
                "a lower --gpu-memory-utilization leaves room",
                self.largest,
            )

    def _capture_size(self, size: int) -> None:
        """Capture a size. If memory runs out, no size that large is tried again."""
        try:
            self._captured[size] = self._capture_graph(size)
        except RuntimeError as error:
            # Other ranks, if there are any, are in the middle of sums with this rank, and would wait for the next one.
            if not (self._alone and _is_out_of_memory(error)):
                raise
            self._sizes = [kept for kept in self._sizes if kept < size or kept in self._captured]

    def _capture_graph(self, size: int) -> CapturedGraph:
        exchanged = (size,) * self._attention_groups if self._attention_groups > 1 else ()
        batch = leading_rows(self._batch, size, exchanged)
        incoming = None if self._incoming is None else self._incoming[:size]
        out: list[torch.Tensor] = []

        def forward() -> None:
            hidden = self._forward(batch, incoming)
            if out:
                out[0].copy_(hidden)
            else:
                out.append(hidden)

        clear_rows(batch)
        self._prepare(batch)
        forward()  # kernels are compiled, and libraries take their memory, before anything is captured
        out.clear()
        replay = self._capture(forward)
        return CapturedGraph(batch, incoming, out, replay)


def blank_batch(rows: int, width: int, device: torch.device, groups: int = 1) -> Batch:
    """A batch of `rows` rows that compute nothing, with `width` columns of a block table in each KV group."""

    def zeros(*dims: int) -> torch.Tensor:
        return torch.zeros(dims, dtype=torch.int32, device=device)

    slots = torch.full((groups, rows), NOWHERE, dtype=torch.int64, device=device)
    tables = zeros(groups, rows, table_columns(width))
    batch = Batch(
        tokens=zeros(rows),
        positions=zeros(rows),
        slots=slots[0],
        row_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        context=zeros(rows),
        tables=tables[0],
        order=torch.arange(rows, dtype=torch.int32, device=device),
        decodes=rows,
        fixed=True,
    )
    return split_groups(batch, slots, tables)


def clear_rows(batch: Batch) -> None:
    """Turn all rows of a graph's batch into padding."""
    for part in batch.groups:
        part.slots.fill_(NOWHERE)
    batch.context.zero_()
    batch.order.copy_(batch.row_starts[:-1])


def leading_rows(batch: Batch, rows: int, group_tokens: tuple[int, ...] = ()) -> Batch:
    """The first rows of a batch of one token per row, in the same memory."""
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
        group=batch.group,
        others=tuple(leading_rows(other, rows, group_tokens) for other in batch.others),
        group_tokens=group_tokens,
    )


class CudaGraphs:
    """`Capture` on a GPU: graphs that share one pool of memory, since no two of them run at once.

    One object captures all graphs of a runner, asleep in between too: cuBLAS keeps a workspace for each stream.
    """

    def __init__(self) -> None:
        self._pool: object = None
        # Torch's own stream is one for the whole process, on the device of the first caller.
        self._stream = torch.cuda.Stream()

    def __call__(self, run: Callable[[], None]) -> Replay:
        graph = capture_graph(run, self._stream, self._pool)
        self._pool = self._pool or graph.pool()
        return graph.replay

    def forget_pool(self) -> None:
        """Have later graphs share a new pool: the present graphs have been dropped."""
        self._pool = None


def _is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory ran out, which may be the cause of an error that only says that a capture was ended."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, torch.OutOfMemoryError):
        cause = cause.__context__
    return cause is not None
