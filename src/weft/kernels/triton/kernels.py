"""The kernels in Triton: what a GPU runs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from weft.comm import Comm
from weft.comm.symmetric import SymmetricComm
from weft.kernels.base import (
    Attention,
    AttentionShape,
    DenseLayer,
    EmbeddingTable,
    FusedStage,
    HeadNorm,
    KVCache,
    Product,
)
from weft.kernels.batch import Batch
from weft.kernels.staged import StagedStep
from weft.kernels.triton import pointwise, products, reduce
from weft.kernels.triton.attention import TritonAttention
from weft.kernels.triton.staged import fill_batch
from weft.kernels.warm import KernelLaunch
from weft.quant.dense import product
from weft.quant.dense_table import DenseTable
from weft.quant.quantised import QuantisedWeight


class TritonKernels:
    """See `Kernels`. `processors` is the number of the device's multiprocessors, which the work is spread over;
    `attention` another one's, in place of our own."""

    capturable = True

    def __init__(self, processors: int, attention: Attention | None = None) -> None:
        self._processors = processors
        self._attention = attention or TritonAttention(processors)
        # One of each kind: others launch the same kernels.
        self._quantised: dict[Hashable, products.QuantisedMatrix] = {}
        self.name = self._attention.name

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        multiplied = [launch for it in self._quantised.values() for launch in it.launches(shape.tokens)]
        return [multiplied, *self._attention.launches(shape, device)]

    def fill_batch(self, staged: StagedStep, batch: Batch) -> None:
        fill_batch(staged, batch)

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> Product:
        if isinstance(weight, QuantisedWeight):
            return self._multiplier(weight, bias)
        return product(weight, bias)

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight) -> EmbeddingTable:
        if isinstance(weight, QuantisedWeight):
            return self._multiplier(weight, None)
        return DenseTable(weight)

    def _multiplier(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> products.QuantisedMatrix:
        made = products.quantised(weight, bias, self._processors)
        self._quantised.setdefault((made.scheme, made.shape, bias is None), made)
        return made

    def fuse_layers(self, layers: Sequence[DenseLayer], comm: Comm) -> FusedStage | None:
        return None

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return pointwise.norm(x, None, weight, eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return pointwise.norm(x, residual, weight, eps)

    def sum_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: Comm
    ) -> torch.Tensor:
        laid = comm.lay(x) if isinstance(comm, SymmetricComm) else None
        if laid is None:
            return self.add_norm(comm.sum(x), residual, weight, eps)
        return reduce.sum_add_norm(laid, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return pointwise.silu_mul(gate_up)

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        return pointwise.rotate_and_store(qkv, q_heads, rope, cache, batch, norm)

    def prepare(self, batch: Batch) -> None:
        self._attention.prepare(batch)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
        return self._attention.attend(q, cache, batch, scale, window)
