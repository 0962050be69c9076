"""A group of GPUs of one host that read each other's memory, for the small sums of a decode step.

A sum over NCCL costs some tens of microseconds whatever its size. If every GPU can read the others' memory, each GPU
adds up all parts by itself (one shot), or a slice of them (two shots): torch's symmetric memory has both. A kernel that
has more to do with the sum reads the parts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.ranks.comm.distributed import DistributedGroup

# One shot reads (size - 1) times the message, two shots twice: beyond these NCCL's rings are as good. Limits as vLLM's
# and SGLang's custom all-reduces have them, for up to 8 GPUs on NVLink.
ONE_SHOT_BYTES, TWO_SHOT_BYTES, MAX_RANKS = 512 << 10, 8 << 20, 8
# Published parts are read in one shot too, so the limit is the same: for larger ones each rank would read more than for
# two shots and a norm of their own.
PUBLISHED_BYTES = ONE_SHOT_BYTES
ALIGNMENT = 16  # bytes, which the kernels read at a time
SHOT_DTYPES = (torch.bfloat16, torch.float32)  # the only dtypes of torch's two sums
# Channel of torch's signals for our barrier, one that torch's sums leave alone: they take as many channels as they have
# blocks, 24 at most. There are 64 for 8 ranks.
BARRIER_CHANNEL = 32
TURNS = 2  # buffers that take turns


class SymmetricGroup(DistributedGroup):
    """A `Group` over a process group and symmetric memory.

    NCCL sums what is large, in the order and with the roundings of its rings. `buffer` comes from `allocate_buffer`;
    `handle` is what torch's rendezvous returned for it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, buffer: torch.Tensor, handle: Any) -> None:
        super().__init__(group, device)
        self._name = group.group_name
        count, size = TWO_SHOT_BYTES // buffer.itemsize, PUBLISHED_BYTES // buffer.itemsize
        shots, published = buffer[:count], buffer[count:]
        # The same memory, as numbers of the dtypes that torch sums.
        self._shots = {dtype: shots.view(dtype) for dtype in {torch.float32, buffer.dtype} & {*SHOT_DTYPES}}
        places = [
            [handle.get_buffer(rank, (size,), buffer.dtype, count + turn * size) for rank in range(self.size)]
            for turn in range(TURNS)
        ]
        if places[0][self.rank].data_ptr() != published.data_ptr():
            raise RuntimeError("torch finds the buffer where it does not lie")
        self.parts = Parts(places, self.rank, lambda: handle.barrier(BARRIER_CHANNEL))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.parts.begin()
        if self.size > 2 and x.itemsize == 2 and 2 * x.nbytes <= TWO_SHOT_BYTES:
            # Torch adds in the dtype of the parts: with 16 bits it would round after each part but the last.
            return x.copy_(self._sum(x.float()))
        return self._sum(x)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in self._shots or x.nbytes > TWO_SHOT_BYTES or x.nbytes % ALIGNMENT:
            return super().sum(x)
        part = self._shots[x.dtype][: x.numel()]
        part.copy_(x.reshape(-1))
        if x.nbytes <= ONE_SHOT_BYTES:
            return torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._name).view(x.shape)
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", self._name)
        return x.copy_(part.view(x.shape))

    def publish_part(self, x: torch.Tensor) -> torch.Tensor | None:
        """Publish this rank's part of a sum, for a kernel that adds up all parts.

        Returns the addresses of all parts as `Parts.publish` does, or None if `sum` is as good.
        """
        if x.dtype != self.parts.dtype or x.nbytes > PUBLISHED_BYTES:
            return None
        return self.parts.publish(x)[0]


def allocate_buffer(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate the memory of a SymmetricGroup. Raises RuntimeError or ImportError if torch has none for the device."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty((TWO_SHOT_BYTES + TURNS * PUBLISHED_BYTES) // dtype.itemsize, dtype=dtype, device=device)


def connect_buffers(group: dist.ProcessGroup, device: torch.device, memory: torch.Tensor) -> SymmetricGroup:
    """Give all ranks access to each other's memory; returns when all have it."""
    import torch.distributed._symmetric_memory as symmetric

    return SymmetricGroup(group, device, memory, symmetric.rendezvous(memory, group))


class Parts:
    """Memory of every rank of a group, in two turns.

    `places[turn][rank]` is flat memory of that rank, which every rank can read. `barrier` makes this rank's device wait
    until the devices of all ranks have reached it, with everything that they wrote before.

    One barrier per sum is enough. A device works in order: it copies its part into its place, reaches the barrier and
    reads the others' parts. Before it copies the next part into the same place it has reached another barrier, for the
    sum of the other turn. Every rank came to that barrier only after it had read the parts of the first sum. So no part
    is overwritten while it is read, however late a rank is.

    A sum that does not use these places (`SymmetricGroup.sum`) is a barrier as well: after it any place is free, and
    the caller says so with `begin`. A CUDA graph keeps the turns with which it was captured. So graphs may be replayed
    in any order only if every step ends with such a sum. `DecoderModel.hidden` ends with such a sum.
    """

    def __init__(self, places: Sequence[Sequence[torch.Tensor]], rank: int, barrier: Callable[[], None]) -> None:
        assert len(places) == TURNS, len(places)
        self.places = places
        self._rank, self._barrier = rank, barrier
        self._addresses = torch.tensor(
            [[memory.data_ptr() for memory in turn] for turn in places], device=places[0][rank].device
        )
        self._turn = 0

    @property
    def device(self) -> torch.device:
        return self._addresses.device

    @property
    def dtype(self) -> torch.dtype:
        return self.places[0][0].dtype

    def begin(self) -> None:
        """Start the turns again. A sum of another kind, which is a barrier of all ranks, follows or has just ended."""
        self._turn = 0

    def publish(self, x: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Publish `x`, this rank's part, and have the device wait for the parts of the other ranks.

        Returns the addresses of all parts, [size] int64 on the device, and the flat buffers that begin there, longer
        than `x`. Both are valid until the next part but one is published.
        """
        turn = self._turn
        self._turn = (turn + 1) % TURNS
        self.places[turn][self._rank][: x.numel()].view(x.shape).copy_(x)
        self._barrier()
        return self._addresses[turn], self.places[turn]
