"""Figures, lists and commands as text for people."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Sequence


def format_bytes(count: float) -> str:
    """Return bytes as "1.4 GB" or "120 MB", in decimal units: 1 GB is 10**9 bytes."""
    return f"{count / 1e9:,.1f} GB" if abs(count) >= 1e9 else f"{count / 1e6:,.0f} MB"


def format_factor(factor: float) -> str:
    """Return a factor as "1.4x" or "13x"."""
    return f"{factor:.1f}x" if factor < 9.95 else f"{factor:.0f}x"


def weft_command(name: str, flags: Iterable[Sequence[str]], *words: str, without: Collection[str] = ()) -> str:
    """Return `weft NAME` with flags and further words, quoted to be pasted into a shell.

    Each flag is a sequence of its name and values. Flags named in `without` are left out.
    """
    flag_words = [word for flag in flags if flag[0] not in without for word in flag if word]
    return shlex.join(["weft", name, *flag_words, *words])


def extra_hint(extra: str) -> str:
    """Return how to install the packages of an extra. PyPI's `weft` is another project."""
    return f'scripts/setup {extra} in the checkout, or pip install "weft-llm[{extra}] @ git+file:///PATH/OF/CHECKOUT"'


def format_version(numbers: Iterable[int]) -> str:
    """Return a version or a compute capability as "8.9"."""
    return ".".join(map(str, numbers))


def join_commas(figures: Iterable[float]) -> str:
    """Return several values of a flag as "2,1"."""
    return ",".join(f"{figure:g}" for figure in figures)


def counted(count: int, noun: str) -> str:
    """A number with its noun, as in "1 step" and "2 steps"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def still_running(requests: int) -> str:
    """Number of running requests as the clause of a sentence."""
    if not requests:
        return "no request runs"
    return f"{counted(requests, 'request')} still run{'s' if requests == 1 else ''}"


def format_counts(names: Iterable[str]) -> str:
    """Return repeated names as "8 x H100-SXM" or "2 x RTX 4090 + 1 x RTX 3090"."""
    return " + ".join(f"{number:,} x {name}" for name, number in Counter(names).items())
