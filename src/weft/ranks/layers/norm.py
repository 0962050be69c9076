"""Norms, and the residual stream that blocks read normalised and add to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from weft.ranks.comm import Group
from weft.ranks.kernels.base import Kernels


@dataclass(frozen=True)
class NormLayer:
    """RMS norm with a weight [hidden], or layer norm, which has a bias [hidden] as well."""

    kind: Literal["rms", "layer"]
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """Normalise x [T, hidden]."""
        if self.kind == "rms":
            return kernels.pointwise.norm(x, self.weight, self.eps)
        assert self.bias is not None
        return F.layer_norm(x.float(), x.shape[-1:], self.weight.float(), self.bias.float(), self.eps).to(x.dtype)


class ResidualStream:
    """The residual [T, hidden] of a pipeline stage, which layers read and add to. The tensor given is overwritten.

    A block's output is summed over the tensor-parallel ranks only when the stream is read again, so that sum, addition
    and the next norm are one operation where the kernels have it.
    """

    def __init__(self, residual: torch.Tensor, comm: Group, kernels: Kernels) -> None:
        self._residual, self._comm, self._kernels = residual, comm, kernels
        self._part: torch.Tensor | None = None
        self._part_norm: NormLayer | None = None

    def add(self, part: torch.Tensor, norm: NormLayer | None = None) -> None:
        """Add a block's output [T, hidden] on this rank, summed over the ranks, and then normalised if `norm` is given.

        The stream must have been read since the last addition.
        """
        assert self._part is None
        self._part, self._part_norm = part, norm

    def normed(self, norm: NormLayer | None) -> torch.Tensor:
        """The stream [T, hidden], normalised if `norm` is given. The same bits on every rank."""
        kernels, part = self._kernels, self._part
        if part is None:
            return self._residual if norm is None else norm(self._residual, kernels)
        self._part = None
        if norm is None or norm.kind != "rms" or self._part_norm is not None:
            self._residual.add_(self._summed(part))
            return self._residual if norm is None else norm(self._residual, kernels)
        return kernels.pointwise.sum_add_norm(part, self._residual, norm.weight, norm.eps, self._comm)

    def normalise(self, norm: NormLayer) -> None:
        """Replace the stream by its norm."""
        self._residual.copy_(norm(self.normed(None), self._kernels))

    def finish(self) -> torch.Tensor:
        """The residual [T, hidden] after the last addition."""
        # A plain sum: the buffers of the fused sums rely on it at the end of a step (ranks/comm/symmetric.py).
        return self.normed(None)

    def _summed(self, part: torch.Tensor) -> torch.Tensor:
        total = self._comm.sum(part)
        return total if self._part_norm is None else self._part_norm(total, self._kernels)
