"""SymmetricComm: GPUs of one host that read each other's memory, for the small sums of a decode step.

A sum over NCCL costs some tens of microseconds whatever its size. Where every GPU can read the others' memory, each
adds up all parts by itself (one shot), or a slice of them (two shots): torch's symmetric memory has both.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from weft.comm.distributed import DistributedComm, peers_may_vanish

logger = logging.getLogger("weft")

# One shot reads (size - 1) times the message, two shots twice: beyond these NCCL's rings are as good. Limits as vLLM's
# and SGLang's custom all-reduces have them, for up to 8 GPUs on NVLink.
ONE_SHOT_BYTES, TWO_SHOT_BYTES = 512 << 10, 8 << 20
ALIGNMENT = 16  # bytes; the kernels read so much at a time


class SymmetricComm(DistributedComm):
    """As its base, whose NCCL sums what is large, or not of `dtype`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        import torch.distributed._symmetric_memory as symmetric

        super().__init__(group, device)
        self._name = group.group_name
        self._buffer = symmetric.empty(TWO_SHOT_BYTES // dtype.itemsize, dtype=dtype, device=device)
        symmetric.rendezvous(self._buffer, group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._buffer.dtype or x.nbytes > TWO_SHOT_BYTES or x.nbytes % ALIGNMENT:
            return super().sum(x)
        part = self._buffer[: x.numel()]
        part.copy_(x.reshape(-1))
        if x.nbytes <= ONE_SHOT_BYTES:
            return torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._name).view(x.shape)  # type: ignore[no-any-return]
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", self._name)
        return x.copy_(part.view(x.shape))


def joined(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> DistributedComm:
    """The group with symmetric memory where all of its ranks find that this works, else with NCCL alone: drivers say
    that GPUs can read each other where they cannot (virtual machines, IOMMU)."""
    plain, made, reason = DistributedComm(group, device), None, ""

    def all_say(yes: bool) -> bool:
        with peers_may_vanish():
            return plain.sum(torch.tensor([float(yes)], device=device)).item() == plain.size

    try:
        made = SymmetricComm(group, device, dtype)
    except (RuntimeError, ImportError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    # Its sums wait for every rank on the device, without an end: none begins where another cannot.
    if all_say(made is not None) and made is not None:
        works = adds_up(made, dtype)
        reason = "" if works else "its sums are wrong"
        if all_say(works):
            return made
    if plain.rank == 0:
        logger.info("Sums go through NCCL alone: symmetric memory %s", reason or "does not work on another rank")
    return plain


def adds_up(comm: SymmetricComm, dtype: torch.dtype) -> bool:
    """Whether sums of both kinds are right, again and again: a part that is read too early shows in the second. Wrong
    ones end nothing, for the other ranks would wait for this one in the next."""
    device, right = comm._buffer.device, True
    for count in (64, ONE_SHOT_BYTES // dtype.itemsize, TWO_SHOT_BYTES // dtype.itemsize):
        for turn in range(3):
            # Small whole numbers: exact in every dtype.
            mine = torch.arange(count, device=device).remainder(7).add(comm.rank + turn).to(dtype)
            want = torch.arange(count, device=device).remainder(7).add(turn) * comm.size
            want = (want + comm.size * (comm.size - 1) // 2).to(dtype)
            right = torch.equal(comm.sum(mine.clone()), want) and right
    return right
