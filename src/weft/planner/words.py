"""Words: figures as a person reads them."""

from __future__ import annotations


def gigabytes(count: float) -> str:
    """Decimal units: 1 GB is 10**9 bytes."""
    return f"{count / 1e9:,.1f} GB" if abs(count) >= 1e9 else f"{count / 1e6:,.0f} MB"


def ways(factor: float) -> str:
    """ "twice", "1.4 times"."""
    return "twice" if 1.95 <= factor < 2.05 else f"{factor:.1f} times" if factor < 9.95 else f"{factor:.0f} times"
