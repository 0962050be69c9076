"""The CPU kernels in C++, called through ctypes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weft.comm import Group
from weft.kernels.base import AttentionShape, DenseLayer, FusedStage, HeadNorm, KVCache
from weft.kernels.batch import Batch
from weft.kernels.native.entries import load_entries
from weft.kernels.native.matrix import NativeMatrix, pack_dense_matrix, pack_quantised_matrix
from weft.kernels.native.stage import NativeStage
from weft.kernels.staged import StagedStep, fill_batch
from weft.kernels.warm import KernelLaunch
from weft.quant.quantised import QuantisedWeight


class NativeKernels:
    """The C++ implementation of `Kernels`, for contiguous tensors on the CPU in bf16 or fp32."""

    name = "cpu"
    capturable = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._entries = load_entries(dtype)

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        return ()

    def fill_batch(self, staged: StagedStep, batch: Batch) -> None:
        fill_batch(staged, batch)

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None = None) -> NativeMatrix:
        if isinstance(weight, QuantisedWeight):
            return pack_quantised_matrix(self._entries, weight, bias)
        return pack_dense_matrix(self._entries, weight, bias)

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight) -> NativeMatrix:
        return self.matrix(weight)

    def fuse_layers(self, layers: Sequence[DenseLayer], comm: Group) -> FusedStage | None:
        return NativeStage(self._entries, layers, comm)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._entries.norm(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
        return out

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        self._entries.norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps)
        return out

    def sum_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: Group
    ) -> torch.Tensor:
        return self.add_norm(comm.sum(x), residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, width)
        self._entries.silu_mul(gate_up.data_ptr(), out.data_ptr(), tokens, width)
        return out

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        tokens, (kv_heads, head_dim) = qkv.shape[0], cache.keys.shape[2:]
        q = qkv.new_empty(tokens, q_heads, head_dim)
        self._entries.rotate_and_store(
            qkv.data_ptr(),
            q.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            rope.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            norm.query.data_ptr() if norm else None,
            norm.key.data_ptr() if norm else None,
            norm.eps if norm else 0.0,
            tokens,
            q_heads,
            kv_heads,
            head_dim,
            cache.block_size,
        )
        return q

    def prepare(self, batch: Batch) -> None:
        """Do nothing: each call of `attend` works out what it needs."""

    def attend(self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
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
        )
        return out

    def sample_tokens(self, logits: torch.Tensor, settings: np.ndarray, streams: np.ndarray) -> torch.Tensor:
        """Sample a token for each row of logits [R, V], of the kernels' dtype or float32: [R] int64.

        `settings` [R, 4] float64 are rows of `SamplingSettings.columns`. `streams` [R] int64 are those of
        `worker.random.seeds`. Both are contiguous.
        """
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        tokens = torch.empty(len(logits), dtype=torch.int64)
        self._entries.sample(
            logits.data_ptr(),
            logits.itemsize,
            *logits.shape,
            logits.stride(0),
            settings.ctypes.data,
            streams.ctypes.data,
            tokens.data_ptr(),
        )
        return tokens

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
        """Logprobs of `targets` [R] int64, as a `worker.logprobs.Scorer` gives them: [R, 2 + 2 * top] float64.

        Logits [R, V] are of the kernels' dtype or float32. Targets are contiguous.
        """
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        figures = torch.empty(len(logits), 2 + 2 * top, dtype=torch.float64)
        self._entries.score(
            logits.data_ptr(),
            logits.itemsize,
            *logits.shape,
            logits.stride(0),
            targets.data_ptr(),
            top,
            figures.data_ptr(),
        )
        return figures
