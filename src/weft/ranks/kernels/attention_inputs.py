"""Random inputs of attention with the shapes and layouts of real steps, to measure and to compile kernels with."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.ranks.kernels.attention import AttentionShape, KVCache
from weft.ranks.kernels.batch import Batch, split_groups

# Queries, one layer's cache, and the batch.
AttentionInputs = tuple[torch.Tensor, KVCache, Batch]


def decode_inputs(shape: AttentionShape, device: torch.device, contexts: list[int]) -> AttentionInputs:
    """Inputs of a decode step: rows with one token each, over `contexts` tokens in shuffled blocks."""
    rows, needs = len(contexts), [-(-context // shape.block_size) for context in contexts]
    order = torch.randperm(sum(needs), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    tables = torch.zeros(rows, max(needs), dtype=torch.int32)
    for row, blocks in enumerate(order.split(needs)):
        tables[row, : len(blocks)] = blocks
    dims = (sum(needs), shape.block_size, shape.kv_heads, shape.head_dim)
    keys, values = (torch.randn(dims, dtype=shape.dtype, device=device).to(shape.cache_dtype) for _ in range(2))
    cache = KVCache(keys, values)
    context = torch.tensor(contexts, dtype=torch.int32, device=device)
    index = torch.arange(rows + 1, dtype=torch.int32, device=device)
    batch = Batch(
        tokens=index[:rows],
        positions=context - 1,
        slots=index[:rows].long(),
        row_starts=index,
        context=context,
        tables=tables.to(device),
        order=context.argsort(descending=True).int(),
        decodes=rows,
        fixed=True,
    )
    return random_queries(shape, device, rows), cache, in_all_groups(batch, shape)


def prompt_inputs(
    shape: AttentionShape, device: torch.device, counts: list[int], contexts: list[int]
) -> AttentionInputs:
    """Inputs of a prefill step: rows with `counts` tokens each, the last ones of their `contexts`."""
    _, cache, rows = decode_inputs(shape, device, contexts)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int().to(device)
    batch = replace(rows, row_starts=starts, decodes=0, fixed=False)
    return random_queries(shape, device, sum(counts)), cache, in_all_groups(batch, shape)


def in_all_groups(batch: Batch, shape: AttentionShape) -> Batch:
    """The batch with the same blocks in all KV groups."""
    groups = 1 + max(group for group, _ in shape.group_windows)
    if groups == 1:
        return batch
    return split_groups(batch, batch.slots.expand(groups, -1), batch.tables.expand(groups, -1, -1))


def random_queries(shape: AttentionShape, device: torch.device, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, shape.q_heads, shape.head_dim, dtype=shape.dtype, device=device)
