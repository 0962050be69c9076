"""The Triton implementation of `Kernels`, for GPUs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from weft.comm import Group
from weft.comm.symmetric import SymmetricGroup
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
from weft.kernels.triton import pointwise, reduce
from weft.kernels.triton.attention import TritonAttention
from weft.kernels.triton.products import QuantisedMatrix, create_quantised_matrix
from weft.kernels.triton.staged import fill_batch
from weft.kernels.warm import KernelLaunch
from weft.quant.dense import create_product
from weft.quant.dense_embedding import DenseEmbedding
from weft.quant.quantised import QuantisedWeight


class TritonKernels:
    """The Triton implementation of `Kernels`. Work is spread over `processors`, the number of the device's
    multiprocessors. `attention` takes the place of Triton's if it is given."""

    capturable = True

    def __init__(self, processors: int, attention: Attention | None = None) -> None:
        self._processors = processors
        self._attention = attention or TritonAttention(processors)
        # One matrix of each kind: others launch the same kernels.
        self._quantised: dict[Hashable, QuantisedMatrix] = {}
        self.name = self._attention.name

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        products = [launch for matrix in self._quantised.values() for launch in matrix.launches(shape.tokens)]
        return [products, *self._attention.launches(shape, device)]

    def fill_batch(self, staged: StagedStep, batch: Batch) -> None:
        fill_batch(staged, batch)

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> Product:
        if isinstance(weight, QuantisedWeight):
            return self._quantised_matrix(weight, bias)
        return create_product(weight, bias)

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight) -> EmbeddingTable:
        if isinstance(weight, QuantisedWeight):
            return self._quantised_matrix(weight, None)
        return DenseEmbedding(weight)

    def _quantised_matrix(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> QuantisedMatrix:
        matrix = create_quantised_matrix(weight, bias, self._processors)
        self._quantised.setdefault((matrix.scheme, matrix.shape, bias is None), matrix)
        return matrix

    def fuse_layers(self, layers: Sequence[DenseLayer], comm: Group) -> FusedStage | None:
        return None

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return pointwise.norm(x, None, weight, eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return pointwise.norm(x, residual, weight, eps)

    def sum_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: Group
    ) -> torch.Tensor:
        parts = comm.publish_part(x) if isinstance(comm, SymmetricGroup) else None
        if parts is None:
            return self.add_norm(comm.sum(x), residual, weight, eps)
        return reduce.sum_add_norm(parts, residual, weight, eps)

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
