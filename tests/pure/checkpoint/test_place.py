"""Places: every rank's ranges, for any layout."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.drawn_shapes import layouts
from tests.pure.shapes import SMOLLM2, with_ffn
from tests.refusals import refuses
from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.architectures.shape import HeadCounts, ModelShape
from weft.checkpoint.names.catalogue import find
from weft.errors import PlanError
from weft.plan.places import column_unit, cut_heads, cut_places

Layout = tuple[ModelShape, tuple[float, ...], tuple[int, ...]]


def covers(spans: list[Span], total: int) -> bool:
    """In order, without gap or overlap, none empty."""
    ends = [0, *(span.stop for span in spans)]
    return ends[-1] == total and all(s.start == e and len(s) > 0 for s, e in zip(spans, ends, strict=False))


@given(layouts())
def test_ranks_are_numbered_stage_by_stage(layout: Layout) -> None:
    shape, weights, stages = layout
    ranked = cut_places(shape, weights, stages)
    assert [p.rank for p in ranked] == list(range(len(weights) * len(stages)))
    for place in ranked:
        assert place.rank == place.stage * place.tp_size + place.tp_rank
        assert (place.tp_size, place.stages) == (len(weights), len(stages))
        assert len(place.layers) == stages[place.stage]
        assert place.first == (place.stage == 0) and place.last == (place.stage == len(stages) - 1)
    assert covers([p.layers for p in ranked if p.tp_rank == 0], len(shape.layers))


@given(layouts())
def test_each_stage_covers_the_model_once(layout: Layout) -> None:
    shape, weights, stages = layout
    ranked = cut_places(shape, weights, stages)
    for stage in range(len(stages)):
        mine = [p for p in ranked if p.stage == stage]
        for counts in shape.head_counts:
            assert covers([p.heads_of(counts).q for p in mine], counts.q)
        assert covers([p.ffn for p in mine], shape.ffn)
        assert covers([p.vocab for p in mine], shape.vocab)


@given(layouts())
def test_every_query_head_lies_beside_its_kv_head(layout: Layout) -> None:
    shape, weights, stages = layout
    places = cut_places(shape, weights, stages)
    for counts, place in product(shape.head_counts, places):
        (q_heads, kv_heads), (queries, keys) = counts, place.heads_of(counts)
        group = q_heads // kv_heads
        needed = {q // group for q in range(queries.start, queries.stop)}
        # Exactly those: a KV head that no query of the rank reads would be memory for nothing.
        assert needed == set(range(keys.start, keys.stop))
        if len(weights) <= kv_heads:
            assert queries == keys.scaled(group)
        else:
            assert len(keys) == 1


@given(kv_heads=st.integers(1, 8), group=st.integers(1, 8), data=st.data())
def test_any_number_of_ranks_up_to_the_query_heads(kv_heads: int, group: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, kv_heads * group))
    weights = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=ranks, max_size=ranks))
    heads = cut_heads(HeadCounts(kv_heads * group, kv_heads), weights)
    assert covers([q for q, _ in heads], kv_heads * group)


@given(kv_heads=st.integers(1, 8), group=st.integers(1, 8), more=st.integers(1, 8))
def test_more_ranks_than_the_model_can_feed(kv_heads: int, group: int, more: int) -> None:
    q_heads = kv_heads * group
    with refuses(PlanError, "more-ranks-than-heads", q_heads + more, f"1 to {q_heads}"):
        cut_heads(HeadCounts(q_heads, kv_heads), [1.0] * (q_heads + more))


@pytest.mark.parametrize(
    ("weights", "queries", "keys"),
    [
        ([1.0], [9], [3]),
        ([1.0, 1.0], [6, 3], [2, 1]),
        ([1.0, 2.0], [3, 6], [1, 2]),
        ([1.0, 100.0], [3, 6], [1, 2]),
        ([1.0, 1.0, 1.0], [3, 3, 3], [1, 1, 1]),
        ([1.0, 1.0, 1.0, 1.0], [2, 1, 3, 3], [1, 1, 1, 1]),
        ([1.0] * 9, [1] * 9, [1] * 9),
    ],
)
def test_smollm2(weights: list[float], queries: list[int], keys: list[int]) -> None:
    ranked = cut_places(SMOLLM2, weights, [30])
    assert [len(p.q_heads) for p in ranked] == queries
    assert [len(p.kv_heads) for p in ranked] == keys


def test_matrices_are_cut_in_blocks_of_the_quantised_formats() -> None:
    for weights in ([1.0, 1.0], [2.0, 1.0], [3.0, 1.0, 1.0], [1.0] * 7):
        for place in cut_places(SMOLLM2, weights, [30]):
            assert len(place.ffn) % 32 == 0 and len(place.vocab) % 32 == 0


@pytest.mark.parametrize("stages", [[], [29], [31], [30, 0], [31, -1], [15, 14]])
def test_a_pipeline_split_that_does_not_add_up(stages: list[int]) -> None:
    with refuses(PlanError, "pipeline-split-of-other-sum", "30"):
        cut_places(SMOLLM2, [1.0], stages)


def test_survives_json() -> None:
    ranked = cut_places(SMOLLM2, [2.0, 1.0], [20, 10])
    assert msgspec.json.decode(msgspec.json.encode(ranked), type=tuple[Place, ...]) == ranked


@pytest.mark.parametrize(
    ("model", "precision", "ranks", "columns"),
    [
        # 231 groups of 128, which nothing pads here.
        ("Qwen2.5-72B-Instruct", "int4", 2, [14848, 14720]),
        ("Qwen2.5-72B-Instruct", "int8", 4, [7424, 7424, 7424, 7296]),
        ("Qwen2.5-72B-Instruct", "bf16", 2, [14784, 14784]),
        ("Qwen2.5-72B-Instruct", "q4_k_m", 2, [14784, 14784]),
        ("Llama-3.1-8B", "int4", 2, [7168, 7168]),
        ("DeepSeek-R1", "fp8", 8, [2304] * 8),
        ("SmolLM2-135M", "int4", 9, [256, 256, 256, 128, 128, 128, 128, 128, 128]),
    ],
)
def test_columns_that_share_a_scale_stay_together(model: str, precision: str, ranks: int, columns: list[int]) -> None:
    shape = find(model).shape
    ranked = cut_places(shape, [1.0] * ranks, [len(shape.layers)], ffn_unit=column_unit(shape, precision))
    assert [len(place.ffn) for place in ranked] == columns
    if shape.experts:
        assert [len(place.expert_ffn) for place in ranked] == [shape.experts.width // ranks] * ranks


def test_with_fewer_groups_than_ranks_a_scale_is_shared() -> None:
    shape = with_ffn(SMOLLM2, width=256)
    ranked = cut_places(shape, [1.0] * 4, [30], ffn_unit=128)
    assert [len(place.ffn) for place in ranked] == [64] * 4
