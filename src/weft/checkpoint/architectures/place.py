"""Place: the contiguous ranges of a model that one rank owns, as plain data. `plan.places` computes them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from weft.checkpoint.architectures.shape import HeadCounts, ModelShape


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A half-open range of indices; unlike `range` it can be encoded as JSON and MessagePack."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.stop

    def scaled(self, by: int) -> Span:
        return Span(self.start * by, self.stop * by)

    def shifted(self, by: int) -> Span:
        return Span(self.start + by, self.stop + by)

    def blocks(self, size: int) -> int:
        """Number of blocks of `size` indices, counted from index 0, that this span touches."""
        return (self.stop - 1) // size - self.start // size + 1 if len(self) else 0


class HeadSpans(NamedTuple):
    """A rank's query heads and KV heads of the layers that have a number of each."""

    q: Span
    kv: Span


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share of a model. `rank` = (dp_rank * stages + stage) * tp_size + `tp_rank`.

    Spans use the whole model's numbering. `dp_rank` is the number of the rank's attention group: each group has the
    whole model without its experts, and requests of its own.

    `q_heads` and `kv_heads` are those of the layers with the first numbers of heads (`ModelShape.head_counts`), and
    `other_heads` the heads of layers with other numbers. KV heads may overlap between neighbouring ranks: with more
    ranks than KV heads they are replicated. Query heads, `ffn` and `vocab` never overlap within a stage of a group.

    In a model with experts a rank holds the columns `expert_ffn` of each expert in `experts`, which all groups share,
    and the columns `shared_ffn` of the shared experts, which each group has. Under tensor parallelism `experts` is all
    of them; under expert parallelism `expert_ffn` is all columns, or the share of one of several ranks that hold the
    same experts. The three spans are empty in other models.
    """

    rank: int
    stage: int
    stages: int
    tp_rank: int
    tp_size: int
    dp_rank: int = 0
    dp_size: int = 1
    layers: Span
    q_heads: Span
    kv_heads: Span
    other_heads: tuple[tuple[HeadCounts, HeadSpans], ...] = ()
    ffn: Span
    vocab: Span
    experts: Span = Span(0, 0)
    expert_ffn: Span = Span(0, 0)
    shared_ffn: Span = Span(0, 0)

    def heads_of(self, counts: HeadCounts) -> HeadSpans:
        """The heads of layers with these numbers of heads."""
        others = (spans for of, spans in self.other_heads if of == counts)
        return next(others, HeadSpans(self.q_heads, self.kv_heads))

    @property
    def first(self) -> bool:
        """True on the first stage, which holds the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """True on the last stage, which holds the final norm and the head."""
        return self.stage == self.stages - 1

    @property
    def samples(self) -> bool:
        """True on the output rank of its attention group, which gathers the logits and samples."""
        return self.last and self.tp_rank == 0


def whole(shape: ModelShape) -> Place:
    """Place of a single rank that owns the whole model."""
    experts, (first, *others) = shape.experts, shape.head_counts
    return Place(
        rank=0,
        stage=0,
        stages=1,
        tp_rank=0,
        tp_size=1,
        layers=Span(0, len(shape.layers)),
        q_heads=Span(0, first.q),
        kv_heads=Span(0, first.kv),
        other_heads=tuple((counts, HeadSpans(Span(0, counts.q), Span(0, counts.kv))) for counts in others),
        ffn=Span(0, shape.ffn),
        vocab=Span(0, shape.vocab),
        experts=Span(0, experts.count if experts else 0),
        expert_ffn=Span(0, experts.width if experts else 0),
        shared_ffn=Span(0, experts.shared_width if experts else 0),
    )
