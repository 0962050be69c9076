"""Axes: what each dimension of a parameter counts, its length, and the range of it that a rank holds."""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.architectures.shape import HeadCounts, Mixer

# Spans of a Place, and "even" for what the ranks of a stage divide evenly.
Cut = Literal["q_heads", "kv_heads", "ffn", "vocab", "expert_ffn", "shared_ffn", "even"]


class Axis(msgspec.Struct, frozen=True, cache_hash=True):
    """One dimension of a parameter of the whole model: `units` of `size` elements each.

    `cut` names the span of a Place that divides the units over the ranks of a stage; None: every rank has all of them.
    Where heads are cut, `heads` are the numbers of heads of their layer.
    """

    units: int
    size: int = 1
    cut: Cut | None = None
    heads: HeadCounts | None = None

    @property
    def length(self) -> int:
        """Length in elements."""
        return self.units * self.size

    def owned(self, place: Place) -> Span:
        """The range that a rank holds, in elements."""
        match self.cut:
            case None:
                return Span(0, self.length)
            case "even":
                rank, size = place.tp_rank, place.tp_size
                return Span(self.units * rank // size, self.units * (rank + 1) // size).scaled(self.size)
            case "q_heads" | "kv_heads":
                assert self.heads is not None, self
                span = place.heads_of(self.heads)[self.cut == "kv_heads"]
            case _:
                span = getattr(place, self.cut)
        return span.scaled(self.size)


def query_heads(mixer: Mixer, size: int) -> Axis:
    """`size` elements for each query head of a layer."""
    return Axis(mixer.heads, size, "q_heads", mixer.head_counts)


def kv_heads(mixer: Mixer, size: int) -> Axis:
    """`size` elements for each KV head of a layer."""
    return Axis(mixer.kv_heads, size, "kv_heads", mixer.head_counts)
