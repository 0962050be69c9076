"""Place: which contiguous ranges of a model one rank owns."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weft.errors import PlanError
from weft.facts.shape import ModelShape
from weft.planner.split import split

FFN_UNIT = 32  # columns; the smallest block of the quantised formats, and a full vector of bf16 on every target


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A half-open range of indices that survives JSON and MessagePack."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def scaled(self, by: int) -> Span:
        return Span(self.start * by, self.stop * by)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share. `rank` = stage * stage_size + `tp_rank`. All spans use the whole model's numbering.

    `kv_heads` may overlap between neighbouring ranks (replicated where there are more ranks than KV heads);
    `q_heads`, `ffn` and `vocab` never do within a stage.
    """

    rank: int
    stage: int
    stages: int
    tp_rank: int
    tp_size: int
    layers: Span
    q_heads: Span
    kv_heads: Span
    ffn: Span
    vocab: Span

    @property
    def first(self) -> bool:
        """Holds the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Holds the final norm and the head."""
        return self.stage == self.stages - 1


def cut_heads(q_heads: int, kv_heads: int, weights: Sequence[float]) -> list[tuple[Span, Span]]:
    """Each rank's query heads and KV heads, in whole KV groups while there are enough of them.

    With more ranks than KV heads the groups are dealt out first, one or more ranks each, and the ranks of
    one group share its query heads and each hold its single KV head. Nothing is padded.
    """
    ranks, group = len(weights), q_heads // kv_heads
    if ranks > q_heads:
        raise PlanError(
            f"tensor parallel size {ranks} is more than the {q_heads} query heads of this model can feed; "
            f"use 1 to {q_heads}, and pipeline parallel for the rest"
        )
    if ranks <= kv_heads:
        kv = [Span(r.start, r.stop) for r in split(kv_heads, weights, minimum=1)]
        return [(span.scaled(group), span) for span in kv]
    crews = split(ranks, [1.0] * kv_heads, minimum=1)
    heads = []
    for head, crew in enumerate(crews):
        for part in split(group, [weights[r] for r in crew], minimum=1):
            q = Span(head * group + part.start, head * group + part.stop)
            heads.append((q, Span(head, head + 1)))
    return heads


def places(shape: ModelShape, tensor_weights: Sequence[float], stage_layers: Sequence[int]) -> tuple[Place, ...]:
    """All ranks of a layout, stage by stage: `stage_layers[s]` layers in stage s, cut by `tensor_weights`."""
    if sum(stage_layers) != shape.layers or any(n < 1 for n in stage_layers):
        raise PlanError(
            f"pipeline split {','.join(map(str, stage_layers))} holds {sum(stage_layers)} layers; it must add up "
            f"to the model's {shape.layers}, with at least one layer per stage"
        )
    tp = len(tensor_weights)
    heads = cut_heads(shape.q_heads, shape.kv_heads, tensor_weights)
    ffn = split(shape.ffn, tensor_weights, unit=FFN_UNIT if shape.ffn >= FFN_UNIT * tp else 1, minimum=1)
    # The head is a matrix product for every token that is sampled: cut like the MLP, never in whole heads.
    vocab = split(shape.vocab, tensor_weights, unit=FFN_UNIT if shape.vocab >= FFN_UNIT * tp else 1, minimum=1)
    out, start = [], 0
    for stage, count in enumerate(stage_layers):
        for t in range(tp):
            out.append(
                Place(
                    rank=stage * tp + t,
                    stage=stage,
                    stages=len(stage_layers),
                    tp_rank=t,
                    tp_size=tp,
                    layers=Span(start, start + count),
                    q_heads=heads[t][0],
                    kv_heads=heads[t][1],
                    ffn=Span(ffn[t].start, ffn[t].stop),
                    vocab=Span(vocab[t].start, vocab[t].stop),
                )
            )
        start += count
    return tuple(out)
