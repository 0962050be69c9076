"""The kernels in Triton: what a GPU runs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from weft.comm import Comm
from weft.comm.symmetric import SymmetricComm
from weft.kernels.base import Attention, AttentionShape, DenseLayer, HeadNorm, KVCache, Product, Stage, Table
from weft.kernels.batch import Batch
from weft.kernels.laying import Staged
from weft.kernels.triton import laying, pointwise, products, reduce
from weft.kernels.triton.attention import TritonAttention
from weft.kernels.warm import Launch
from weft.quant.dense import product
from weft.quant.quantised import Quantised
from weft.quant.table import Table as DenseTable


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

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[Launch]]:
        multiplied = [launch for it in self._quantised.values() for launch in it.launches(shape.tokens)]
        return [multiplied, *self._attention.launches(shape, device)]

    def lay(self, staged: Staged, batch: Batch) -> None:
        laying.lay(staged, batch)

    def matrix(self, weight: torch.Tensor | Quantised, bias: torch.Tensor | None) -> Product:
        if isinstance(weight, Quantised):
            return self._multiplier(weight, bias)
        return product(weight, bias)

    def table(self, weight: torch.Tensor | Quantised) -> Table:
        if isinstance(weight, Quantised):
            return self._multiplier(weight, None)
        return DenseTable(weight)

    def _multiplier(self, weight: Quantised, bias: torch.Tensor | None) -> products.QuantisedMatrix:
        made = products.quantised(weight, bias, self._processors)
        self._quantised.setdefault((made.scheme, made.shape, bias is None), made)
        return made

    def fuse(self, layers: Sequence[DenseLayer], comm: Comm) -> Stage | None:
        return None

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return pointwise.norm(x, None, weight, eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return pointwise.norm(x, residual, weight, eps)

    def sum_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: Comm
    ) -> torch.Tensor:
        laid = comm.publish_part(x) if isinstance(comm, SymmetricComm) else None
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
