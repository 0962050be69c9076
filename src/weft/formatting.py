"""Words: figures as a person reads them."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Sequence


def format_bytes(count: float) -> str:
    """Decimal units: 1 GB is 10**9 bytes."""
    return f"{count / 1e9:,.1f} GB" if abs(count) >= 1e9 else f"{count / 1e6:,.0f} MB"


def format_factor(factor: float) -> str:
    """ "1.4x", "13x"."""
    return f"{factor:.1f}x" if factor < 9.95 else f"{factor:.0f}x"


def weft_command(name: str, flags: Iterable[Sequence[str]], *more: str, without: Collection[str] = ()) -> str:
    """`weft NAME` with these flags but some, and `more` words, to be pasted into a shell."""
    words = [word for flag in flags if flag[0] not in without for word in flag if word]
    return shlex.join(["weft", name, *words, *more])


def format_version(numbers: Iterable[int]) -> str:
    """ "8.9", of a compute capability or a version."""
    return ".".join(map(str, numbers))


def join_commas(figures: Iterable[float]) -> str:
    """ "2,1", as flags take several."""
    return ",".join(f"{figure:g}" for figure in figures)


def format_counts(names: Iterable[str]) -> str:
    """ "8 x H100-SXM", "2 x RTX 4090 + 1 x RTX 3090"."""
    return " + ".join(f"{number:,} x {name}" for name, number in Counter(names).items())
