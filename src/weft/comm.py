"""Comm: how the ranks of one stage sum and gather, and how a stage hands over to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Comm(Protocol):
    """A group of `size` ranks, of which this is `rank`. All ranks call the same things in the same order."""

    rank: int
    size: int

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each; may reuse `x`."""
        ...

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """Concatenate along the last dim, rank r giving sizes[r] columns. On rank 0; None on the others."""
        ...

    def send(self, x: torch.Tensor, to: int) -> None:
        """Hand a tensor to rank `to` of the group; returns without waiting for it to be received."""
        ...

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """The next tensor from rank `source`, whose shape and dtype both sides know."""
        ...


class Solo:
    """A group of one."""

    rank = 0
    size = 1

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
