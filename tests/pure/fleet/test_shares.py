"""Share of a model that a rank holds, and its bytes, for every architecture that the planner knows."""

from __future__ import annotations

from collections import defaultdict
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.drawn_shapes import ExpertCut, planned_layouts, planned_shapes
from tests.refusals import refuses
from weft.checkpoint.architectures.parameters import (
    Parameter,
    parameter_count,
    parameter_dims,
    part_axes,
    rank_parameters,
)
from weft.checkpoint.architectures.place import Place, Span, whole
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.names import catalogue
from weft.checkpoint.quantised.precision import weight_bytes, weights_by_kind
from weft.checkpoint.tensor_index import expected_tensors
from weft.errors import PlanError
from weft.plan import fills as engine
from weft.plan.fills import Fill, rank_fills
from weft.plan.places import cut_places

Layout = tuple[ModelShape, tuple[float, ...], tuple[int, ...], ExpertCut]


def cut_layout(layout: Layout) -> tuple[Place, ...]:
    shape, tensor, stages, sharing = layout
    return cut_places(shape, tensor, stages, **sharing._asdict())


def read(fill: Fill, dims: tuple[int, ...], count: np.ndarray) -> None:
    """Count what the fill reads of a source of these dims."""
    rows = slice(fill.rows.start, fill.rows.stop)
    if fill.cols is None:
        count[rows] += 1
    else:
        count[rows, fill.cols.start : fill.cols.stop] += 1


