"""DistributedComm: ranks in processes of their own, through torch.distributed (NCCL or gloo)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist


class DistributedComm:
    """A process group of `size` ranks; `rank` is the place in it. Gloo works in the host's memory: tensors on a
    GPU pass through it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        self._device = device
        self._through = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self.capturable = self._through == device
        self._sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        near = x.to(self._through).contiguous()
        with peers_may_vanish():
            dist.all_reduce(near, group=self._group)
        return near.to(self._device)

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        # Not dist.gather: its parts are all of one size.
        near = x.to(self._through).contiguous()
        parts = [near]
        if self.rank == 0:
            parts += [near.new_empty((*x.shape[:-1], size)) for size in sizes[1:]]
            moves = [dist.P2POp(dist.irecv, part, group=self._group, group_peer=r) for r, part in enumerate(parts) if r]
        else:
            moves = [dist.P2POp(dist.isend, near, group=self._group, group_peer=0)]
        with peers_may_vanish():
            for work in dist.batch_isend_irecv(moves):
                work.wait()
        return torch.cat(parts, dim=-1).to(self._device) if self.rank == 0 else None

    def send(self, x: torch.Tensor, to: int) -> None:
        copy = x.to(self._through, copy=True, memory_format=torch.contiguous_format)
        with peers_may_vanish():
            # Kept until it has gone out. As many steps are in flight as there are stages, so the one before those has
            # long been received; and stages send one way only, so waiting for it ends. Each copy counts: a prompt's
            # step may be 100 MB.
            self._sent.append((dist.isend(copy, group=self._group, group_dst=to), copy))
            while len(self._sent) > self.size:
                sending, _ = self._sent.popleft()
                if sending is not None:  # None for a rank outside the group, which sends nothing
                    sending.wait()

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        near = torch.empty(tuple(shape), dtype=dtype, device=self._through)
        with peers_may_vanish():
            dist.recv(near, group=self._group, group_src=source)
        return near.to(self._device)


@contextmanager
def peers_may_vanish() -> Iterator[None]:
    """What goes wrong in a collective is another rank's end, unless memory ran out."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ConnectionAbortedError(f"lost another rank: {error}") from error
