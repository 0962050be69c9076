"""Fills: every rank reads exactly what it owns, and everything is read."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from math import prod

import pytest
from hypothesis import given

from tests.pure.drawn_shapes import layouts
from tests.pure.shapes import SMOLLM2
from weft.checkpoint.architectures.parameters import model_parameters, parameter_dims, part_axes, rank_parameters
from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.architectures.shape import DTYPE_BYTES, ModelShape
from weft.plan.fills import Fill, rank_fills, rank_weight_bytes
from weft.plan.places import cut_places

Layout = tuple[ModelShape, tuple[float, ...], tuple[int, ...]]
EMBED = "model.embed_tokens.weight"


def sources(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint and their dims."""
    found = {}
    for parameter, layer in model_parameters(shape):
        for part in parameter.parts:
            axes = (part.rows,) if part.cols is None else (part.rows, part.cols)
            found[part.source.format(layer=layer)] = tuple(axis.length for axis in axes)
    return found


def rectangle(fill: Fill) -> tuple[Span, Span]:
    return fill.rows, fill.cols or Span(0, 1)


@given(layouts())
def test_fills_lie_within_their_sources(layout: Layout) -> None:
    shape, weights, stages = layout
    dims = sources(shape)
    for place in cut_places(shape, weights, stages):
        for fill in rank_fills(shape, place):
            rows, *cols = dims[fill.source]
            assert 0 <= fill.rows.start < fill.rows.stop <= rows
            assert (fill.cols is None) == (not cols)
            if fill.cols is not None:
                assert 0 <= fill.cols.start < fill.cols.stop <= cols[0]


@given(layouts())
def test_a_parameter_is_filled_once_from_top_to_bottom(layout: Layout) -> None:
    shape, weights, stages = layout
    for place in cut_places(shape, weights, stages):
        dims = {name: parameter_dims(place, p) for name, p, _ in rank_parameters(shape, place)}
        reached: Counter[str] = Counter()
        for fill in rank_fills(shape, place):
            assert fill.at == reached[fill.param]
            reached[fill.param] += len(fill.rows)
            assert dims[fill.param][1:] == (() if fill.cols is None else (len(fill.cols),))
        assert {name: d[0] for name, d in dims.items()} == dict(reached)
        assert rank_weight_bytes(shape, place, "float16") == 2 * sum(map(prod, dims.values()))
        assert rank_weight_bytes(shape, place, "float32") == DTYPE_BYTES["float32"] * sum(map(prod, dims.values()))


@given(layouts())
def test_every_element_is_read_by_exactly_its_owners(layout: Layout) -> None:
    """Cut axes once per stage that holds the tensor; whole ones by all ranks of it; KV heads by their crews."""
    shape, weights, stages = layout
    ranked = cut_places(shape, weights, stages)
    readers: dict[str, list[tuple[Place, Fill]]] = {}
    for place in ranked:
        for fill in rank_fills(shape, place):
            readers.setdefault(fill.source, []).append((place, fill))
    dims = sources(shape)
    assert set(readers) == set(dims)
    for parameter, layer in model_parameters(shape):
        for part in parameter.parts:
            name = part.source.format(layer=layer)
            for place, fill in readers[name]:
                holds = place.first if part.source == EMBED else place.last
                holds = holds or (part.source == EMBED and shape.tied and place.last)
                if layer is not None:
                    holds = place.layers.start <= layer < place.layers.stop
                assert holds and rectangle(fill)[0] == part.rows.owned(place)
            stage_readers = Counter(place.stage for place, _ in readers[name])
            assert set(stage_readers.values()) == {len(weights)}
            cut = {axis.cut for axis in part_axes(part)} & {"q_heads", "ffn", "vocab"}
            for stage in stage_readers if cut else ():
                # Disjoint rectangles that together have the area of the tensor cover it exactly.
                mine = [rectangle(fill) for place, fill in readers[name] if place.stage == stage]
                assert sum(len(rows) * len(cols) for rows, cols in mine) == prod(dims[name])
                for one, other in combinations(mine, 2):
                    assert any(a.stop <= b.start or b.stop <= a.start for a, b in zip(one, other, strict=True))


@given(layouts())
def test_kv_heads_are_all_read_and_only_shared_by_a_crew(layout: Layout) -> None:
    shape, weights, stages = layout
    for stage, counts in product(range(len(stages)), shape.head_counts):
        spans = [p.heads_of(counts).kv for p in cut_places(shape, weights, stages) if p.stage == stage]
        count = Counter(head for span in spans for head in range(span.start, span.stop))
        assert set(count) == set(range(counts.kv))
        most = max(1, -(-len(weights) // counts.kv))
        assert all(n <= most for n in count.values())


@pytest.mark.parametrize(("stages", "heads"), [([30], 0), ([15, 15], 1)])
def test_a_tied_head_is_stored_only_away_from_the_embedding(stages: list[int], heads: int) -> None:
    names = Counter(fill.param for place in cut_places(SMOLLM2, [1.0], stages) for fill in rank_fills(SMOLLM2, place))
    assert names["embed.weight"] == 1 and names["head.weight"] == heads


def test_smollm2_has_its_135_million_parameters() -> None:
    (whole,) = cut_places(SMOLLM2, [1.0], [30])
    assert rank_weight_bytes(SMOLLM2, whole, "bfloat16") == 2 * 134_515_008
