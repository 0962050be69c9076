"""Batch: one step's tokens, packed without padding, and where their keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Lengths:
    """A batch's `row_starts` [R+1] and `context` [R] as the host knows them: nobody waits for a GPU to tell."""

    row_starts: npt.NDArray[np.int64]
    context: npt.NDArray[np.int64]

    def padded(self, rows: int) -> Lengths:
        """With rows of one token and no context after them, `rows` in all."""
        more = rows - len(self.context)
        starts = self.row_starts[-1] + np.arange(1, more + 1)
        return Lengths(np.concatenate((self.row_starts, starts)), np.pad(self.context, (0, more)))


@dataclass(frozen=True)
class Batch:
    """T tokens of R rows, row after row. Tensors are on the rank's device; int32 unless said.

    `positions` [T] in the text; `slots` [T] int64, where each token's key and value go (block * block_size +
    offset); `row_starts` [R+1], where each row's tokens begin; `context` [R], tokens of the row in the cache
    after this step; `tables` [R, max_blocks], the row's blocks in order. The first `decodes` rows have one token each;
    `order` [decodes] numbers them, those with the longest contexts first, as decode attention takes them: a long row
    that begins last would be worked on alone.
    With `fixed` its tensors are those of a graph, which later steps are laid into; its last `idle` rows do nothing.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    row_starts: torch.Tensor
    context: torch.Tensor
    tables: torch.Tensor
    order: torch.Tensor
    decodes: int
    host: Lengths | None = None
    fixed: bool = False
    idle: int = 0

    @property
    def rows(self) -> int:
        return self.context.shape[0]

    def lengths(self) -> Lengths:
        """What the host was told, or asks its device for."""
        return self.host or Lengths(*(x.cpu().numpy().astype(np.int64) for x in (self.row_starts, self.context)))


def ragged_index(counts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows that have `counts` [R] things each, one row's after the other: whose each is and its number there,
    [total] int64 both. `total` is their sum, which the host knows: nobody waits."""
    rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts, output_size=total)
    begins = counts.cumsum(0) - counts
    return rows, torch.arange(total, device=counts.device) - begins[rows]
