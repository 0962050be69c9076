"""The protocols of a group of ranks and of a link between stages, a group with one rank, and the order of sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from weft.ranks.comm.times import ExchangeTimes, total_times


class Group(Protocol):
    """A group of `size` ranks, of which this is `rank`.

    All ranks make the same calls in the same order, with tensors of one dtype. Every call raises ConnectionError if a
    peer has ended. Rows are the first dim of a tensor, columns the last. `sizes` has a number for each rank, is the
    same on every rank, and may contain zeros. Every call may overwrite `x` and may return it. `times` has the host's
    time in these calls.
    """

    rank: int
    size: int
    # True if a CUDA graph may hold sums, and exchanges of sizes that the host knows: no part of them happens there.
    capturable: bool

    @property
    def times(self) -> ExchangeTimes: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, the same bits on each."""
        ...

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """Concatenate columns on rank 0: [..., sizes[rank]] -> [..., sum(sizes)]; None on the other ranks."""
        ...

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Concatenate rows on every rank: [sizes[rank], ...] -> [sum(sizes), ...]."""
        ...

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Sum over all ranks, and return this rank's rows of the sum: [sum(sizes), ...] -> [sizes[rank], ...]."""
        ...

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send `send[r]` rows to each rank r, and return the rows from all ranks, in the order of ranks.

        [sum(send), ...] -> [sum(receive), ...]. The lists differ between ranks: `receive[r]` is rank r's `send[rank]`.
        A rank that does not know it exchanges the numbers first: `all_to_all(numbers, ones, ones)`.
        """
        ...

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return rank `source`'s tensor on every rank. `x` has its shape and dtype everywhere."""
        ...


class StageLink(Protocol):
    """The links of a rank to the same tensor-parallel rank of the previous and of the next stage.

    The last stage does not send, and the first does not receive. Both calls raise ConnectionError if the other stage
    has ended. `times` has the host's time in these calls.
    """

    @property
    def times(self) -> ExchangeTimes: ...

    def send(self, x: torch.Tensor) -> None:
        """Send a tensor to the next stage, without waiting for it to be received. `x` may be overwritten afterwards."""
        ...

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Receive the next tensor of the previous stage, whose shape and dtype both sides know."""
        ...


class Solo:
    """A group of one rank, and the link of a single stage, whose neighbour on either side is the stage itself."""

    rank = 0
    size = 1
    capturable = True

    def __init__(self) -> None:
        self.times = ExchangeTimes()
        self._sent: deque[torch.Tensor] = deque()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return x

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return x

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor) -> None:
        self._sent.append(x.clone())

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._sent.popleft()


@dataclass(frozen=True)
class Links:
    """Links of a rank, by what they are for.

    - `tensor`: the ranks of its stage, which cut layers among them.
    - `stage`: the previous and the next stage.
    - `expert`: the ranks of a stage of all attention groups, to which its experts are dealt out.
    - `data`: the ranks with the same share of a stage in every attention group.

    Only one of the last two is connected, which `Plan.exchange` names.
    """

    tensor: Group = field(default_factory=Solo)
    stage: StageLink = field(default_factory=Solo)
    expert: Group = field(default_factory=Solo)
    data: Group = field(default_factory=Solo)

    @property
    def times(self) -> ExchangeTimes:
        """Times of all exchanges together."""
        return total_times(link.times for link in (self.tensor, self.stage, self.expert, self.data))


def add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Sum the ranks' `parts` into `out`, which is none of the parts.

    Elements are added in the order of ranks, so that every rank gets the same bits. More than two parts are added in
    float32 at least and rounded once; integers are exact.
    """
    if len(parts) == 2:
        return torch.add(parts[0], parts[1], out=out)
    dtype = torch.promote_types(out.dtype, torch.float32) if out.is_floating_point() else out.dtype
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    return out.copy_(total)


def rank_range(sizes: Sequence[int], rank: int, width: int = 1) -> range:
    """Range of a rank in a concatenation of `sizes[r]` rows of each rank r, in elements if `width` is a row's."""
    begin = sum(sizes[:rank])
    return range(begin * width, (begin + sizes[rank]) * width)
