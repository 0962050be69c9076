"""A group of ranks in processes of their own, through torch.distributed (NCCL or gloo)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist


class DistributedComm:
    """A `Comm` over a process group.

    Gloo works in the host's memory, through which it passes tensors on a GPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        self._device = device
        self._transfer_device = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self.capturable = self._transfer_device == device
        self._sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        local = x.to(self._transfer_device).contiguous()
        with peers_may_vanish():
            dist.all_reduce(local, group=self._group)
        return local.to(self._device)

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        # Not dist.gather: its parts are all of one size.
        local = x.to(self._transfer_device).contiguous()
        parts = [local]
        if self.rank == 0:
            parts += [local.new_empty((*x.shape[:-1], size)) for size in sizes[1:]]
            transfers = [
                dist.P2POp(dist.irecv, part, group=self._group, group_peer=r) for r, part in enumerate(parts) if r
            ]
        else:
            transfers = [dist.P2POp(dist.isend, local, group=self._group, group_peer=0)]
        with peers_may_vanish():
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
        return torch.cat(parts, dim=-1).to(self._device) if self.rank == 0 else None

    def send(self, x: torch.Tensor, to: int) -> None:
        copy = x.to(self._transfer_device, copy=True, memory_format=torch.contiguous_format)
        with peers_may_vanish():
            # The copy is kept until it has been sent. At most `size` steps are in flight, one per stage, so the copy
            # before those has long been received; and stages send one way only, so the wait for it ends. No more copies
            # are kept: a prompt's step may be 100 MB.
            self._sent.append((dist.isend(copy, group=self._group, group_dst=to), copy))
            while len(self._sent) > self.size:
                sending, _ = self._sent.popleft()
                if sending is not None:  # None for a rank outside the group, which sends nothing
                    sending.wait()

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        local = torch.empty(tuple(shape), dtype=dtype, device=self._transfer_device)
        with peers_may_vanish():
            dist.recv(local, group=self._group, group_src=source)
        return local.to(self._device)


@contextmanager
def peers_may_vanish() -> Iterator[None]:
    """Raise ConnectionAbortedError for a failure in a collective: another rank has ended, unless memory ran out."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ConnectionAbortedError(f"lost another rank: {error}") from error
