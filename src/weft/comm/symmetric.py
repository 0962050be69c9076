"""SymmetricComm: GPUs of one host that read each other's memory, for the small sums of a decode step.

A sum over NCCL costs some tens of microseconds whatever its size. Where every GPU can read the others' memory, each
adds up all parts by itself (one shot), or a slice of them (two shots): torch's symmetric memory has both. A kernel that
has more to do with the sum reads the parts itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.comm.distributed import DistributedComm
from weft.comm.parts import PLACES, Parts

# One shot reads (size - 1) times the message, two shots twice: beyond these NCCL's rings are as good. Limits as vLLM's
# and SGLang's custom all-reduces have them, for up to 8 GPUs on NVLink.
ONE_SHOT_BYTES, TWO_SHOT_BYTES, MOST_RANKS = 512 << 10, 8 << 20, 8
# One shot too, so the same limit: what is larger has each rank read more than two shots and a norm of their own would.
PUBLISHED_BYTES = ONE_SHOT_BYTES
ALIGNMENT = 16  # bytes; the kernels read so much at a time
SHOT_DTYPES = (torch.bfloat16, torch.float32)  # torch's two sums know no others
# Of torch's signals, one of those that its sums leave alone: they take as many as they have blocks, 24 at most. There
# are 64 for 8 ranks.
MEETING = 32


class SymmetricComm(DistributedComm):
    """As its base, whose NCCL sums what is large, in the order and with the roundings of its rings.

    `buffer` is what `allocate_buffer` gives; `handle` is what torch's rendezvous made of it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, buffer: torch.Tensor, handle: Any) -> None:
        super().__init__(group, device)
        self._name = group.group_name
        count, size = TWO_SHOT_BYTES // buffer.itemsize, PUBLISHED_BYTES // buffer.itemsize
        shots, mine = buffer[:count], buffer[count:]
        # The same memory, as numbers of the dtypes that torch sums.
        self._shots = {dtype: shots.view(dtype) for dtype in {torch.float32, buffer.dtype} & {*SHOT_DTYPES}}
        places = [
            [handle.get_buffer(rank, (size,), buffer.dtype, count + turn * size) for rank in range(self.size)]
            for turn in range(PLACES)
        ]
        if places[0][self.rank].data_ptr() != mine.data_ptr():
            raise RuntimeError("torch finds the buffer where it does not lie")
        self.parts = Parts(places, self.rank, lambda: handle.barrier(MEETING))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.parts.begin()
        if self.size > 2 and x.itemsize == 2 and 2 * x.nbytes <= TWO_SHOT_BYTES:
            # Torch adds in the dtype of the parts: of 16 bits it would round after each but the last.
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
        """Where all ranks' parts of a sum lie, as `Parts.publish`, for a kernel that adds them up; None where `sum` is as
        good."""
        if x.dtype != self.parts.dtype or x.nbytes > PUBLISHED_BYTES:
            return None
        return self.parts.publish(x)[0]


def allocate_buffer(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a SymmetricComm. Raises RuntimeError or ImportError where torch has none for the device."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty((TWO_SHOT_BYTES + PLACES * PUBLISHED_BYTES) // dtype.itemsize, dtype=dtype, device=device)


def connect_buffers(group: dist.ProcessGroup, device: torch.device, memory: torch.Tensor) -> SymmetricComm:
    """Have all ranks reach each other's memory; returns when all have."""
    import torch.distributed._symmetric_memory as symmetric

    return SymmetricComm(group, device, memory, symmetric.rendezvous(memory, group))
