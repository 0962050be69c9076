"""Protocols of the kernels: attention over paged KV, and a decoder's other operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.comm import Group
from weft.kernels.batch import Batch
from weft.kernels.staged import StagedStep
from weft.kernels.warm import KernelLaunch
from weft.plan.plan import Plan
from weft.quant.quantised import QuantisedWeight


@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values: [num_blocks, block_size, kv_heads, head_dim] each. The kernels that write and read
    them choose their order within a block."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Dimensions of a rank's attention, and the limits of its steps.

    `q_heads` and `kv_heads` are this rank's. `windows` are the sliding windows that its layers have. Limits: `rows` of
    a decode step, `tokens` of a step, `length` of a row's context.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    scale: float
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    rows: int
    tokens: int
    length: int

    @classmethod
    def from_plan(cls, plan: Plan, rank: int) -> AttentionShape:
        """The shape of attention on a rank of a plan."""
        place, shape, dtype = plan.places[rank], plan.shape, getattr(torch, plan.dtype)
        return cls(
            q_heads=len(place.q_heads),
            kv_heads=len(place.kv_heads),
            head_dim=shape.head_dim,
            windows=tuple(dict.fromkeys(map(shape.window, range(place.layers.start, place.layers.stop)))),
            scale=shape.head_dim**-0.5,
            dtype=dtype,
            cache_dtype=torch.float8_e4m3fn if plan.kv_dtype == "fp8" else dtype,
            block_size=plan.block_size,
            rows=plan.max_num_seqs,
            tokens=plan.max_num_batched_tokens,
            length=plan.max_model_len,
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True)
class HeadNorm:
    """Weights [head_dim] of the RMS norms over each query and key head, before the rotation (Qwen3)."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


# x [T, in] -> x W^T + b [T, out], for a weight that does not change any more.
Product = Callable[[torch.Tensor], torch.Tensor]


class EmbeddingTable(Protocol):
    """An embedding [vocab, hidden], and the product with it if it is the head as well (tied weights)."""

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding: [T] int64 -> [T, hidden]."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Logits: [S, hidden] -> [S, vocab]."""
        ...


@dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """Weights and dimensions of one decoder layer with a dense MLP, of this rank's heads and columns.

    Results of `out` and `down` are summed over the ranks. `eps` is that of the norms over the hidden dim.
    """

    attention_norm: torch.Tensor
    qkv: Product
    head_norm: HeadNorm | None
    out: Product
    mlp_norm: torch.Tensor
    gate_up: Product
    down: Product
    q_heads: int
    window: int | None
    scale: float
    eps: float


# All layers of a pipeline stage: residual [T, hidden], which may be overwritten, the table of angles, one cache per
# layer, the batch -> [T, hidden].
FusedStage = Callable[[torch.Tensor, torch.Tensor, Sequence[KVCache], Batch], torch.Tensor]


class Attention(Protocol):
    """An implementation of attention over paged KV."""

    name: str

    def prepare(self, batch: Batch) -> None:
        """Compute once what all layers of a step share: the next calls of `attend` are for this batch.

        Never recorded in a CUDA graph: for a `fixed` batch it prepares the recorded calls for other rows.
        """
        ...

    def attend(self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
        """Causal attention of all rows, each over its own context: [T, q_heads, head_dim] -> [T, q_heads * head_dim].

        A token sees the last `window` positions, its own included, or all of them if that is None.
        """
        ...

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        """Calls that together launch every variant of a kernel that steps within the shape's limits can launch, except
        those that each step launches. The calls of a group launch the same kernels."""
        ...


class Kernels(Attention, Protocol):
    """An implementation of a decoder's operations. Inputs are bf16, fp16 or fp32 and contiguous along their last dim;
    sums are computed in fp32.

    If `capturable`, decode steps can be captured as CUDA graphs: no call waits for the GPU, and padding rows, which
    have slot -1 and no context, are skipped.
    """

    capturable: bool

    def fill_batch(self, staged: StagedStep, batch: Batch) -> None:
        """Write a step into the tensors of a batch that is large enough, and its new blocks into the tables of all
        request slots. Padding rows of a `fixed` batch get no slot and no context."""
        ...

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> Product:
        """The product with a weight [out, in], which may be repacked: the caller does not keep it."""
        ...

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight) -> EmbeddingTable:
        """The same for an embedding [vocab, hidden], whose rows are read as well."""
        ...

    def fuse_layers(self, layers: Sequence[DenseLayer], comm: Group) -> FusedStage | None:
        """All layers of a pipeline stage as one call; None if the operations below are as fast."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm of x [T, hidden]."""
        ...

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x in place; return the RMS norm of the sum."""
        ...

    def sum_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: Group
    ) -> torch.Tensor:
        """residual += the sum of x over the ranks, in place; return its RMS norm, the same bits on every rank."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU of the first half of the columns times the second half: [T, 2F] -> [T, F]."""
        ...

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        """Rotate q and k of qkv [T, (q + 2 kv heads) * head_dim] by the rows of `rope` at their positions, after `norm`
        if there is one; write k and v to the batch's slots; return q [T, q_heads, head_dim]."""
        ...
