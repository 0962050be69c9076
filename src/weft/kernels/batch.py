"""Batch: one step's tokens, packed without padding, and where their keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """T tokens of R rows, row after row. Tensors are on the rank's device; int32 unless said.

    `positions` [T] in the text; `slots` [T] int64, where each token's key and value go (block * block_size +
    offset); `row_starts` [R+1], where each row's tokens begin; `context` [R], tokens of the row in the cache
    after this step; `tables` [R, max_blocks], the row's blocks in order. The first `decodes` rows have one token each.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    row_starts: torch.Tensor
    context: torch.Tensor
    tables: torch.Tensor
    decodes: int

    @property
    def rows(self) -> int:
        return self.context.shape[0]
