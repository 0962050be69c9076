"""torch's varlen attention, which it has for GPUs only: the same arguments, what FlashAttention checks of them, and the
numbers in plain torch."""

from __future__ import annotations

from typing import Any

import torch


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    paged = block_table is not None
    q_heads, kv_heads = query.shape[1], key.shape[2 if paged else 1]
    assert query.dtype == key.dtype == value.dtype and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    assert q_heads == kv_heads or (enable_gqa and q_heads % kv_heads == 0)
    assert cu_seq_q.dtype == torch.int32 and cu_seq_q[0] == 0 and cu_seq_q[-1] == len(query)
    assert window_size[1] == 0 and window_size[0] >= -1
    counts = cu_seq_q.diff().tolist()
    if paged:
        assert seqused_k is not None and seqused_k.dtype == block_table.dtype == torch.int32 and cu_seq_k is None
        lengths = seqused_k.tolist()
    else:
        assert cu_seq_k is not None and cu_seq_k.dtype == torch.int32 and seqused_k is None
        assert cu_seq_k[0] == 0 and cu_seq_k[-1] == len(key) == len(value)
        lengths = cu_seq_k.diff().tolist()
    assert max(counts) == max_q and max(lengths) == max_k
    out, lse = torch.empty_like(query), torch.empty(q_heads, len(query))
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if paged:
            kept = [it[block_table[row].long()].flatten(0, 1)[:length] for it in (key, value)]
        else:
            kept = [it[int(cu_seq_k[row]) :][:length] for it in (key, value)]
        keys, values = (it.float().repeat_interleave(q_heads // kv_heads, 1) for it in kept)
        begin = int(cu_seq_q[row])
        # The last query is at the last key, in every version since FlashAttention 2.1.
        position = torch.arange(length - count, length)[:, None]
        seen = torch.arange(length) <= position
        if window_size[0] >= 0:
            seen &= torch.arange(length) >= position - window_size[0]
        scores = torch.einsum("qhd,khd->hqk", query[begin : begin + count].float(), keys)
        scores *= query.shape[-1] ** -0.5 if scale is None else scale
        scores.masked_fill_(~seen, float("-inf"))
        out[begin : begin + count] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        lse[:, begin : begin + count] = scores.logsumexp(-1)
    return (out, lse) if return_aux and return_aux.lse else out


def varlen_attn_of_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Before there were blocks, and a word for grouped heads, which it did not refuse."""
    return varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        return_aux=return_aux,
        scale=scale,
        window_size=window_size,
        enable_gqa=True,
    )
