"""A step's arrays on the device, and their way into its batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.ranks.kernels.batch import Batch, Lengths, StepForms, split_groups

NOWHERE = -1  # slot of a padding token of a captured batch


@dataclass(frozen=True)
class StagedStep:
    """T tokens of R rows as the host sent them, and the state that the device keeps for each request slot. int32 if no
    other dtype is given. G is the number of KV groups.

    `tokens` [T]: an id, or ~slot for the token that the request slot sampled last. `positions`, `places` [G, T] int64,
    `row_starts`, `context`, `order`, `decodes`, `host` and `group_tokens` are as in a Batch, whose `slots` are `places`
    here; `graph_rows` is as in a StepPlan. `forms` are the forms of the rows of a model with latent attention, if rows
    are expanded. `slots` [R]: the request slot of each row. `growth` [3, R]: number of blocks in a row's tables before
    the step, number of blocks now, and index in `blocks` [G, N] of its first new block.

    `last` [slots] int64: the token that each request slot sampled last. `tables` [G, slots, blocks]: block tables of
    all request slots, into which `fill_batch` writes new blocks.
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
    width: int  # columns of the tables that the step reads, at least the most blocks of a row
    host: Lengths
    group_tokens: tuple[int, ...] = ()
    graph_rows: int = 0
    forms: StepForms[torch.Tensor] | None = None

    @property
    def rows(self) -> int:
        return self.context.shape[0]

    def eager(self) -> Batch:
        """A batch for a step outside of graphs: it shares these arrays, except for its own tables."""
        tables = self.tables.new_empty(len(self.tables), self.rows, self.width)
        batch = Batch(
            tokens=self.tokens,
            positions=self.positions,
            slots=self.places[0],
            row_starts=self.row_starts,
            context=self.context,
            tables=tables[0],
            order=self.order,
            decodes=self.decodes,
            host=self.host,
            group_tokens=self.group_tokens,
        )
        return split_groups(batch, self.places, tables) if len(tables) > 1 else batch


def fill_batch(staged: StagedStep, batch: Batch) -> None:
    """`Kernels.fill_batch` in plain torch, on any device."""
    tokens, rows = staged.tokens.shape[0], staged.rows
    sampled = staged.last[(~staged.tokens).clamp_(min=0)]
    batch.tokens[:tokens] = torch.where(staged.tokens < 0, sampled, staged.tokens)
    if staged.blocks.shape[1]:
        _append_blocks(staged)
    for part, tables, places in zip(batch.groups, staged.tables, staged.places, strict=True):
        torch.index_select(tables[:, : staged.width], 0, staged.slots, out=part.tables[:rows, : staged.width])
        if batch.fixed:
            part.slots[:rows] = places
            part.slots[rows:] = NOWHERE
    if batch.fixed:
        batch.positions[:rows] = staged.positions
        batch.context[:rows] = staged.context
        batch.context[rows:] = 0
        batch.order[:rows] = staged.order
        torch.arange(rows, batch.rows, out=batch.order[rows:])


def _append_blocks(staged: StagedStep) -> None:
    """Write new blocks into the tables of their request slots."""
    had, has, first = staged.growth[:, :, None]
    columns = torch.arange(staged.width, device=staged.slots.device)
    fresh = (columns >= had) & (columns < has)
    blocks = staged.blocks[:, (first + columns - had).clamp_(0, staged.blocks.shape[1] - 1)]
    tables = staged.tables[:, staged.slots, : staged.width]
    staged.tables[:, staged.slots, : staged.width] = torch.where(fresh, blocks, tables)
