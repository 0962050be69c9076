"""A link between stages of one host, through memory that neighbouring stages share.

A stage copies a tensor into the memory and writes a byte to a pipe. The next stage sleeps until that byte comes, and
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

from weft.ranks.comm.base import StageLink
from weft.ranks.comm.times import ExchangeTimes, timed, total_times

SLOT_BYTES, SLOTS = 1 << 20, 64  # of the ring of pieces in flight; the system gives memory only to slots in use
SPIN_S = 50e-6  # time to poll for a piece before sleeping until it comes


class Edge:
    """One end of the memory between two neighbouring stages: a ring of `slots` slots of `slot_bytes` bytes.

    `memory` is a descriptor of shared memory. `full` and `free` are pipes (read end, write end): the sender writes a
    byte to `full` for every piece put, the receiver a byte to `free` for every piece taken.
    """

    def __init__(
        self,
        memory: int,
        full: tuple[int, int],
        free: tuple[int, int],
        *,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self.times = ExchangeTimes()
        os.ftruncate(memory, slots * slot_bytes)
        pages = mmap.mmap(memory, slots * slot_bytes)
        self._slots = torch.frombuffer(pages, dtype=torch.uint8).view(slots, slot_bytes).unbind()
        self._full, self._free = Doorbell(*full), Doorbell(*free)
        self._empty = slots  # free slots that the sender knows of
        self._turn = 0

    def put_piece(self, piece: torch.Tensor) -> None:
        """Copy bytes [n] into the next slot, once it is free."""
        if self._empty == 0:
            began = perf_counter()
            self._empty += self._free.wait()
            self.times.add_waited(began)
        self._empty -= 1
        self._next_slot()[: len(piece)] = piece
        self._full.ring()

    def take_piece(self, out: torch.Tensor) -> None:
        """Copy the next slot's bytes into `out` [n], once they have arrived."""
        began = perf_counter()
        self._full.wait(1)
        self.times.add_waited(began)
        out.copy_(self._next_slot()[: len(out)])
        self._free.ring()

    @property
    def slot_bytes(self) -> int:
        return len(self._slots[0])

    def _next_slot(self) -> torch.Tensor:
        self._turn += 1
        return self._slots[(self._turn - 1) % len(self._slots)]


class Doorbell:
    """A pipe in which every byte is one signal."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        os.set_blocking(read, False)
        self._poll = select.poll()
        self._poll.register(read, select.POLLIN)

    def ring(self) -> None:
        os.write(self._write, b"\0")

    def wait(self, most: int = SLOTS) -> int:
        """Wait for a signal; return the number of signals received, between 1 and `most`."""
        deadline = 0.0
        while True:
            try:
                return len(os.read(self._read, most))
            except BlockingIOError:
                now = perf_counter()
                if not deadline:
                    deadline = now + SPIN_S
                elif now > deadline:
                    self._poll.poll()


class SharedMemoryLink:
    """A `StageLink` through `before` and `after`, the edges to the previous and to the next stage.

    Tensors on a GPU pass through the host's memory.
    """

    def __init__(self, before: Edge | None, after: Edge | None, device: torch.device) -> None:
        self.times = ExchangeTimes()
        for edge in (before, after):
            if edge is not None:
                edge.times = self.times
        self._before, self._after, self._device = before, after, device

    @timed
    def send(self, x: torch.Tensor) -> None:
        assert self._after is not None, "the last stage sends to no other"
        local = x.cpu().contiguous().view(-1).view(torch.uint8)
        for piece in local.split(self._after.slot_bytes):
            self._after.put_piece(piece)

    @timed
    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert self._before is not None, "the first stage receives from no other"
        out = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
        for piece in out.split(self._before.slot_bytes):
            self._before.take_piece(piece)
        return out.view(dtype).view(tuple(shape)).to(self._device)


class JoinedLink:
    """A `StageLink` that receives through one link and sends through another."""

    def __init__(self, before: StageLink, after: StageLink) -> None:
        self._before, self._after = before, after

    @property
    def times(self) -> ExchangeTimes:
        """Times of both links together."""
        return total_times({self._before.times, self._after.times})

    def send(self, x: torch.Tensor) -> None:
        self._after.send(x)

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._before.recv(shape, dtype)