@settings(max_examples=50)
@given(planned_layouts())
def test_the_groups_of_a_stage_read_everything(layout: Layout) -> None:
    """A parameter that may be cut is read once per stage and attention group, experts once by all groups; any other by
    every rank that has its experts; KV heads by the ranks that share them.
    """
    shape, tensor, _, (groups, parts) = layout
    dims = dict(expected_tensors(shape))
    counts: dict[tuple[int, str], np.ndarray] = {}
    cut: dict[str, set[str]] = defaultdict(set)
    expert = set()
    for place in cut_layout(layout):
        table = {name: parameter for name, parameter, _ in rank_parameters(shape, place)}
        for fill in rank_fills(shape, place):
            parameter = table[fill.param]
            cut[fill.source] |= {axis.cut for part in parameter.parts for axis in part_axes(part) if axis.cut}
            if parameter.role == "expert":
                expert.add(fill.source)
            key = place.stage, fill.source
            read(fill, dims[fill.source], counts.setdefault(key, np.zeros(dims[fill.source], int)))
    assert {source for _, source in counts} == set(dims)
    for (_, source), count in counts.items():
        is_cut = bool(cut[source])
        if source in expert:
            assert (count == (1 if is_cut else groups * len(tensor) // parts)).all()
        elif "kv_heads" in cut[source]:
            assert count.min() >= groups
        else:
            assert (count == groups * (1 if is_cut else len(tensor))).all()


@settings(max_examples=50)
@given(planned_layouts())
def test_experts_partition(layout: Layout) -> None:
    """Each column of each expert is on exactly one rank of a stage; each part has experts, and each rank columns."""
    shape, tensor, stages, (groups, parts) = layout
    places = cut_layout(layout)
    assert [place.rank for place in places] == list(range(len(tensor) * len(stages) * groups))
    if not shape.experts:
        return
    for stage in range(len(stages)):
        held = np.zeros((shape.experts.count, shape.experts.width), int)
        ranks = [place for place in places if place.stage == stage]
        for place in ranks:
            assert len(place.experts) and len(place.expert_ffn)
            experts, columns = place.experts, place.expert_ffn
            held[experts.start : experts.stop, columns.start : columns.stop] += 1
        assert (held == 1).all()
        assert len({place.experts for place in ranks}) == parts


@settings(max_examples=50)
@given(planned_layouts())
def test_fills_fill_what_the_rank_holds(layout: Layout) -> None:
    shape = layout[0]
    for place in cut_layout(layout):
        table = {name: parameter_dims(place, p) for name, p, _ in rank_parameters(shape, place)}
        filled = dict.fromkeys(table, 0)
        for fill in rank_fills(shape, place):
            filled[fill.param] += len(fill.rows) * (1 if fill.cols is None else len(fill.cols))
            assert fill.expert is None or 0 <= fill.expert < len(place.experts)
        assert filled == {name: prod(dims) for name, dims in table.items()}
        assert weight_bytes(shape, "bf16", place) == engine.rank_weight_bytes(shape, place, "bfloat16")
        assert weight_bytes(shape, "fp32", place) == engine.rank_weight_bytes(shape, place, "float32")


@given(planned_shapes())
def test_the_whole_model_is_one_rank(shape: ModelShape) -> None:
    assert cut_places(shape, [1.0], [len(shape.layers)]) == (whole(shape),)
    # Corrections of routers are held in float32 always.
    held = [parameter for _, parameter, _ in rank_parameters(shape, whole(shape)) if parameter.dtype == "float32"]
    wide = sum(prod(parameter_dims(whole(shape), parameter)) for parameter in held)
    assert weight_bytes(shape, "bf16") == 2 * parameter_count(shape) + 2 * wide
    assert sum(map(prod, dict(expected_tensors(shape)).values())) == parameter_count(shape)


@given(planned_layouts(), st.sampled_from(["fp8", "int8", "int4", "mxfp4", "nvfp4", "q4_k_m", "q2_k", "q8_0"]))
def test_ranks_hold_at_least_the_model_together(layout: Layout, precision: str) -> None:
    shape, ranked = layout[0], cut_layout(layout)
    assert sum(weight_bytes(shape, precision, place) for place in ranked) >= weight_bytes(shape, precision)


@pytest.mark.parametrize("name", ["DeepSeek-R1", "gpt-oss-120b", "Qwen3-30B-A3B", "Mixtral-8x7B"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_experts_dealt_out_or_cut_weigh_the_same(name: str, ranks: int) -> None:
    shape = catalogue.find(name).shape
    cut = cut_places(shape, [1.0] * ranks, [len(shape.layers)])
    dealt = cut_places(shape, [1.0] * ranks, [len(shape.layers)], expert_parallel=ranks)
    assert shape.experts is not None
    for place in dealt:
        assert len(place.experts) == shape.experts.count // ranks and len(place.expert_ffn) == shape.experts.width
    matrices = [weights_by_kind(shape, "fp32", place).expert for place in dealt]
    assert len(set(matrices)) == 1
    # Biases of the second matrix are on every rank when experts are cut.
    biases = (ranks - 1) * shape.experts.count * shape.hidden * 4 * len(shape.layers) if shape.experts.bias else 0
    assert sum(weights_by_kind(shape, "fp32", place).expert for place in cut) == sum(matrices) + biases


def test_data_parallel_replicas_share_the_experts() -> None:
    shape = catalogue.find("DeepSeek-R1").shape
    places = cut_places(shape, [1.0], [61], data_parallel=4, expert_parallel=4)
    assert [place.experts for place in places] == [Span(0, 64), Span(64, 128), Span(128, 192), Span(192, 256)]
    assert {place.expert_ffn for place in places} == {Span(0, 2048)}
    assert {(place.q_heads, place.vocab, place.shared_ffn) for place in places} == {
        (Span(0, 128), Span(0, shape.vocab), Span(0, 2048))
    }


def test_experts_dealt_to_some_ranks_and_cut_over_the_others() -> None:
    """Tensor-parallel experts under data-parallel attention, and the middle between both."""
    shape = catalogue.find("Mixtral-8x7B").shape
    cut = cut_places(shape, [1.0], [32], data_parallel=2, expert_parallel=1)
    assert [(place.experts, place.expert_ffn) for place in cut] == [
        (Span(0, 8), Span(0, 7168)),
        (Span(0, 8), Span(7168, 14336)),
    ]
    both = cut_places(shape, [3.0, 1.0], [32], data_parallel=2, expert_parallel=2)
    assert [(place.dp_rank, place.experts, place.expert_ffn) for place in both] == [
        (0, Span(0, 4), Span(0, 10752)),
        (0, Span(0, 4), Span(10752, 14336)),
        (1, Span(4, 8), Span(0, 10752)),
        (1, Span(4, 8), Span(10752, 14336)),
    ]


def test_more_ranks_than_experts() -> None:
    shape = catalogue.find("Mixtral-8x7B").shape
    with refuses(PlanError, "more-expert-ranks-than-experts", "16", "8", "--expert-parallel-size 8"):
        cut_places(shape, [1.0] * 8, [32], data_parallel=2, expert_parallel=16)


def test_dense_layers_have_no_experts() -> None:
    shape = catalogue.find("DeepSeek-R1").shape
    table: dict[int | None, list[Parameter]] = defaultdict(list)
    for _, parameter, layer in rank_parameters(shape, whole(shape)):
        table[layer].append(parameter)
    for layer in range(61):
        assert any(parameter.role == "expert" for parameter in table[layer]) == (layer >= 3)
        assert any(".mlp.down" in parameter.name for parameter in table[layer]) == (layer < 3)
    assert shape.ffn == 18432 and shape.experts and shape.experts.width == 2048
