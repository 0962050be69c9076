"""SharedLine: the stages of a pipeline on one host, through memory that neighbours share.

A stage copies what it hands over into the memory and rings a bell, a byte in a pipe; who waits for it sleeps there, and
wakes for nothing else.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Sequence
from math import prod
from time import perf_counter

import torch

SLOT_BYTES, SLOTS = 1 << 20, 64  # pieces that may be on their way; the system gives memory only to those in use
SPIN_S = 50e-6  # how long to look for a piece before sleeping until it comes


class Edge:
    """One end of the memory between two neighbours: a ring of slots. `full` and `free` are pipes (read, write): a byte
    in the one for every piece that was brought, in the other for every one that was taken."""

    def __init__(
        self,
        memory: int,
        full: tuple[int, int],
        free: tuple[int, int],
        *,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        os.ftruncate(memory, slots * slot_bytes)
        pages = mmap.mmap(memory, slots * slot_bytes)
        self._slots = torch.frombuffer(pages, dtype=torch.uint8).view(slots, slot_bytes).unbind()
        self._full, self._free = Bell(*full), Bell(*free)
        self._empty = slots  # as far as the sender knows
        self._turn = 0

    def bring(self, piece: torch.Tensor) -> None:
        """Bytes [n] into the next slot, once that is free."""
        if self._empty == 0:
            self._empty += self._free.wait()
        self._empty -= 1
        self._next()[: len(piece)] = piece
        self._full.ring()

    def take(self, out: torch.Tensor) -> None:
        """The next slot's bytes, once they are there, into `out` [n]."""
        self._full.wait(1)
        out.copy_(self._next()[: len(out)])
        self._free.ring()

    @property
    def slot_bytes(self) -> int:
        return len(self._slots[0])

    def _next(self) -> torch.Tensor:
        self._turn += 1
        return self._slots[(self._turn - 1) % len(self._slots)]


class Bell:
    """A pipe in which every byte is one ring."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        os.set_blocking(read, False)
        self._poll = select.poll()
        self._poll.register(read, select.POLLIN)

    def ring(self) -> None:
        os.write(self._write, b"\0")

    def wait(self, most: int = SLOTS) -> int:
        """How often it rang: at least once, and no more than `most` of what rang are counted."""
        patience = 0.0
        while True:
            try:
                return len(os.read(self._read, most))
            except BlockingIOError:
                now = perf_counter()
                if not patience:
                    patience = now + SPIN_S
                elif now > patience:
                    self._poll.poll()


class SharedLine:
    """See `Comm`; stage `rank` of `size`, which hands on to the one after it only. `before` and `after` are the edges
    to its neighbours. Tensors on a GPU pass through the host's memory."""

    capturable = False

    def __init__(self, rank: int, size: int, before: Edge | None, after: Edge | None, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._before, self._after, self._device = before, after, device

    def send(self, x: torch.Tensor, to: int) -> None:
        assert self._after is not None and to == self.rank + 1, "a stage sends to the one after it"
        near = x.cpu().contiguous().view(-1).view(torch.uint8)
        for piece in near.split(self._after.slot_bytes):
            self._after.bring(piece)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        assert self._before is not None and source == self.rank - 1, "a stage receives from the one before it"
        out = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
        for piece in out.split(self._before.slot_bytes):
            self._before.take(piece)
        return out.view(dtype).view(tuple(shape)).to(self._device)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("stages send and receive; it is the ranks of one that sum")

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        raise AssertionError("stages send and receive; it is the ranks of one that gather")
