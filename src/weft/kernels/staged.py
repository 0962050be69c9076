"""A step's arrays on the device, and their way into its batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.kernels.batch import Batch, Lengths

NOWHERE = -1  # slot of a padding token of a captured batch


@dataclass(frozen=True)
class StagedStep:
    """T tokens of R rows as the host sent them, and the state that the device keeps for each request slot. int32 if no
    other dtype is given.

    `tokens` [T]: an id, or ~slot for the token that the request slot sampled last. `positions`, `places` (int64),
    `row_starts`, `context`, `order`, `decodes` and `host` are those of a Batch, whose `slots` are `places` here.
    `slots` [R]: the request slot of each row. `growth` [3, R]: number of blocks in a row's table before the step,
    number of blocks now, and index in `blocks` [N] of its first new block.

    `last` [slots] int64: the token that each request slot sampled last. `tables` [slots, blocks]: block tables of all
    request slots, into which `fill_batch` writes new blocks.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    row_starts: torch.Tensor
    context: torch.Tensor
    order: torch.Tensor
    slots: torch.Tensor
    growth: torch.Tensor
    blocks: torch.Tensor
    last: torch.Tensor
    tables: torch.Tensor
    decodes: int
    width: int  # most blocks that a row's table has
    host: Lengths

    @property
    def rows(self) -> int:
        return self.context.shape[0]

    def eager(self) -> Batch:
        """A batch for a step outside of graphs: it shares these arrays, except for its own tables."""
        return Batch(
            tokens=self.tokens,
            positions=self.positions,
            slots=self.places,
            row_starts=self.row_starts,
            context=self.context,
            tables=self.tables.new_empty(self.rows, self.width),
            order=self.order,
            decodes=self.decodes,
            host=self.host,
        )


def fill_batch(staged: StagedStep, batch: Batch) -> None:
    """`Kernels.fill_batch` in plain torch, on any device."""
    tokens, rows = staged.tokens.shape[0], staged.rows
    sampled = staged.last[(~staged.tokens).clamp_(min=0)]
    batch.tokens[:tokens] = torch.where(staged.tokens < 0, sampled, staged.tokens)
    if len(staged.blocks):
        _append_blocks(staged)
    torch.index_select(staged.tables[:, : staged.width], 0, staged.slots, out=batch.tables[:rows, : staged.width])
    if batch.fixed:
        batch.positions[:rows] = staged.positions
        batch.slots[:rows] = staged.places
        batch.slots[rows:] = NOWHERE
        batch.context[:rows] = staged.context
        batch.context[rows:] = 0
        batch.order[:rows] = staged.order
        torch.arange(rows, batch.rows, out=batch.order[rows:])


def _append_blocks(staged: StagedStep) -> None:
    """Write new blocks into the tables of their request slots."""
    had, has, first = staged.growth[:, :, None]
    columns = torch.arange(staged.width, device=staged.slots.device)
    fresh = (columns >= had) & (columns < has)
    blocks = staged.blocks[(first + columns - had).clamp_(0, len(staged.blocks) - 1)]
    tables = staged.tables[staged.slots, : staged.width]
    staged.tables[staged.slots, : staged.width] = torch.where(fresh, blocks, tables)
