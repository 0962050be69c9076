"""A hypothesis strategy for operations of groups. It lies apart from tests/cpu/collectives.py, which ranks import: they
need no hypothesis, which takes half a second."""

from __future__ import annotations

from collectives import DTYPES, MAX_RANKS, Case
from hypothesis import strategies as st


@st.composite
def cases(draw: st.DrawFn, operation: int, most: int = MAX_RANKS) -> Case:
    """Cases of one operation among up to `most` ranks; sizes are uneven, and may be zero."""
    ranks = draw(st.integers(1, most))
    numbers = st.tuples(*[st.integers(0, 9)] * ranks)
    return Case(
        operation,
        ranks,
        draw(st.integers(0, len(DTYPES) - 1)),
        draw(st.integers(0, 12)),
        draw(st.integers(0, ranks - 1)),
        draw(st.integers(0, 99)),
        draw(st.tuples(*[numbers] * ranks)),
    )
