"""Attention in plain torch: it runs on every device, and is the reference for tests of the fast ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from weft.ranks.kernels.attention import AttentionShape, KVCache, apply_sinks
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.warm import KernelLaunch


class PlainAttention:
    """The implementation of `PagedAttention` in plain torch."""

    name = "torch"
    capturable = False  # it reads the longest context from the device, in each layer

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
        """Causal attention, with decode rows padded to the longest context, and prefill rows to the longest chunk as
        well. The two groups are apart so that one long prompt does not pad every decode row."""
        out = q.new_empty(*q.shape[:2], cache.values.shape[3])
        if lse is None and sinks is not None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        counts = batch.row_starts.diff()
        for rows in ((counts == 1).nonzero().flatten(), (counts > 1).nonzero().flatten()):
            if rows.numel():
                self._padded(q, out, rows, int(counts[rows].max()), cache, batch, scale, window, lse)
        return out.flatten(1) if lse is None or sinks is None else apply_sinks(out.flatten(1), lse, sinks)

    def _padded(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        rows: torch.Tensor,
        longest: int,
        cache: KVCache,
        batch: Batch,
        scale: float,
        window: int | None,
        lse: torch.Tensor | None,
    ) -> None:
        kv_heads, head_dim = cache.keys.shape[2:]
        context = batch.context[rows]
        first, last = batch.row_starts[rows], batch.row_starts[rows + 1]
        reach = int(context.max())
        blocks = batch.tables[rows, : -(-reach // cache.block_size)].long()
        key_position = torch.arange(reach, device=q.device)
        # Anything may be stored past a row's end, and 0 times that may be NaN.
        unseen = key_position >= context[:, None]
        if window is not None:
            unseen |= key_position <= (context - (last - first))[:, None] - window
        unseen = unseen[..., None, None]
        # [rows, kv_heads, 1, reach, head_dim]: the extra dim lets a KV head serve its whole group.
        keys, values = (
            c[blocks].flatten(1, 2)[:, :reach].masked_fill_(unseen, 0).transpose(1, 2).unsqueeze(2)
            for c in (cache.keys, cache.values)
        )
        steps = torch.arange(longest, device=q.device)
        index = (first[:, None] + steps).clamp(max=q.shape[0] - 1)  # [rows, longest], clamped for padding
        real = steps < (last - first)[:, None]
        queries = q[index].view(len(rows), longest, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        # A query at position p sees keys 0..p, of which only the last `window`.
        position = (context - (last - first))[:, None] + steps
        seen = key_position <= position[..., None]
        if window is not None:
            seen &= key_position > position[..., None] - window
        # A padding query sees all keys: its result is dropped, and a softmax over nothing would be NaN.
        seen |= ~real[..., None]
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen[:, None, None], scale=scale)
        out[index[real]] = mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)[real]
        if lse is not None:
            scores = (queries.float() @ keys.float().transpose(3, 4)) * scale
            sums = scores.masked_fill_(~seen[:, None, None], -torch.inf).logsumexp(-1)
            lse[index[real]] = sums.permute(0, 3, 1, 2).flatten(2, 3)[real]

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        return ()
