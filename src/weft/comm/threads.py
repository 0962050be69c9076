"""ThreadComm: ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import torch

from weft.comm.base import Comm, Links, Solo, add_up
from weft.plan.plan import Plan


class Rendezvous:
    """Where the threads of a group meet. Tensors are brought in two turns, one after the other: whoever is
    ahead brings to the next while others still look at the last."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.turns: list[list[torch.Tensor]] = [[torch.empty(0)] * size for _ in range(2)]
        # letters[to][source]; None says that nothing will come any more.
        self.letters: list[list[SimpleQueue[torch.Tensor | None]]] = [
            [SimpleQueue() for _ in range(size)] for _ in range(size)
        ]

    def abort(self) -> None:
        """Wake everybody who waits, now and later, with an error."""
        self.barrier.abort()
        for box in (box for boxes in self.letters for box in boxes):
            box.put(None)


class ThreadComm:
    """One thread's part in a meeting. A CUDA rank waits for its device before it meets the others, so this
    cannot be captured in a CUDA graph."""

    capturable = False

    def __init__(self, meeting: Rendezvous, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting
        self._device = device
        self._turn = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        # A copy: the caller's own is where the sum goes, while others may still read this.
        return add_up([part.to(self._device) for part in self._exchange(x.clone())], x)

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        parts = self._exchange(x.clone())
        return torch.cat([part.to(self._device) for part in parts], dim=-1) if self.rank == 0 else None

    def send(self, x: torch.Tensor, to: int) -> None:
        copy = x.clone()
        self._settle()
        self._meeting.letters[to][self.rank].put(copy)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        box = self._meeting.letters[self.rank][source]
        letter = box.get()
        if letter is None:
            box.put(None)  # for the next who asks
            raise ConnectionAbortedError(f"rank {source} of the group has ended")
        assert letter.shape == tuple(shape) and letter.dtype == dtype, (letter.shape, letter.dtype, shape, dtype)
        return letter.to(self._device)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What every rank brings to this turn, in the order of ranks."""
        self._turn ^= 1
        parts = self._meeting.turns[self._turn]
        parts[self.rank] = x
        self._settle()
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise ConnectionAbortedError("another rank of the group has ended") from None
        return parts

    def _settle(self) -> None:
        """Others read from their own streams."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class ThreadGroups:
    """The groups of all ranks of a plan: `links[rank]`."""

    def __init__(self, plan: Plan) -> None:
        stages = [Rendezvous(plan.tensor_parallel) for _ in range(plan.stages)]
        lines = [Rendezvous(plan.stages) for _ in range(plan.tensor_parallel)]
        self._meetings = stages + lines

        def comm(meeting: Rendezvous, at: int, rank: int) -> Comm:
            return ThreadComm(meeting, at, torch.device(plan.devices[rank])) if meeting.size > 1 else Solo()

        self.links = [
            Links(
                tensor=comm(stages[place.stage], place.tp_rank, place.rank),
                pipeline=comm(lines[place.tp_rank], place.stage, place.rank),
            )
            for place in plan.places
        ]

    def abort(self) -> None:
        """A rank has ended: the others end too, instead of waiting for it."""
        for meeting in self._meetings:
            meeting.abort()
