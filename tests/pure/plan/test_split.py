"""split: the only division."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refuses
from weft.errors import PlanError
from weft.plan.split import split

WEIGHTS = st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=1, max_size=12)


def sizes(total: int, weights: list[float], **options: int) -> list[int]:
    return [len(r) for r in split(total, weights, **options)]


@given(total=st.integers(0, 5000), weights=WEIGHTS, unit=st.integers(1, 64), minimum=st.integers(0, 3))
def test_covers_exactly_in_order_in_units(total: int, weights: list[float], unit: int, minimum: int) -> None:
    if total // unit < minimum * len(weights):
        with refuses(PlanError, "split-into-too-many"):
            split(total, weights, unit=unit, minimum=minimum)
        return
    ranges = split(total, weights, unit=unit, minimum=minimum)
    assert len(ranges) == len(weights)
    assert [i for r in ranges for i in r] == list(range(total))
    assert all(r.step == 1 and r.start <= r.stop for r in ranges)
    assert all(len(r) >= minimum * unit for r in ranges)
    # Only the last range that holds anything takes what is less than a unit.
    holding = [r for r in ranges if r]
    assert all(len(r) % unit == 0 for r in holding[:-1])


@given(total=st.integers(0, 5000), weights=WEIGHTS)
def test_every_share_is_its_ideal_rounded(total: int, weights: list[float]) -> None:
    whole = sum(Fraction(w) for w in weights)
    for size, weight in zip(sizes(total, weights), weights, strict=True):
        ideal = total * Fraction(weight) / whole
        assert math.floor(ideal) - 1e-6 <= size <= math.ceil(ideal) + 1e-6


@given(total=st.integers(1, 5000), weights=WEIGHTS, minimum=st.integers(0, 3))
def test_a_heavier_rank_never_gets_less(total: int, weights: list[float], minimum: int) -> None:
    if total < minimum * len(weights):
        return
    got = sizes(total, weights, minimum=minimum)
    for a, x in zip(weights, got, strict=True):
        for b, y in zip(weights, got, strict=True):
            assert not (a > b * (1 + 1e-9) and x < y)


@given(total=st.integers(1, 5000), ranks=st.integers(1, 12))
def test_equal_weights_put_the_larger_shares_first(total: int, ranks: int) -> None:
    got = sizes(total, [1.0] * ranks)
    assert got == sorted(got, reverse=True) and got[0] - got[-1] <= 1


@given(total=st.integers(1, 5000), weights=WEIGHTS, exponent=st.integers(-200, 200))
def test_only_the_ratio_of_the_weights_counts(total: int, weights: list[float], exponent: int) -> None:
    assert sizes(total, weights) == sizes(total, [w * 2.0**exponent for w in weights])


@pytest.mark.parametrize(
    ("total", "weights", "options", "expected"),
    [
        (3, [2, 1], {"minimum": 1}, [2, 1]),
        (3, [1, 1], {"minimum": 1}, [2, 1]),
        (8, [100, 1, 1], {"minimum": 1}, [6, 1, 1]),
        (100, [1, 1], {"unit": 32}, [64, 36]),
        (100, [0, 1], {"unit": 32}, [0, 100]),
        (100, [1, 0], {"unit": 32}, [100, 0]),
        (5, [1, 0], {"unit": 8}, [0, 5]),
        (0, [1, 1], {}, [0, 0]),
        (10, [1e308, 1e308], {}, [5, 5]),
        (10, [5e-324, 5e-324], {}, [5, 5]),
        (10, [1e308, 5e-324], {"minimum": 1}, [9, 1]),
    ],
)
def test_examples(total: int, weights: list[float], options: dict[str, int], expected: list[int]) -> None:
    assert sizes(total, weights, **options) == expected


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [math.nan], [math.inf, 1.0]])
def test_weights_that_are_none(weights: list[float]) -> None:
    with refuses(PlanError, "bad-split-weights"):
        split(10, weights)


def test_too_many_parts_says_how_many_are_possible() -> None:
    with refuses(PlanError, "split-into-too-many", "3"):
        split(3, [1.0] * 4, minimum=1)
    with refuses(PlanError, "split-into-too-many", "3"):
        split(100, [1.0] * 4, unit=32, minimum=1)
