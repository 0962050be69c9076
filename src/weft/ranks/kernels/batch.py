"""One step's tokens, packed without padding, the slots of their keys and values, and the forms of latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weft.ranks.kernels.sampling import Array


@dataclass(frozen=True)
class Lengths:
    """A batch's `row_starts` [R+1] and `context` [R] on the host, which then need not be read from a GPU."""

    row_starts: npt.NDArray[np.int64]
    context: npt.NDArray[np.int64]

    def padded(self, rows: int) -> Lengths:
        """These lengths, followed by padding rows of one token and no context, `rows` in all."""
        padding = rows - len(self.context)
        starts = self.row_starts[-1] + np.arange(1, padding + 1)
        return Lengths(np.concatenate((self.row_starts, starts)), np.pad(self.context, (0, padding)))


NO_ROWS = Lengths(np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class Batch:
    """T tokens of R rows, row after row. Tensors are on the rank's device, int32 if no other dtype is given.

    `positions` [T]: of tokens in their text. `angle_rows` [T]: row of the rotary tables that turns each token; the
    position, unless a model gives its tokens several positions, as the parts of a picture have. `slots` [T] int64: of
    each token's key and value in the KV cache, block * block_size + offset. `row_starts` [R+1]: index of each row's
    first token. `context` [R]: number of the row's tokens in the cache after this step. `tables` [R, max_blocks]: the
    row's blocks in order. The first `decodes` rows have one token each. `order` [decodes]: their numbers, the longest
    contexts first, the order of decode attention: a long row that begins last would run alone at the end.

    `group_tokens` are the numbers of tokens of all attention groups in the step, empty for one group. `forms` divides
    the rows of a model with latent attention, None if all are in the absorbed form.

    The tensors of a `fixed` batch are a CUDA graph's, into which later steps are written. Its last `idle` rows are
    padding.

    Layers of another KV group have `slots` and `tables` of their own. A batch has the slots and tables of KV group
    `group`; the batch of group 0 has the same step for the other groups as `others`, whose other tensors are the same.
    The tensors of all groups lie one after the other in one memory.
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
    group: int = 0
    others: tuple[Batch, ...] = ()
    group_tokens: tuple[int, ...] = ()
    forms: LatentForms | None = None
    other_angle_rows: torch.Tensor | None = None  # if they are not the positions

    @property
    def angle_rows(self) -> torch.Tensor:
        return self.positions if self.other_angle_rows is None else self.other_angle_rows

    @property
    def groups(self) -> tuple[Batch, ...]:
        """The step for each KV group."""
        return (self, *self.others)

    def of_group(self, group: int) -> Batch:
        """The step for the layers of a KV group."""
        return self.others[group - 1] if group else self

    @property
    def rows(self) -> int:
        return self.context.shape[0]

    def lengths(self) -> Lengths:
        """The batch's lengths on the host, read from the device if the host does not have them."""
        return self.host or Lengths(*(x.cpu().numpy().astype(np.int64) for x in (self.row_starts, self.context)))


def table_columns(blocks: int) -> int:
    """Number of columns of tables with `blocks` blocks a row: each row, and so each KV group's table, begins at a
    multiple of 16 bytes. Triton would compile another kernel for a table that does not."""
    return -(-blocks // 4) * 4


def split_groups(batch: Batch, slots: torch.Tensor, tables: torch.Tensor) -> Batch:
    """The batch with the `slots` [G, T] and `tables` [G, R, max_blocks] of G KV groups."""
    others = [replace(batch, slots=slots[group], tables=tables[group], group=group) for group in range(1, len(tables))]
    return replace(batch, slots=slots[0], tables=tables[0], others=tuple(others))


def ragged_index(counts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row, and index within its row, of each element of rows with `counts` [R] elements: two tensors [total] int64.

    `total` is the sum of `counts`. The caller knows it, so that nothing waits for the device.
    """
    rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts, output_size=total)
    begins = counts.cumsum(0) - counts
    return rows, torch.arange(total, device=counts.device) - begins[rows]


class AbsorbedRows(NamedTuple, Generic[Array]):
    """The rows of a step that stay in the absorbed form while others are in the expanded form. `rows` [R'] int64 are
    their numbers, `tokens` [T'] int64 the numbers of their tokens, `row_starts` [R' + 1] int32 the index of each row's
    first token among these."""

    rows: Array
    tokens: Array
    row_starts: Array


@dataclass(frozen=True)
class StepForms(Generic[Array]):
    """The rows of a step by their form: the numbers of the `expanded` rows, and the other, `absorbed` rows with their
    lengths `host`. All decode rows are absorbed, and remain the first ones."""

    expanded: tuple[int, ...]
    absorbed: AbsorbedRows[Array]
    host: Lengths

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> StepForms[torch.Tensor]:
        """The same with the arrays of `absorbed` on a device."""
        return StepForms(self.expanded, AbsorbedRows(*tensors), self.host)

    @classmethod
    def of(cls, lengths: Lengths, decodes: int, least: int) -> StepForms[np.ndarray] | None:
        """Divide the rows of a step, of which the first `decodes` have one token: rows with `least` tokens or more are
        expanded. None if there are none."""
        counts = np.diff(lengths.row_starts)
        is_long = (counts >= least) & (np.arange(len(counts)) >= decodes)
        if not is_long.any():
            return None
        rows = np.flatnonzero(~is_long)
        row_starts = np.concatenate(([0], counts[rows].cumsum()))
        tokens = np.flatnonzero(np.repeat(~is_long, counts))
        absorbed: AbsorbedRows[np.ndarray] = AbsorbedRows(rows, tokens, row_starts.astype(np.int32))
        expanded = tuple(np.flatnonzero(is_long).tolist())
        return StepForms(expanded, absorbed, Lengths(row_starts, lengths.context[rows]))


@dataclass(frozen=True)
class ExpandedRow:
    """A row in the expanded form: its tokens in the step, the number of its positions, and its `table` of blocks."""

    tokens: slice
    context: int
    table: torch.Tensor


@dataclass(frozen=True)
class LatentForms:
    """The rows of a batch by their form, for all layers of a step. `absorbed` has the rows in the absorbed form, for
    attention alone, and `tokens` [T'] int64 the numbers of their tokens; it is None if there are none."""

    absorbed: Batch | None
    tokens: torch.Tensor
    expanded: tuple[ExpandedRow, ...]


def divide_batch(batch: Batch, forms: StepForms[torch.Tensor]) -> Batch:
    """The batch with its `forms`, once its tables are filled. Nothing waits for the device."""
    rows, tokens, row_starts = forms.absorbed
    absorbed = None
    if len(rows):
        absorbed = replace(
            batch,
            tokens=batch.tokens[:0],
            positions=batch.positions[:0],
            slots=batch.slots[:0],
            row_starts=row_starts,
            context=batch.context.index_select(0, rows),
            tables=batch.tables.index_select(0, rows),
            host=forms.host,
            others=(),
        )
    starts, context = batch.lengths().row_starts.tolist(), batch.lengths().context.tolist()
    expanded = (ExpandedRow(slice(*starts[row : row + 2]), context[row], batch.tables[row]) for row in forms.expanded)
    return replace(batch, forms=LatentForms(absorbed, tokens, tuple(expanded)))
