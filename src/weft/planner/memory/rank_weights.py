"""Weight bytes of one rank, summed once for all ranks with an equal share."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.quantised.precision import WeightBytes, sum_by_kind
from weft.planner.work.work import LayerKind, layer_kinds


@lru_cache(maxsize=8192)
def rank_weights(shape: ModelShape, precision: str, place: Place) -> WeightBytes:
    """Weight bytes of one rank. `precision` is a result of `canonical` or `held_precision` of
    `checkpoint.quantised.precision`.

    Ranks with equally many experts, and stages with equally many layers of each kind, hold equally many bytes.
    """
    share = msgspec.structs.replace(
        place,
        rank=0,
        tp_rank=0,
        dp_rank=0,
        stage=0 if place.first else 1,
        stages=3 - place.first - place.last,
        layers=Span(0, 0),
        experts=Span(0, len(place.experts)),
    )
    return _sum_of_weights(shape, precision, share, layer_kinds(shape, precision, place.layers))


@lru_cache(maxsize=4096)
def _sum_of_weights(
    shape: ModelShape, precision: str, share: Place, kinds: tuple[tuple[LayerKind, int], ...]
) -> WeightBytes:
    """Sum over layers by kind: there are few kinds, and few ways to share a layer of each."""
    parts = [(_weights_of(shape, precision, share), 1)]
    inner = msgspec.structs.replace(share, stage=1, stages=3)
    for (_, layer), count in kinds:
        one = msgspec.structs.replace(inner, layers=Span(layer, layer + 1))
        parts.append((_weights_of(shape, precision, one), count))
    names = WeightBytes.__struct_fields__
    return WeightBytes(**{name: sum(getattr(part, name) * count for part, count in parts) for name in names})


@lru_cache(maxsize=4096)
def _weights_of(shape: ModelShape, precision: str, place: Place) -> WeightBytes:
    return sum_by_kind(shape, precision, place)
