"""The kernels in Triton: what a GPU runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm import Comm
from weft.kernels.base import DenseLayer, HeadNorm, KVCache, Product, Stage
from weft.kernels.batch import Batch
from weft.kernels.triton import attention, pointwise
from weft.quant.dense import product
from weft.quant.quantised import Quantised
from weft.quant.table import Table


class TritonKernels:
    """See `Kernels`. `processors` is the number of the device's multiprocessors, which the work is spread over."""

    name = "triton"

    def __init__(self, processors: int) -> None:
        self._processors = processors

    def matrix(self, weight: torch.Tensor | Quantised, bias: torch.Tensor | None) -> Product:
        return product(weight, bias)

    def table(self, weight: torch.Tensor | Quantised) -> Table:
        return Table(weight)

    def fuse(self, layers: Sequence[DenseLayer], comm: Comm) -> Stage | None:
        return None

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return pointwise.norm(x, None, weight, eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return pointwise.norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return pointwise.silu_mul(gate_up)

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        return pointwise.rotate_and_store(qkv, q_heads, rope, cache, batch, norm)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        if batch.decodes:
            attention.decode(q, cache, batch, batch.decodes, scale, window, self._processors, out)
        if batch.decodes < batch.rows:
            attention.prefill(q, cache, batch, batch.decodes, scale, window, out)
        return out
