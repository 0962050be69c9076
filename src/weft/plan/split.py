"""split(): the one function that cuts layers, heads, columns, vocabulary, experts and cores."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite

from weft.errors import PlanError


def split(total: int, weights: Sequence[float], *, unit: int = 1, minimum: int = 0) -> list[range]:
    """Cut `total` indices into contiguous ranges in proportion to `weights`, in multiples of `unit`.

    Returns one range per weight, in order, covering 0..total exactly; each is at least `minimum` units long. If
    `total` is no multiple of `unit`, the last range that is not empty takes the remainder as well. Rounding is by
    largest remainder, ties to the earlier range: equal weights put the larger shares first.

    Raises PlanError if there are not enough units for every range to have its minimum.
    """
    if not _are_valid(weights):
        raise PlanError(
            f"cannot split {total} by weights {list(weights)}: give finite weights, at least one above 0",
            code="bad-split-weights",
        )
    units, remainder = divmod(total, unit)
    if units < minimum * len(weights):
        raise PlanError(
            f"cannot split {total} into {len(weights)} parts of at least {minimum * unit}: "
            f"at most {units // minimum} parts are possible",
            code="split-into-too-many",
        )
    sizes = [share * unit for share in _shares(units, weights, minimum)]
    if remainder:
        last = max((i for i, size in enumerate(sizes) if size), default=len(sizes) - 1)
        sizes[last] += remainder
    ranges, start = [], 0
    for size in sizes:
        ranges.append(range(start, start + size))
        start += size
    return ranges


def _are_valid(weights: Sequence[float]) -> bool:
    """Return True if all weights are finite and not negative, and at least one is above 0."""
    return any(weights) and all(isfinite(weight) and weight >= 0 for weight in weights)


def _shares(units: int, weights: Sequence[float], minimum: int) -> list[int]:
    """Divide `units` in proportion to `weights`, each share at least `minimum`."""
    if len(set(weights)) == 1:  # a shortcut to the same result
        each, left_over = divmod(units, len(weights))
        return [each + (i < left_over) for i in range(len(weights))]
    # Fractions: exact, so that ties are ties and no weight is too large or too small.
    total_weight = sum(map(Fraction, weights))
    ideal = [units * Fraction(weight) / total_weight for weight in weights]
    shares = [max(minimum, int(share)) for share in ideal]
    while sum(shares) < units:
        lowest = min(range(len(shares)), key=lambda i: shares[i] - ideal[i])
        shares[lowest] += 1
    while sum(shares) > units:
        reducible = (i for i in range(len(shares)) if shares[i] > minimum)
        highest = max(reducible, key=lambda i: (shares[i] - ideal[i], i))
        shares[highest] -= 1
    return shares
