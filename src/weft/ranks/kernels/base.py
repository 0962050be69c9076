"""Kernels: all parts of a decoder on one device, and the protocol of the operations between products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.checkpoint.architectures.shape import Experts
from weft.ranks.comm import Group
from weft.ranks.kernels.attention import AttentionShape, HeadNorm, KVCache, PagedAttention
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.fused import FusedLayer, FusedStage, fuse_nothing
from weft.ranks.kernels.latents import LatentKernels
from weft.ranks.kernels.matrices import Matrices
from weft.ranks.kernels.sampling import Sampling
from weft.ranks.kernels.staged import StagedStep
from weft.ranks.kernels.warm import KernelLaunch


class Pointwise(Protocol):
    """Operations on rows between the products. Keys and values are stored in the order that the `PagedAttention` of the
    same kernels reads."""

    def fill_batch(self, staged: StagedStep, batch: Batch) -> None:
        """Write a step into the tensors of a batch that is large enough, and its new blocks into the tables of all
        request slots. Padding rows of a `fixed` batch get no slot and no context."""
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

    def choose_experts(
        self,
        scores: torch.Tensor,
        spec: Experts,
        slots: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each token by the router's scores [T, experts] float32: their numbers [T, top_k] int64
        and shares [T, top_k] float32. The best comes first; of equal scores, the lower number. See `Experts`.

        `correction` [experts] float32 is as in `Experts.correction`.

        With `slots` [T], from a CUDA graph, tokens of negative slots are padding and get the numbers -1. Kernels of a
        CPU are called without.
        """
        ...

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        """Rotate q and k of qkv [T, (q + 2 kv heads) * head_dim] by the batch's `angle_rows` of `rope`, after `norm`
        if there is one. Write k and v to the batch's slots; return q [T, q_heads, head_dim]."""
        ...


# Fuses the layers of a pipeline stage into one call; None if separate operations are as fast.
FuseLayers = Callable[[Sequence[FusedLayer], Group], FusedStage | None]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Implementations of a decoder's operations on one device, in parts. Inputs are bf16, fp16 or fp32 and contiguous
    along their last dim; sums are computed in fp32."""

    attention: PagedAttention
    pointwise: Pointwise
    matrices: Matrices
    sampling: Sampling
    latents: LatentKernels
    fuse_layers: FuseLayers = fuse_nothing

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        """The launches of all parts, see `PagedAttention.launches`."""
        attention = self.latents if shape.latent else self.attention
        return [*self.matrices.launches(shape.tokens), *attention.launches(shape, device)]
