"""Attention over paged KV: a layer's cache, the dimensions of a rank's attention, and the protocol of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.checkpoint.architectures.shape import Attention, LatentAttention
from weft.plan.backends import AttentionSpec
from weft.plan.plan import Plan
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.warm import KernelLaunch


@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values: [num_blocks, block_size, kv_heads, head_dim] each. The kernels that write and read
    them choose their order within a block. The tables of KV group `group` say which blocks are a row's."""

    keys: torch.Tensor
    values: torch.Tensor
    group: int = 0

    @classmethod
    def of_latents(cls, latents: torch.Tensor, rank: int) -> KVCache:
        """The cache of a layer with latent attention: [num_blocks, block_size, 1, rank + rope_dim], in this order. Its
        values are the first `rank` columns of its keys."""
        return cls(latents, latents[..., :rank])

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Dimensions of a rank's attention, and the limits of its steps.

    `q_heads` and `kv_heads` are this rank's. `windows` are the sliding windows that its layers have, `groups` their
    pairs of KV group and window, if there are several groups. If `sinks`, each head has one. With `latent`, heads are
    the heads of the expanded form. Limits: `rows` of a decode step, `tokens` of a step, `length` of a row's context.
    `fixed_order`: all kernels sum in one order, whatever other tokens are in a step.
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
    groups: tuple[tuple[int, int | None], ...] = ()
    sinks: bool = False
    latent: LatentAttention | None = None
    fixed_order: bool = False

    @classmethod
    def from_plan(cls, plan: Plan, rank: int) -> AttentionShape:
        """The shape of attention on a rank of a plan, whose layers have equal heads: `check_equal_attention` refuses
        others."""
        place, layout, dtype = plan.places[rank], plan.kv_layout, getattr(torch, plan.dtype)
        mixers = {layer: plan.shape.layers[layer].mixer for layer in range(place.layers.start, place.layers.stop)}
        pairs = ((layout.group_of(layer), mixer.window) for layer, mixer in mixers.items())
        mixer = next(iter(mixers.values()))
        q_heads, kv_heads = map(len, place.heads_of(mixer.head_counts))
        return cls(
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=mixer.head_dim,
            windows=tuple(dict.fromkeys(mixer.window for mixer in mixers.values())),
            groups=tuple(dict.fromkeys(pairs)) if len(layout.groups) > 1 else (),
            scale=mixer.scale,
            sinks=isinstance(mixer, Attention) and mixer.sinks,
            latent=mixer if isinstance(mixer, LatentAttention) else None,
            dtype=dtype,
            cache_dtype=torch.float8_e4m3fn if plan.kv_dtype == "fp8" else dtype,
            block_size=plan.block_size,
            rows=plan.max_num_seqs,
            tokens=plan.max_num_batched_tokens,
            length=plan.max_model_len,
            fixed_order=plan.deterministic,
        )

    @property
    def group_windows(self) -> tuple[tuple[int, int | None], ...]:
        """Pairs of a KV group and a window of its layers."""
        return self.groups or tuple((0, window) for window in self.windows)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def spec(self) -> AttentionSpec:
        """Facts by which backends are chosen."""
        dtype, fp8 = str(self.dtype).removeprefix("torch."), self.cache_dtype.itemsize == 1
        latent = self.latent.kv_lora_rank + self.latent.rope_dim if self.latent else 0
        return AttentionSpec(head_dim=self.head_dim, group=self.group, dtype=dtype, fp8_cache=fp8, latent_dim=latent)


@dataclass(frozen=True)
class HeadNorm:
    """Weights [head_dim] of the RMS norms over each query and key head, before the rotation (Qwen3)."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class PagedAttention(Protocol):
    """Attention over paged KV.

    If `capturable`, decode steps can be captured as CUDA graphs: no call waits for the GPU, and padding rows, which
    have slot -1 and no context, are skipped.
    """

    @property
    def name(self) -> str:
        """Name of the backend, a key of ATTENTION_BACKENDS."""
        ...

    @property
    def capturable(self) -> bool: ...

    def prepare(self, batch: Batch) -> None:
        """Compute once what all layers of a step share: the next calls of `attend` are for this batch.

        Never recorded in a CUDA graph: for a `fixed` batch it prepares the recorded calls for other rows.
        """
        ...

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        scale: float,
        window: int | None,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of all rows, each over its own context: [T, q_heads, head_dim] -> [T, q_heads * head_dim].

        A token sees the last `window` positions, its own included, or all of them if that is None. If `lse` is given,
        a tensor [T, q_heads] float32, it gets the natural logarithm of the sum of e^score over the positions that each
        head of a token sees; -inf if there are none. Results over parts of a context are joined by it (Dao et al. 2023,
        Flash-Decoding).

        `sinks` [q_heads], of q's dtype, are learned scores, one per head, that take part in the sum of the softmax and
        bring no value (gpt-oss); `lse` is without them.
        """
        ...

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        """Calls that together launch every variant of a kernel that steps within the shape's limits can launch, except
        the kernels that each step launches. The calls of a group launch the same kernels."""
        ...


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention with sinks, from the result `out` [T, q_heads * head_dim] and the `lse` of attention without.

    The weights of all values shrink by e^lse / (e^lse + e^sink): see `PagedAttention.attend`.
    """
    heads = out.unflatten(1, (sinks.shape[0], -1))
    return (heads * torch.sigmoid(lse - sinks.float()).unsqueeze(2)).to(out.dtype).flatten(1)
