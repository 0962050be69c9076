"""Comm: the protocol of a group of ranks; a group of one; and the order in which a sum is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Comm(Protocol):
    """A group of `size` ranks, of which this is `rank`. All ranks call the same things in the same order.

    Where a peer has gone, every call raises ConnectionError.
    """

    rank: int
    size: int
    # Whether `sum` may be captured in a CUDA graph: nothing of it happens on the host.
    capturable: bool

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each; may reuse `x`."""
        ...

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """Concatenate along the last dim, rank r giving sizes[r] columns. On rank 0; None on the others."""
        ...

    def send(self, x: torch.Tensor, to: int) -> None:
        """Hand a tensor to rank `to` of the group; returns without waiting for it to be received. `x` may be
        overwritten afterwards."""
        ...

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """The next tensor from rank `source`, whose shape and dtype both sides know."""
        ...


class Solo:
    """A group of one."""

    rank = 0
    size = 1
    capturable = True

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        raise AssertionError("a group of one sends to nobody")

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        raise AssertionError("a group of one receives from nobody")


@dataclass(frozen=True)
class Links:
    """A rank's two groups: `tensor`, the ranks of its stage; `pipeline`, the ranks of its tp_rank in every
    stage, where the group's rank is the stage."""

    tensor: Comm
    pipeline: Comm


def add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Sum `parts` into `out`, which may be none of them: element by element in the order of ranks, so that
    every rank gets the same bits; more than two in float32 at least, rounded once."""
    if len(parts) == 2:
        return torch.add(parts[0], parts[1], out=out)
    total = parts[0].to(torch.promote_types(out.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return out.copy_(total)
