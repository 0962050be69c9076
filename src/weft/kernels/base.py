"""Kernels: the operations of a decoder, behind one protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.comm import Comm
from weft.kernels.batch import Batch
from weft.kernels.staged import StagedStep
from weft.kernels.warm import KernelLaunch
from weft.plan.plan import Plan
from weft.quant.quantised import QuantisedWeight


@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values: [num_blocks, block_size, kv_heads, head_dim] each. In which order they lie within
    a block is up to the kernels that write and read them."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What the layers of a rank attend with: this rank's heads, `windows` each that a layer has, `kept` the dtype of
    the cache; and the most of everything: `rows` of a decode step, `tokens` of a step, `length` of a row."""

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
        """A rank's of a plan."""
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
    """RMS norm over head_dim of each query and key head, before the rotation (Qwen3): two [head_dim] weights."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


# x [T, in] -> x W^T + b [T, out], for a weight that will not change any more.
Product = Callable[[torch.Tensor], torch.Tensor]


class EmbeddingTable(Protocol):
    """An embedding, and the product with it where it is the head as well."""

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, hidden]."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S, vocab]."""
        ...


@dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """What a decoder's layer is made of: this rank's heads and columns. What `out` and `down` give is to be summed
    over the ranks. `eps` is of the norms over the hidden dim."""

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


# residual [T, hidden], which may be overwritten; the table of angles, one cache per layer, the batch -> [T, hidden].
FusedStage = Callable[[torch.Tensor, torch.Tensor, Sequence[KVCache], Batch], torch.Tensor]


class Attention(Protocol):
    """Attention over paged KV."""

    name: str

    def prepare(self, batch: Batch) -> None:
        """What all layers of a step share, worked out once: the next calls of `attend` are for this batch. Never
        recorded in a graph: of a `fixed` batch it tells the same calls of other rows."""
        ...

    def attend(self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
        """Causal attention of every row over its own context, all rows in one call: [T, q_heads * head_dim]."""
        ...

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        """Calls that launch, between them, all that is compiled for steps within the shape's limits, beside what each
        step launches; those of a group launch the same kernels."""
        ...


class Kernels(Attention, Protocol):
    """Inputs are bf16, fp16 or fp32 and contiguous along their last dim; sums are fp32 inside.

    With `capturable`, decode steps can be captured as CUDA graphs: no call waits for the GPU, and rows that only fill
    a batch up, of slot -1 and no context, are passed over."""

    capturable: bool

    def fill_batch(self, staged: StagedStep, batch: Batch) -> None:
        """Write a step into the tensors of a batch with room for it, and its new blocks into the tables of all slots.
        Rows that are left over in a `fixed` batch get no slot and no context."""
        ...

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> Product:
        """A product with weight [out, in], which may be packed anew: the caller does not keep it."""
        ...

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight) -> EmbeddingTable:
        """The same for an embedding [vocab, hidden], whose rows are asked for too."""
        ...

    def fuse_layers(self, layers: Sequence[DenseLayer], comm: Comm) -> FusedStage | None:
        """All layers of a stage as one call; None where the operations below are as good."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm of x [T, hidden]."""
        ...

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x in place; RMS norm of the sum."""
        ...

    def sum_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: Comm
    ) -> torch.Tensor:
        """residual += the sum of x over the ranks, in place; RMS norm of that, the same bits on every rank."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2F] -> [T, F]: silu of the first half times the second."""
        ...

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        """Rotate q and k of qkv [T, (q + 2 kv heads) * head_dim] by the table rows of their positions, after
        `norm` where there is one; write k and v to the batch's slots; return q [T, q_heads, head_dim]."""
        ...
