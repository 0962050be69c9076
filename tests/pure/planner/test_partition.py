"""Layers over the stages of a pipeline: as fast as can be, within the room that there is."""

from __future__ import annotations

from itertools import combinations
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from weft.planner.search.partition import StageBudget, partition_layers

POSITIVE = st.floats(0.1, 10)


def slowest(work: list[float], stages: list[StageBudget], counts: tuple[int, ...]) -> float:
    """Seconds of the slowest stage."""
    times, start = [], 0
    for stage, count in zip(stages, counts, strict=True):
        times.append((sum(work[start : start + count]) + stage.work) / stage.speed)
        start += count
    return max(times)


def roomy(sizes: list[float], stages: list[StageBudget], counts: tuple[int, ...]) -> bool:
    start, fits = 0, True
    for stage, count in zip(stages, counts, strict=True):
        fits &= sum(sizes[start : start + count]) + stage.size <= stage.room
        start += count
    return fits


def every_partition(layers: int, stages: int) -> list[tuple[int, ...]]:
    borders = combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, layers), strict=True)) for cut in borders]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], list[float], list[StageBudget]]:
    layers = draw(st.integers(1, 8))
    work = draw(st.lists(POSITIVE, min_size=layers, max_size=layers))
    # Whole numbers, so that whether a stage is full does not hang on rounding.
    sizes = [float(size) for size in draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))]
    stage = st.builds(
        StageBudget,
        speed=POSITIVE,
        room=st.integers(1, 40).map(float),
        work=st.floats(0, 5),
        size=st.integers(0, 5).map(float),
    )
    return work, sizes, draw(st.lists(stage, min_size=1, max_size=4))


@given(problems())
def test_no_partition_is_faster(problem: tuple[list[float], list[float], list[StageBudget]]) -> None:
    work, sizes, stages = problem
    possible = [c for c in every_partition(len(work), len(stages)) if roomy(sizes, stages, c)]
    found = partition_layers(work, sizes, stages)
    if not possible:
        assert found is None
        return
    assert found in possible
    best = min(slowest(work, stages, counts) for counts in possible)
    assert slowest(work, stages, found) <= best * (1 + 1e-6)


def test_equal_stages_take_equal_shares() -> None:
    stages = [StageBudget(speed=1, room=inf)] * 4
    assert partition_layers([1] * 80, [1] * 80, stages) == (20, 20, 20, 20)
    assert partition_layers(
        [1] * 32, [1] * 32, [StageBudget(speed=936, room=inf), StageBudget(speed=1008, room=inf)]
    ) == (15, 17)


def test_a_small_stage_takes_what_it_can_hold() -> None:
    layers = [1.0] * 32
    assert partition_layers(layers, layers, [StageBudget(speed=1, room=30), StageBudget(speed=1, room=9)]) == (23, 9)
    assert partition_layers(layers, layers, [StageBudget(speed=1, room=22), StageBudget(speed=1, room=9)]) is None


def test_the_head_is_work_of_the_last_stage() -> None:
    stages = [*[StageBudget(speed=1, room=inf)] * 3, StageBudget(speed=1, room=inf, work=4)]
    assert partition_layers([1] * 80, [1] * 80, stages) == (21, 21, 21, 17)


def test_more_stages_than_layers() -> None:
    assert partition_layers([1] * 3, [1] * 3, [StageBudget(speed=1, room=inf)] * 4) is None
