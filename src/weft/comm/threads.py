"""A group whose ranks are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import torch

from weft.comm.base import Comm, Links, Solo, add_up
from weft.plan.plan import Plan


class Rendezvous:
    """State that the `size` threads of a group share.

    Tensors are exchanged in two alternating turns: a thread that is ahead writes to the next turn while other threads
    still read the last one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.turns: list[list[torch.Tensor]] = [[torch.empty(0)] * size for _ in range(2)]
        # mailboxes[to][source]; None says that no tensor will come any more.
        self.mailboxes: list[list[SimpleQueue[torch.Tensor | None]]] = [
            [SimpleQueue() for _ in range(size)] for _ in range(size)
        ]

    def abort(self) -> None:
        """Wake every thread that waits, now and later, with an error."""
        self.barrier.abort()
        for mailboxes in self.mailboxes:
            for mailbox in mailboxes:
                mailbox.put(None)


class ThreadComm:
    """A `Comm` of one thread.

    A CUDA rank waits for its device before it meets the other ranks, so its sums cannot be captured in a CUDA graph.
    """

    capturable = False

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.size = rendezvous.size
        self._rendezvous = rendezvous
        self._device = device
        self._turn = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        # A copy is exchanged: the sum overwrites `x` while other ranks may still read the copy.
        return add_up([part.to(self._device) for part in self._exchange(x.clone())], x)

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        parts = self._exchange(x.clone())
        return torch.cat([part.to(self._device) for part in parts], dim=-1) if self.rank == 0 else None

    def send(self, x: torch.Tensor, to: int) -> None:
        copy = x.clone()
        self._synchronize()
        self._rendezvous.mailboxes[to][self.rank].put(copy)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        mailbox = self._rendezvous.mailboxes[self.rank][source]
        received = mailbox.get()
        if received is None:
            mailbox.put(None)  # for the next call
            raise ConnectionAbortedError(f"rank {source} of the group has ended")
        assert (received.shape, received.dtype) == (tuple(shape), dtype), (received.shape, received.dtype, shape, dtype)
        return received.to(self._device)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Exchange tensors: those of all ranks in this turn, in the order of ranks."""
        self._turn ^= 1
        parts = self._rendezvous.turns[self._turn]
        parts[self.rank] = x
        self._synchronize()
        try:
            self._rendezvous.barrier.wait()
        except threading.BrokenBarrierError:
            raise ConnectionAbortedError("another rank of the group has ended") from None
        return parts

    def _synchronize(self) -> None:
        """Wait for the device: other ranks read this rank's tensors from streams of their own."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class ThreadGroups:
    """The groups of all ranks of a plan: `links[rank]`."""

    def __init__(self, plan: Plan) -> None:
        stages = [Rendezvous(plan.tensor_parallel) for _ in range(plan.stages)]
        pipelines = [Rendezvous(plan.stages) for _ in range(plan.tensor_parallel)]
        self._all = stages + pipelines

        def connect(rendezvous: Rendezvous, group_rank: int, rank: int) -> Comm:
            if rendezvous.size == 1:
                return Solo()
            return ThreadComm(rendezvous, group_rank, torch.device(plan.devices[rank]))

        self.links = [
            Links(
                tensor=connect(stages[place.stage], place.tp_rank, place.rank),
                pipeline=connect(pipelines[place.tp_rank], place.stage, place.rank),
            )
            for place in plan.places
        ]

    def abort(self) -> None:
        """End all ranks after one has ended, instead of having them wait for it."""
        for rendezvous in self._all:
            rendezvous.abort()
