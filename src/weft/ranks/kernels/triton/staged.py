"""One kernel, between the copy of a step's arrays and its CUDA graph, that writes the arrays into the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.staged import NOWHERE, StagedStep

TOKENS = 256  # tokens that one program writes
COLUMNS = 1024  # columns of a row's block table that one program copies


# Integers that differ from step to step must not cause a new compilation.
@triton.jit(
    do_not_specialize=[
        "tokens",
        "rows",
        "decodes",
        "room",
        "row_room",
        "order_room",
        "width",
        "tables_width",
        "batch_width",
        "new",
        "tables_size",
        "slots_size",
        "batch_size",
    ]
)
def _lay(
    staged_tokens, staged_positions, staged_places, staged_context, staged_order, slots, growth, blocks, last, tables,
    batch_tokens, batch_positions, batch_slots, batch_context, batch_order, batch_tables,
    tokens, rows, decodes, room, row_room, order_room, width, tables_width, batch_width,
    new, tables_size, slots_size, batch_size,
    NOWHERE: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    number, chunk, group = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    staged_places, blocks, tables = staged_places + group * tokens, blocks + group * new, tables + group * tables_size
    batch_slots, batch_tables = batch_slots + group * slots_size, batch_tables + group * batch_size
    if chunk == 0:
        at = number * TOKENS + tl.arange(0, TOKENS)
        exists, inside = at < tokens, at < room
        token = tl.load(staged_tokens + at, exists, other=0)
        unknown = token < 0
        sampled = tl.load(last + ~token, unknown, other=0).to(tl.int32)
        tl.store(batch_tokens + at, tl.where(unknown, sampled, token), inside)
        tl.store(batch_positions + at, tl.load(staged_positions + at, exists, other=0), inside)
        tl.store(batch_slots + at, tl.load(staged_places + at, exists, other=NOWHERE), inside)
        context = tl.load(staged_context + at, at < rows, other=0)
        tl.store(batch_context + at, context, at < row_room)
        # Padding rows come last.
        order = tl.load(staged_order + at, at < decodes, other=0)
        tl.store(batch_order + at, tl.where(at < decodes, order, at), at < order_room)
    if number < rows:
        columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
        had, has = tl.load(growth + number), tl.load(growth + rows + number)
        first = tl.load(growth + 2 * rows + number)
        fresh = (columns >= had) & (columns < has)
        # Rows of one request slot write the same blocks, and read only older ones.
        table = tables + tl.load(slots + number).to(tl.int64) * tables_width
        added = tl.load(blocks + first + columns - had, fresh, other=0)
        old = tl.load(table + columns, columns < had, other=0)
        tl.store(table + columns, added, fresh)
        row = batch_tables + number.to(tl.int64) * batch_width
        tl.store(row + columns, tl.where(fresh, added, old), columns < width)


def fill_batch(staged: StagedStep, batch: Batch) -> None:
    """`Kernels.fill_batch` in one launch."""
    tokens, rows, room = staged.tokens.shape[0], staged.rows, batch.tokens.shape[0]
    groups = len(staged.tables)
    _lay[(max(rows, triton.cdiv(room, TOKENS)), triton.cdiv(staged.width, COLUMNS), groups)](
        staged.tokens,
        staged.positions,
        staged.places,
        staged.context,
        staged.order,
        staged.slots,
        staged.growth,
        staged.blocks,
        staged.last,
        staged.tables,
        batch.tokens,
        batch.positions,
        batch.slots,
        batch.context,
        batch.order,
        batch.tables,
        tokens,
        rows,
        staged.decodes,
        room,
        batch.rows,
        batch.decodes,
        staged.width,
        staged.tables.stride(1),
        batch.tables.stride(0),
        staged.blocks.shape[1],
        staged.tables.stride(0),
        _group_stride([part.slots for part in batch.groups]),
        _group_stride([part.tables for part in batch.groups]),
        NOWHERE=NOWHERE,
        TOKENS=TOKENS,
        COLUMNS=COLUMNS,
    )


def _group_stride(tensors: Sequence[torch.Tensor]) -> int:
    """Elements from the tensor of one KV group to the tensor of the next."""
    return int(tensors[1].storage_offset() - tensors[0].storage_offset()) if len(tensors) > 1 else 0
