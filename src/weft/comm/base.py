"""The protocol of a group of ranks, a group of one, and the order in which ranks are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Comm(Protocol):
    """A group of `size` ranks, of which this is `rank`.

    All ranks make the same calls in the same order. Every call raises ConnectionError if a peer has ended.
    """

    rank: int
    size: int
    # True if `sum` may be captured in a CUDA graph, that is, if no part of a sum happens on the host.
    capturable: bool

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, the same bits on each; may overwrite `x`."""
        ...

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """Concatenate along the last dim on rank 0; return None on the other ranks. Rank r gives sizes[r] columns."""
        ...

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send a tensor to rank `to` of the group, without waiting for it to be received. `x` may be overwritten
        afterwards."""
        ...

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Receive the next tensor from rank `source`, whose shape and dtype both sides know."""
        ...


class Solo:
    """A group of one rank."""

    rank = 0
    size = 1
    capturable = True

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        raise AssertionError("a group of one rank sends to nobody")

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        raise AssertionError("a group of one rank receives from nobody")


@dataclass(frozen=True)
class Links:
    """The two groups of a rank.

    `tensor` has the ranks of its stage. `pipeline` has the ranks of its tp_rank in every stage; there the group's rank
    is the number of the stage.
    """

    tensor: Comm
    pipeline: Comm


def add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Sum the ranks' `parts` into `out`, which is none of the parts.

    Elements are added in the order of ranks, so that every rank gets the same bits. More than two parts are added in
    float32 at least and rounded once.
    """
    if len(parts) == 2:
        return torch.add(parts[0], parts[1], out=out)
    total = parts[0].to(torch.promote_types(out.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return out.copy_(total)
