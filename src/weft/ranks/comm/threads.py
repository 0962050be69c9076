"""Groups and links of ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import Any, TypeVar

import torch

from weft.plan.plan import Plan
from weft.ranks.comm.base import add_up, rank_range
from weft.ranks.comm.times import ExchangeTimes, timed

T = TypeVar("T")


class Meeting:
    """State that the `size` threads of a group share.

    Tensors are exchanged in two alternating turns: a thread that is ahead writes to the next turn while other threads
    still read the last one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.turns: list[list[Any]] = [[None] * size for _ in range(2)]


class ThreadGroup:
    """A `Group` of one thread.

    A CUDA rank waits for its device before it meets the other ranks, so its sums cannot be captured in a CUDA graph.
    """

    capturable = False

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.size = meeting.size
        self.times = ExchangeTimes()
        self._meeting = meeting
        self._device = device
        self._turn = 0

    @timed
    def sum(self, x: torch.Tensor) -> torch.Tensor:
        # A copy is exchanged: the sum overwrites `x` while other ranks may still read the copy.
        return add_up([part.to(self._device) for part in self._exchange(x.clone())], x)

    @timed
    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        parts = self._exchange(x.clone())
        return self._cat(parts, dim=-1) if self.rank == 0 else None

    @timed
    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self._cat(self._exchange(x.clone()))

    @timed
    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        own = rank_range(sizes, self.rank)
        parts = [part[own.start : own.stop].to(self._device) for part in self._exchange(x.clone())]
        return add_up(parts, torch.empty_like(parts[0]))

    @timed
    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        parts = self._exchange(x.clone().split(list(send)))
        return self._cat([part[self.rank] for part in parts])

    @timed
    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self._exchange(x.clone())[source].to(self._device, copy=True)

    def _cat(self, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        return torch.cat([part.to(self._device) for part in parts], dim=dim)

    def _exchange(self, own: T) -> list[T]:
        """Exchange anything: what all ranks give in this turn, in the order of ranks."""
        self._turn ^= 1
        parts = self._meeting.turns[self._turn]
        parts[self.rank] = own
        synchronize_stream(self._device)
        began = perf_counter()
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise ConnectionAbortedError("another rank of the group has ended") from None
        self.times.add_waited(began)
        return parts


# Tensors on their way from a stage to the next; None says that no more will come.
Mailbox = SimpleQueue[torch.Tensor | None]


class ThreadLink:
    """A `StageLink` of one thread: `before` is filled by the previous stage, `after` by this one."""

    def __init__(self, before: Mailbox, after: Mailbox, device: torch.device) -> None:
        self.times = ExchangeTimes()
        self._before, self._after, self._device = before, after, device

    @timed
    def send(self, x: torch.Tensor) -> None:
        copy = x.clone()
        synchronize_stream(self._device)
        self._after.put(copy)

    @timed
    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        began = perf_counter()
        received = self._before.get()
        self.times.add_waited(began)
        if received is None:
            self._before.put(None)  # for the next call
            raise ConnectionAbortedError("the previous stage has ended")
        assert (received.shape, received.dtype) == (tuple(shape), dtype), (received.shape, received.dtype, shape, dtype)
        return received.to(self._device)


class Threads:
    """The wiring of ranks that are threads of this process: what the threads of each group and stage share."""

    def __init__(self, plan: Plan) -> None:
        groups = [*plan.tensor_groups, *plan.exchange_groups]
        self._meetings = {tuple(ranks): Meeting(len(ranks)) for ranks in groups}
        self._mailboxes: list[Mailbox] = [SimpleQueue() for _ in plan.places]  # by the rank that sends

    def group(self, ranks: Sequence[int], rank: int, device: torch.device) -> ThreadGroup:
        """The group of the plan's `ranks`, for the rank `rank`."""
        return ThreadGroup(self._meetings[tuple(ranks)], ranks.index(rank), device)

    def link(self, ranks: Sequence[int], rank: int, device: torch.device) -> ThreadLink:
        """The link between the stages of a pipeline, for the plan's rank `rank`; `ranks` has a rank of each stage."""
        previous = ranks[ranks.index(rank) - 1]
        return ThreadLink(self._mailboxes[previous], self._mailboxes[rank], device)

    def abort(self) -> None:
        """Wake every rank that waits, now and later, with an error: another one has ended."""
        for meeting in self._meetings.values():
            meeting.barrier.abort()
        for mailbox in self._mailboxes:
            mailbox.put(None)


def synchronize_stream(device: torch.device) -> None:
    """Wait for the device: other ranks read this rank's tensors from streams of their own."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
