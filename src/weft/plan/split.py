"""The only division: every cut of layers, heads, columns or vocabulary comes from here."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite

from weft.errors import PlanError


def split(total: int, weights: Sequence[float], *, unit: int = 1, minimum: int = 0) -> list[range]:
    """Cut `total` indices into contiguous ranges in proportion to `weights`, in multiples of `unit`.

    One range per weight, in order, covering 0..total exactly; each is at least `minimum` units long. Where
    `total` is no multiple of `unit`, the last range that got any takes the remainder as well. Rounding is
    by largest remainder, ties to the earlier range, so that equal weights put the larger shares first.

    Raises PlanError where there are not enough units for every range to have its minimum.
    """
    if not weights or any(not isfinite(w) or w < 0 for w in weights) or not any(weights):
        raise PlanError(f"cannot split {total} by weights {list(weights)}: give finite weights, at least one above 0")
    units, rest = divmod(total, unit)
    if units < minimum * len(weights):
        raise PlanError(
            f"cannot split {total} into {len(weights)} parts of at least {minimum * unit}: "
            f"at most {units // minimum} parts are possible"
        )
    sizes = [share * unit for share in _shares(units, weights, minimum)]
    if rest:
        last = max((i for i, s in enumerate(sizes) if s), default=len(sizes) - 1)
        sizes[last] += rest
    ranges, start = [], 0
    for size in sizes:
        ranges.append(range(start, start + size))
        start += size
    return ranges


def _shares(units: int, weights: Sequence[float], minimum: int) -> list[int]:
    if len(set(weights)) == 1:  # what the rounding below comes to, at once
        each, more = divmod(units, len(weights))
        return [each + (i < more) for i in range(len(weights))]
    # Fractions: exact, so that ties are ties and no weight is too large or too small.
    whole = sum(map(Fraction, weights))
    ideal = [units * Fraction(w) / whole for w in weights]
    shares = [max(minimum, int(x)) for x in ideal]
    while sum(shares) < units:
        needy = min(range(len(shares)), key=lambda i: shares[i] - ideal[i])
        shares[needy] += 1
    while sum(shares) > units:
        rich = max((i for i in range(len(shares)) if shares[i] > minimum), key=lambda i: (shares[i] - ideal[i], i))
        shares[rich] -= 1
    return shares
