"""A group of ranks in processes of their own, through torch.distributed (NCCL or gloo)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch
import torch.distributed as dist

from weft.ranks.comm.base import add_up
from weft.ranks.comm.times import ExchangeTimes, timed

# Before torch 2.13 it has the name that warns since.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DistributedGroup:
    """A `Group` over a process group of NCCL or gloo.

    Gloo works in the host's memory, through which it passes tensors on a GPU. Its operations do not tell a wait for
    other ranks from a transfer, so `times` has no waits.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.times = ExchangeTimes()
        self._group = group
        self._device = device
        self._transfer_device = transfer_device(group, device)
        self.capturable = self._transfer_device == device

    @timed
    def sum(self, x: torch.Tensor) -> torch.Tensor:
        local = self._to_transfer(x)
        with peers_may_vanish():
            dist.all_reduce(local, group=self._group)
        return local.to(self._device)

    @timed
    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        # Not dist.gather: its parts are all of one size.
        local = self._to_transfer(x)
        parts, transfers = [local], []
        if self.rank == 0:
            parts += [local.new_empty((*x.shape[:-1], size)) for size in sizes[1:]]
            transfers = [self._transfer(dist.irecv, part, peer) for peer, part in enumerate(parts) if peer]
        else:
            transfers = [self._transfer(dist.isend, local, 0)]
        # Both sides know which parts are empty.
        transfers = [transfer for transfer in transfers if transfer.tensor.numel()]
        with peers_may_vanish():
            for work in dist.batch_isend_irecv(transfers) if transfers else ():
                work.wait()
        return torch.cat(parts, dim=-1).to(self._device) if self.rank == 0 else None

    @timed
    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        # Gloo wants parts of one size: uneven ones are filled up to the largest.
        most, local = max(sizes), self._to_transfer(x)
        if len(local) < most:
            local = torch.cat((local, local.new_zeros(most - len(local), *x.shape[1:])))
        out = local.new_empty(self.size * most, *x.shape[1:])
        if out.numel():
            with peers_may_vanish():
                all_gather_single(out, local, group=self._group)
        if min(sizes) < most:
            out = torch.cat([part[:size] for part, size in zip(out.split(most), sizes, strict=True)])
        return out.to(self._device)

    @timed
    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        # Each rank gets all parts of its rows: as many bytes as in a ring, one hop, and sums that are rounded once. For
        # gloo torch has no operation with rows of several sizes.
        parts = self.all_to_all(x, sizes, [sizes[self.rank]] * self.size)
        parts = parts.view(self.size, sizes[self.rank], *x.shape[1:])
        return add_up(parts.unbind(), torch.empty_like(parts[0]))

    @timed
    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        local = self._to_transfer(x)
        out = local.new_empty(sum(receive), *x.shape[1:])
        with peers_may_vanish():
            dist.all_to_all_single(out, local, list(receive), list(send), group=self._group)
        return out.to(self._device)

    @timed
    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        local = self._to_transfer(x)
        with peers_may_vanish():
            dist.broadcast(local, group=self._group, group_src=source)
        return local.to(self._device)

    def _to_transfer(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor where the backend works, contiguous."""
        return x.to(self._transfer_device).contiguous()

    def _transfer(self, operation: Callable[..., object], part: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(operation, part, group=self._group, group_peer=peer)


class DistributedLink:
    """A `StageLink` over a process group whose rank is the number of the stage."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.times = ExchangeTimes()
        self._group, self._device = group, device
        self._stage, self._stages = group.rank(), group.size()
        self._transfer_device = transfer_device(group, device)
        self._sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    @timed
    def send(self, x: torch.Tensor) -> None:
        copy = x.to(self._transfer_device, copy=True, memory_format=torch.contiguous_format)
        with peers_may_vanish():
            # The copy is kept until it has been sent. At most one step per stage is in flight, so the copy before those
            # has long been received; and stages send one way only, so the wait for it ends. No more copies are kept: a
            # prompt's step may be 100 MB.
            sending = dist.isend(copy, group=self._group, group_dst=self._stage + 1, tag=self._tag(copy))
            self._sent.append((sending, copy))
            while len(self._sent) > self._stages:
                earlier, _ = self._sent.popleft()
                if earlier is not None:  # None for a rank outside the group, which sends nothing
                    earlier.wait()

    @timed
    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        local = torch.empty(tuple(shape), dtype=dtype, device=self._transfer_device)
        began = perf_counter()
        with peers_may_vanish():
            dist.recv(local, group=self._group, group_src=self._stage - 1)
        self.times.add_waited(began)  # with the transfer, which is short compared with the work of a stage
        return local.to(self._device)

    def _tag(self, x: torch.Tensor) -> int:
        """The tag under which a tensor is sent."""
        return 0


def transfer_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Device of the memory that a process group's backend sends from."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device


@contextmanager
def peers_may_vanish() -> Iterator[None]:
    """Raise ConnectionAbortedError for a failure in a collective: another rank has ended, unless memory ran out."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ConnectionAbortedError(f"lost another rank: {error}") from error
