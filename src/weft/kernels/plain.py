"""The kernels in plain torch: they run on every device, and are the reference for tests of the fast ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from weft.comm import Group
from weft.kernels.base import AttentionShape, DenseLayer, EmbeddingTable, FusedStage, HeadNorm, KVCache, Product
from weft.kernels.batch import Batch
from weft.kernels.staged import StagedStep, fill_batch
from weft.kernels.warm import KernelLaunch
from weft.quant.dense import create_product
from weft.quant.dense_embedding import DenseEmbedding
from weft.quant.quantised import QuantisedWeight


class PlainKernels:
    """The implementation of `Kernels` in plain torch."""

    name = "torch"
    capturable = False  # attention reads the longest context from the device, in each layer

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        return ()

    def fill_batch(self, staged: StagedStep, batch: Batch) -> None:
        fill_batch(staged, batch)

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> Product:
        return create_product(weight, bias)

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight) -> EmbeddingTable:
        return DenseEmbedding(weight)

    def fuse_layers(self, layers: Sequence[DenseLayer], comm: Group) -> FusedStage | None:
        return None

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * weight

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.norm(residual.add_(x), weight, eps)

    def sum_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: Group
    ) -> torch.Tensor:
        return self.add_norm(comm.sum(x), residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        kv_heads, head_dim = cache.keys.shape[2:]
        heads = qkv.view(qkv.shape[0], q_heads + 2 * kv_heads, head_dim)
        q, k, v = heads.split((q_heads, kv_heads, kv_heads), dim=1)
        if norm is not None:
            q, k = self.norm(q, norm.query, norm.eps), self.norm(k, norm.key, norm.eps)
        cos, sin = rope[batch.positions].unsqueeze(1).chunk(2, dim=-1)
        # Both caches as rows of slots: [num_blocks * block_size, kv_heads, head_dim].
        cache.keys.flatten(0, 1).index_copy_(0, batch.slots, _rotate(k, cos, sin))
        cache.values.flatten(0, 1).index_copy_(0, batch.slots, v)
        return _rotate(q, cos, sin)

    def prepare(self, batch: Batch) -> None:
        """Do nothing: each call of `attend` works out what it needs."""

    def attend(self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
        """Causal attention, with decode rows padded to the longest context, and prefill rows to the longest chunk as
        well. The two groups are apart so that one long prompt does not pad every decode row."""
        out = torch.empty_like(q)
        counts = batch.row_starts.diff()
        for rows in ((counts == 1).nonzero().flatten(), (counts > 1).nonzero().flatten()):
            if rows.numel():
                self._padded(q, out, rows, int(counts[rows].max()), cache, batch, scale, window)
        return out.flatten(1)

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
    ) -> None:
        kv_heads, head_dim = cache.keys.shape[2:]
        context = batch.context[rows]
        first, last = batch.row_starts[rows], batch.row_starts[rows + 1]
        reach = int(context.max())
        blocks = batch.tables[rows, : -(-reach // cache.block_size)].long()
        key_position = torch.arange(reach, device=q.device)
        # Anything may be stored past a row's end, and 0 times that may be NaN.
        past = (key_position >= context[:, None])[..., None, None]
        # [rows, kv_heads, 1, reach, head_dim]: the extra dim lets a KV head serve its whole group.
        keys, values = (
            c[blocks].flatten(1, 2)[:, :reach].masked_fill_(past, 0).transpose(1, 2).unsqueeze(2)
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


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + head_dim/2) of x [T, heads, head_dim] by float32 angles, rounding once."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
