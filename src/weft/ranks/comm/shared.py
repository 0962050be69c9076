"""A tensor-parallel group whose ranks are on one host, through memory that they share.

For a decode step on CPUs, a sum through sockets costs more than the layer that it follows. Here a rank
copies its part into the shared memory, writes a byte to the other ranks' pipes, and adds up their parts.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from time import perf_counter

import torch

from weft.ranks.comm.base import add_up, rank_range
from weft.ranks.comm.times import ExchangeTimes, timed

SLOT_BYTES = 4 << 20  # bytes of each rank and turn; larger tensors go in pieces, which stay in the cache
HEAD_BYTES = 4096  # before the slots of kernels that sum by themselves
SPIN_S = 50e-6  # time to poll for the other ranks before sleeping until they come


class SharedMemoryGroup:
    """A `Group` over shared memory; tensors on a GPU pass through the host's memory.

    `memory` is a descriptor of shared memory, `pipes[r]` the (read, write) ends of rank r's pipe. All of them belong to
    the group alone, and stay open.

    Memory has two turns: a rank that is ahead writes to the next turn while other ranks still read the last one. It
    cannot reach the turn after that before all ranks have left this one, since each byte says that its sender has come
    so far.
    """

    capturable = False

    def __init__(
        self, rank: int, memory: int, pipes: Sequence[tuple[int, int]], *, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self.rank = rank
        self.size = len(pipes)
        self.times = ExchangeTimes()
        self._slot_bytes = slot_bytes
        slots = 2 * self.size * slot_bytes
        os.ftruncate(memory, slots + HEAD_BYTES + slots)
        pages = torch.frombuffer(mmap.mmap(memory, slots + HEAD_BYTES + slots), dtype=torch.uint8)
        self._slots = pages[:slots].view(2, self.size, slot_bytes)
        # For kernels that sum in the middle of their work: as many slots again, with HEAD_BYTES of zeros before them.
        self.memory, self.slot_bytes = pages[slots:], slot_bytes
        self._cut = lru_cache(maxsize=64)(self._cut_slots)
        self._inbox = pipes[rank][0]
        os.set_blocking(self._inbox, False)
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)
        self._others = [write for r, (_, write) in enumerate(pipes) if r != rank]
        self._name = bytes([rank])
        self._turn = 0
        # Number of turns that each rank has reached; this rank never waits for itself.
        self._reached = [0] * self.size
        self._reached[rank] = sys.maxsize

    @timed
    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return x.copy_(self.sum(x.cpu()))
        x = x.contiguous()
        flat = x.view(-1)
        for piece in flat.split(self._slot_bytes // x.itemsize):
            add_up(self._exchange(piece), piece)
        return x

    @timed
    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1]).cpu()
        out = torch.empty((len(rows), sum(sizes)), dtype=x.dtype) if self.rank == 0 else None
        # Every rank sends as many elements as the widest one: slots are cut alike for all.
        most = max(1, *sizes)
        step = self._slot_bytes // (most * x.itemsize)
        assert step > 0, "a slot holds at least one row"
        for begin in range(0, len(rows), step):
            piece = rows[begin : begin + step]
            parts = self._exchange(piece.reshape(-1), len(piece) * most)
            if out is not None:
                at = 0
                for part, size in zip(parts, sizes, strict=True):
                    out[begin : begin + step, at : at + size] = part[: len(piece) * size].view(len(piece), size)
                    at += size
        return None if out is None else out.view(*x.shape[:-1], sum(sizes)).to(x.device)

    @timed
    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        width = prod(x.shape[1:])
        numels = [size * width for size in sizes]
        flat = self._collect(x.reshape(-1), numels, [range(numel) for numel in numels])
        return flat.view(sum(sizes), *x.shape[1:])

    @timed
    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        flat, own = x.reshape(-1).cpu(), rank_range(sizes, self.rank, prod(x.shape[1:]))
        out = flat.new_empty(len(own))
        for begin, parts in self._exchange_pieces(flat, len(flat)):
            start, stop = max(own.start, begin), min(own.stop, begin + len(parts[0]))
            if start < stop:
                pieces = [part[start - begin : stop - begin] for part in parts]
                add_up(pieces, out[start - own.start : stop - own.start])
        return out.view(sizes[self.rank], *x.shape[1:]).to(x.device)

    @timed
    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        # A rank does not know where in the other ranks' rows its own begin: the numbers go first.
        counts = [part.tolist() for part in self._exchange(torch.tensor(send))]
        width = prod(x.shape[1:])
        ranges = [rank_range(sizes, self.rank, width) for sizes in counts]
        assert [len(wanted) for wanted in ranges] == [size * width for size in receive], (counts, receive)
        flat = self._collect(x.reshape(-1), [sum(sizes) * width for sizes in counts], ranges)
        return flat.view(sum(receive), *x.shape[1:])

    @timed
    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        numels = [0] * self.size
        numels[source] = x.numel()
        own = x.reshape(-1)[: numels[self.rank]]
        return self._collect(own, numels, [range(numel) for numel in numels]).view(x.shape)

    def _collect(self, flat: torch.Tensor, numels: Sequence[int], wanted: Sequence[range]) -> torch.Tensor:
        """Exchange the ranks' flat tensors, of numels[r] elements; return the elements wanted[r] of each."""
        local = flat.cpu()
        out = local.new_empty(sum(map(len, wanted)))
        for begin, parts in self._exchange_pieces(local, max(numels)):
            at = 0
            for part, elements in zip(parts, wanted, strict=True):
                start, stop = max(elements.start, begin), min(elements.stop, begin + len(part))
                if start < stop:
                    to = at - elements.start
                    out[to + start : to + stop] = part[start - begin : stop - begin]
                at += len(elements)
        return out.to(flat.device)

    def _exchange_pieces(self, flat: torch.Tensor, numel: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Exchange flat tensors of at most `numel` elements, the same number on every rank, in pieces that fit a slot.

        Yields where each piece begins, and the piece of every rank: valid until the next one, and without meaning
        beyond the rank's own number of elements.
        """
        step = self._slot_bytes // flat.itemsize
        for begin in range(0, numel, step):
            yield begin, self._exchange(flat[begin : begin + step], min(step, numel - begin))

    def _exchange(self, piece: torch.Tensor, numel: int | None = None) -> list[torch.Tensor]:
        """Exchange pieces: the parts of all ranks in this turn, `numel` elements each, valid until the next turn."""
        self._turn += 1
        parts = self._cut(self._turn & 1, piece.numel() if numel is None else numel, piece.dtype)
        parts[self.rank][: piece.numel()] = piece
        for pipe in self._others:
            os.write(pipe, self._name)
        self._wait_for_turn()
        return parts

    def _wait_for_turn(self) -> None:
        """Wait until all ranks have come to this turn."""
        began = perf_counter()
        deadline = began + SPIN_S
        while min(self._reached) < self._turn:
            try:
                for rank in os.read(self._inbox, 256):
                    self._reached[rank] += 1
            except BlockingIOError:
                if perf_counter() > deadline:
                    self._poll.poll()
        self.times.add_waited(began)

    def _cut_slots(self, turn: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The first `numel` elements of every rank's slot in a turn."""
        return list(self._slots[turn, :, : numel * dtype.itemsize].view(dtype).unbind())
