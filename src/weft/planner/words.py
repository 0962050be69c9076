"""Words: figures as a person reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def gigabytes(count: float) -> str:
    """Decimal units: 1 GB is 10**9 bytes."""
    return f"{count / 1e9:,.1f} GB" if abs(count) >= 1e9 else f"{count / 1e6:,.0f} MB"


def ways(factor: float) -> str:
    """ "twice", "1.4 times"."""
    return "twice" if 1.95 <= factor < 2.05 else f"{factor:.1f} times" if factor < 9.95 else f"{factor:.0f} times"


def dotted(numbers: Iterable[int]) -> str:
    """ "8.9", of a compute capability or a version."""
    return ".".join(map(str, numbers))


def commas(figures: Iterable[float]) -> str:
    """ "2,1", as flags take several."""
    return ",".join(f"{figure:g}" for figure in figures)


def by_type(names: Iterable[str]) -> str:
    """ "8 x H100-SXM", "2 x RTX 4090 + 1 x RTX 3090"."""
    return " + ".join(f"{number:,} x {name}" for name, number in Counter(names).items())
