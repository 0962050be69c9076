"""Attention in C++."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.machine.native.entries import Entries
from weft.ranks.kernels.attention import AttentionShape, KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.warm import KernelLaunch


class NativeAttention:
    """The C++ implementation of `PagedAttention`."""

    name = "cpu"
    capturable = False

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def prepare(self, batch: Batch) -> None:
        """Do nothing: each call of `attend` works out what it needs."""

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        scale: float,
        window: int | None,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens, q_heads, head_dim = q.shape
        out = q.new_empty(tokens, q_heads * head_dim)
        self._entries.attend(
            q.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            out.data_ptr(),
            batch.row_starts.data_ptr(),
            batch.context.data_ptr(),
            batch.tables.data_ptr(),
            batch.tables.shape[1],
            batch.rows,
            cache.block_size,
            q_heads,
            cache.keys.shape[2],
            head_dim,
            window or 0,
            scale,
            None if lse is None else lse.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            self._entries.fixed_order,
        )
        return out

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        return ()
