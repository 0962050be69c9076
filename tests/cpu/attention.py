"""Shapes and batches for tests of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from weft.ranks.kernels.attention import AttentionShape, KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.staged import StagedStep


def shaped(
    dtype: torch.dtype, head_dim: int = 64, q_heads: int = 4, kv_heads: int = 2, **others: Any
) -> AttentionShape:
    """The shape of a small model, with `others` of its fields."""
    shape = AttentionShape(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        windows=(None,),
        scale=head_dim**-0.5,
        dtype=dtype,
        cache_dtype=dtype,
        block_size=16,
        rows=8,
        tokens=512,
        length=512,
    )
    return replace(shape, **others)


def ragged(counts: list[int], contexts: list[int], block_size: int, seed: int) -> tuple[Batch, int]:
    """A batch whose rows have shuffled blocks of their own, and the number of blocks."""
    generator = torch.Generator().manual_seed(seed)
    needs = [-(-c // block_size) for c in contexts]
    order = torch.randperm(sum(needs), generator=generator).to(torch.int32)
    tables = torch.zeros(len(counts), max(needs), dtype=torch.int32)
    positions, slots, used = [], [], 0
    for row, (count, context, need) in enumerate(zip(counts, contexts, needs, strict=True)):
        tables[row, :need] = order[used : used + need]
        used += need
        for position in range(context - count, context):
            positions.append(position)
            slots.append(int(tables[row, position // block_size]) * block_size + position % block_size)
    decodes = next((row for row, count in enumerate(counts) if count > 1), len(counts))
    batch = Batch(
        tokens=torch.zeros(sum(counts), dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        slots=torch.tensor(slots),
        row_starts=torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32),
        context=torch.tensor(contexts, dtype=torch.int32),
        tables=tables,
        order=torch.tensor(contexts[:decodes]).argsort(descending=True).int(),
        decodes=decodes,
    )
    return batch, sum(needs)


def with_turns(batch: Batch, rows: int) -> Batch:
    """The batch with angles of its own for each token, from tables of `rows` rows: none is that of its position."""
    return replace(batch, other_angle_rows=(batch.positions * 7 + 3) % rows)


def spoil_behind(cache: KVCache, batch: Batch, window: int | None) -> None:
    """Fill the blocks behind the window of each row's first token with NaN: they may be another request's by now, and
    that one may be broken."""
    if window is None:
        return
    counts = batch.row_starts.diff()
    for row, (context, count) in enumerate(zip(batch.context.tolist(), counts.tolist(), strict=True)):
        behind = max(0, context - count - window + 1) // cache.block_size
        for part in (cache.keys, cache.values):
            part[batch.tables[row, :behind].long()] = torch.nan


def as_staged(batch: Batch) -> StagedStep:
    """A step that is laid out as the batch: each row has a slot of its own, whose table the device knows."""
    rows, width = batch.tables.shape
    counts = torch.full((rows,), width, dtype=torch.int32, device=batch.tables.device)
    return StagedStep(
        tokens=batch.tokens.clone(),
        positions=batch.positions,
        places=batch.slots[None],
        row_starts=batch.row_starts,
        context=batch.context,
        order=batch.order,
        slots=torch.arange(rows, dtype=torch.int32, device=counts.device),
        growth=torch.stack((counts, counts, counts * 0)),
        blocks=counts[None, :0],
        last=torch.zeros(rows, dtype=torch.int64, device=counts.device),
        tables=batch.tables[None],
        decodes=batch.decodes,
        width=width,
        host=batch.lengths(),
    )
