"""Weft's paged attention as an attention function of Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from weft.checkpoint.architectures.place import HeadSpans, Span
from weft.checkpoint.architectures.shape import Mixer
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.batch import Batch

NAME = "weft"  # name of the attention function in Transformers' registry


@dataclass
class Step:
    """The step that a rank's layers run: its batch and the KV caches.

    Keys and queries are rotated by the model itself. The kernels store keys in an order of their own while they rotate
    them, so they rotate by the only row of `no_rotation`, which changes nothing. The batches of `stored`, one of each
    KV group, have that row for all tokens.
    """

    batch: Batch | None = None
    caches: Sequence[KVCache] = ()
    stored: dict[int, Batch] = field(default_factory=dict)

    def begin(self, batch: Batch, caches: Sequence[KVCache]) -> None:
        """The next calls of attention are for this batch."""
        only = torch.zeros_like(batch.positions)
        self.batch, self.caches = batch, caches
        self.stored = {group.group: replace(group, other_angle_rows=only) for group in batch.groups}


def no_rotation(head_dim: int, device: torch.device) -> torch.Tensor:
    """Table of angles with one row, which rotates nothing: [1, head_dim] float32."""
    return torch.cat((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), dim=1).to(device)


@dataclass(frozen=True)
class PagedLayer:
    """Attention of one layer, the `number`th of this rank, by its `spec` of the whole model. The rank has the heads
    `own`; `angles` are `no_rotation`."""

    step: Step
    number: int
    spec: Mixer
    own: HeadSpans
    angles: torch.Tensor
    kernels: Kernels

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Store keys and values [1, kv_heads, T, head_dim], and attend with query [1, heads, T, head_dim]:
        [1, T, heads, head_dim] with the heads of this rank."""
        step = self.step
        assert step.batch is not None
        if query.shape[1] == self.spec.heads and len(self.own.q) < self.spec.heads:
            # The model has gathered all heads, for a norm over them: each rank goes on with its own.
            query = _own_heads(query, self.own.q)
            key, value = (_own_heads(part, self.own.kv) for part in (key, value))
        heads, tokens, head_dim = query.shape[1:]
        merged = torch.cat((query[0], key[0], value[0])).transpose(0, 1).reshape(tokens, -1)
        cache = step.caches[self.number]
        pointwise, attention = self.kernels.pointwise, self.kernels.attention
        q = pointwise.rotate_and_store(merged, heads, self.angles, cache, step.stored[cache.group], None)
        mixed = attention.attend(q, cache, step.batch.of_group(cache.group), scale, self.spec.window)
        return mixed.view(1, tokens, heads, head_dim)


def _own_heads(part: torch.Tensor, heads: Span) -> torch.Tensor:
    return part[:, heads.start : heads.stop]


def attend_paged(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: the module's `PagedLayer`, which `ranks.models.library.decoder` has given it.

    Masks and other options were refused when the model was described.
    """
    assert attention_mask is None
    layer: PagedLayer = module.paged_layer  # type: ignore[assignment]
    return layer(query, key, value, query.shape[3] ** -0.5 if scaling is None else scaling), None
