"""Ranks on several hosts, through gloo, with few waits for the network.

A message of gloo leaves once its receiver has said that it is ready, so it takes two one-way latencies
(gloo/transport/tcp/pair.cc). A sum in gloo sends 2 (n-1) messages one after the other (gloo/allreduce.cc): four
latencies for two ranks. Here every rank sends to every other one at once, and receives are posted before anybody
computes what will be sent: a small sum takes one latency.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
import torch.distributed as dist

from weft.machine.hardware import links
from weft.machine.hardware.links import sums_in_one_shot
from weft.ranks.comm.base import add_up
from weft.ranks.comm.distributed import DistributedGroup, DistributedLink, peers_may_vanish
from weft.ranks.comm.times import timed

POSTED_BYTES = 4 << 20  # bytes of a message for which a receive is posted; memory is taken only as far as it is used
TURNS = 2  # receives that are posted for each peer
POSTED, DIRECT = 1, 2  # tags of the messages for which a receive was posted, and of larger ones


class GlooGroup(DistributedGroup):
    """A `Group` over a process group of gloo.

    A small sum takes one shot: each rank gets the parts of all others and adds them up. A larger one of more than two
    ranks takes two: each rank gets the parts of its share of the elements, and then the other shares of the sum. The
    largest go through gloo's ring, which sends the fewest bytes between nodes with several ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        with peers_may_vanish():
            self._inboxes = {peer: Inbox(group, peer) for peer in range(self.size) if peer != self.rank}

    @timed
    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if x.nbytes > links.SHOT_BYTES:
            return super().sum(x)
        local = self._to_transfer(x)
        if sums_in_one_shot(x.nbytes, self.size):
            parts = [local if peer == self.rank else torch.empty_like(local) for peer in range(self.size)]
            self._exchange([local] * self.size, parts)
            return add_up(parts, torch.empty_like(local)).to(self._device)
        each, rest = divmod(local.numel(), self.size)
        sizes = [each + (rank < rest) for rank in range(self.size)]
        return self.all_gather(self.reduce_scatter(local.view(-1), sizes), sizes).view(x.shape).to(self._device)

    @timed
    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        local = self._to_transfer(x)
        if self.rank:
            self._exchange([local, *[None] * (self.size - 1)], [None] * self.size)
            return None
        parts = [local, *(local.new_empty((*x.shape[:-1], size)) for size in sizes[1:])]
        self._exchange([None] * self.size, parts)
        return torch.cat(parts, dim=-1).to(self._device)

    @timed
    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        local = self._to_transfer(x)
        out = local.new_empty(sum(sizes), *x.shape[1:])
        parts = out.split(list(sizes))
        parts[self.rank].copy_(local)
        self._exchange([local] * self.size, parts)
        return out.to(self._device)

    @timed
    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        local = self._to_transfer(x)
        out = local.new_empty(sum(receive), *x.shape[1:])
        leaving, arriving = local.split(list(send)), out.split(list(receive))
        arriving[self.rank].copy_(leaving[self.rank])
        self._exchange(leaving, arriving)
        return out.to(self._device)

    @timed
    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        local = self._to_transfer(x)
        if self.rank == source:
            self._exchange([local] * self.size, [None] * self.size)
        else:
            self._exchange([None] * self.size, [local if peer == source else None for peer in range(self.size)])
        return local.to(self._device)

    def _exchange(self, leaving: Sequence[torch.Tensor | None], arriving: Sequence[torch.Tensor | None]) -> None:
        """Send `leaving[r]` to each other rank r, and receive its message for this rank in `arriving[r]`.

        Both sides know the size of a message; None and empty ones are not sent. All tensors are contiguous.
        """
        with peers_may_vanish():
            waits: list[Callable[[], None]] = []
            sending: list[dist.Work | None] = []
            for peer, inbox in self._inboxes.items():
                out, part = arriving[peer], leaving[peer]
                if out is not None and out.numel():
                    waits.append(inbox.expect(out))
                if part is not None and part.numel():
                    sending.append(dist.isend(part, group=self._group, group_dst=peer, tag=message_tag(part)))
            for wait in waits:
                wait()
            for work in sending:
                _finish(work)


class GlooLink(DistributedLink):
    """A `StageLink` over a process group of gloo."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        with peers_may_vanish():
            self._inbox = Inbox(group, self._stage - 1) if self._stage else None

    @timed
    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert self._inbox is not None, "the first stage receives from no other"
        out = torch.empty(tuple(shape), dtype=dtype)
        began = perf_counter()
        with peers_may_vanish():
            self._inbox.expect(out)()
        self.times.add_waited(began)  # with the transfer, which is short compared with the work of a stage
        return out.to(self._device)

    def _tag(self, x: torch.Tensor) -> int:
        return message_tag(x)


class Inbox:
    """Messages from one peer, whose sizes both sides know and whose tags `message_tag` gives.

    For small messages TURNS receives are posted beforehand, and each again once its message was taken. With two, ranks
    that send to each other in turn never wait for a receive: a peer's message follows its word that it is ready for the
    next one.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._posted: deque[tuple[dist.Work | None, torch.Tensor]] = deque()
        for _ in range(TURNS):
            self._post(torch.empty(POSTED_BYTES, dtype=torch.uint8))

    def expect(self, out: torch.Tensor) -> Callable[[], None]:
        """Return a function that waits for the next message and writes it to `out`, contiguous and not empty.

        Messages are waited for in the order in which they were expected.
        """
        if message_tag(out) == POSTED:
            return lambda: self._take(out)
        work = dist.irecv(out, group=self._group, group_src=self._peer, tag=DIRECT)
        return lambda: _finish(work)

    def _take(self, out: torch.Tensor) -> None:
        work, buffer = self._posted.popleft()
        _finish(work)
        out.view(-1).view(torch.uint8).copy_(buffer[: out.nbytes])
        self._post(buffer)

    def _post(self, buffer: torch.Tensor) -> None:
        work = dist.irecv(buffer, group=self._group, group_src=self._peer, tag=POSTED)
        self._posted.append((work, buffer))


def message_tag(x: torch.Tensor) -> int:
    """The tag under which a tensor is sent, by its size."""
    return POSTED if x.nbytes <= POSTED_BYTES else DIRECT


def _finish(work: dist.Work | None) -> None:
    if work is not None:  # None for a rank outside the group
        work.wait()
