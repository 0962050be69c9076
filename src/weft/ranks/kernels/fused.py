"""Layers of a stage as one kernel call computes them: their weights as data, and the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.checkpoint.architectures.shape import Experts
from weft.ranks.comm import Group
from weft.ranks.kernels.attention import HeadNorm, KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.latents import LatentNorm, LatentProducts
from weft.ranks.kernels.matrices import ExpertProducts, FusedMLP, Product


@dataclass(frozen=True)
class ExchangeRanks:
    """The ranks that bring each other tokens, if several attention groups share one set of experts.

    `counts` takes the number of tokens of each attention group, and returns how many of them each rank of `group`
    brings, in the order of attention groups. `first_rank` is the first rank in `group` that brings tokens of this
    rank's attention group. If `complete`, the results of all ranks of `group` add up to the experts' results, otherwise
    to a part of them, which is to be summed over the tensor-parallel ranks.
    """

    group: Group
    counts: Callable[[Sequence[int]], Sequence[int]]
    first_rank: int
    complete: bool


@dataclass(frozen=True)
class FusedMixture:
    """The mixture of experts of a layer, of which this rank has `experts`; `exchange` leads to the experts of other
    groups.

    `shared` experts, if there are any, see every token. The sigmoid of its product with `weigher`, float32, multiplies
    their result, if there is one. `correction` [experts] float32 is the router's, see `Experts`.
    """

    spec: Experts
    router: Product
    experts: ExpertProducts
    shared: FusedMLP | None = None
    weigher: Product | None = None
    exchange: ExchangeRanks | None = None
    correction: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class FusedLayer:
    """Weights and dimensions of one decoder layer, of this rank's heads, columns and experts.

    Results of `out` and `ffn` are summed over the ranks. `eps` is the constant of the norms over the hidden dim. With
    `latent`, `qkv` projects to queries alone.
    """

    attention_norm: torch.Tensor
    qkv: Product
    head_norm: HeadNorm | None
    out: Product
    ffn_norm: torch.Tensor
    ffn: FusedMLP | FusedMixture
    q_heads: int
    window: int | None
    scale: float
    sinks: torch.Tensor | None
    eps: float
    latent: FusedLatent | None = None


@dataclass(frozen=True)
class FusedLatent:
    """Latent attention of a layer. Queries are projected from the layer's input, or from the norm of its product with
    `q_down`."""

    q_down: Product | None
    q_norm: LatentNorm | None
    kv_down: Product
    kv_norm: LatentNorm
    products: LatentProducts
    interleaved: bool


class FusedStage(Protocol):
    """All layers of a pipeline stage."""

    def __call__(
        self, residual: torch.Tensor, rope: torch.Tensor, caches: Sequence[KVCache], batch: Batch
    ) -> torch.Tensor:
        """Run the layers: `residual` [T, hidden], which may be overwritten, -> [T, hidden].

        `rope` is the table of angles; `caches` has one KV cache per layer.
        """
        ...

    def serve_others(self, group_tokens: Sequence[int]) -> None:
        """Compute this rank's experts on the tokens of the other attention groups; this group has none in the step."""
        ...

    def trace(self, log: PhaseTimes | None) -> None:
        """Give the phases of every later call to `log`; None ends that."""
        ...

    def forget_caches(self) -> None:
        """Hold the KV caches of the last call no longer."""
        ...


class PhaseTimes(Protocol):
    """Receives the phases of a stage's calls."""

    def __call__(self, layer: int, phase: str, began_ns: int, ended_ns: int, /) -> None:
        """A phase of a layer, counted from the stage's first one; times of the monotonic clock in ns."""
        ...


def fuse_nothing(layers: Sequence[FusedLayer], comm: Group) -> FusedStage | None:
    """The `FuseLayers` of kernels that have no call for a whole stage."""
    return None
