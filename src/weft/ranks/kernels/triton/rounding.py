"""Weights rounded on a GPU to the numbers of a scheme, as `weft.ranks.quant.rounding` rounds them, in one launch per
matrix.

The formulas are explained there; names are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.checkpoint.quantised.schemes import UNIT, Scheme
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.quant.rounding import RANGE_FACTORS, SIDE_FACTORS, TINY, round_into

LARGEST_GROUP = 128  # columns
TILE = 1024  # elements that one program rounds
TINIEST = tl.constexpr(TINY)
# Adding and subtracting it rounds a float32 below 2^22 to the nearest whole number, ties to even.
WHOLE = tl.constexpr(12582912.0)


@triton.jit
def _to_float16(x):
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def _whole(x, least: tl.constexpr, most: tl.constexpr):
    """x rounded to the nearest whole number from `least` to `most`."""
    return (tl.clamp(x, least, most) + WHOLE) - WHOLE


@triton.jit
def _fit_minimum(w, error_weights, below: tl.constexpr, above: tl.constexpr, most: tl.constexpr):
    """Errors [G], numbers [G, GROUP], scales [G] and minima [G] for the factors `below` and `above` on a group's range,
    on both sides of its middle."""
    low, high = tl.min(w, 1), tl.max(w, 1)
    middle, mean = (high + low) / 2, tl.sum(w * error_weights, 1)
    first = middle - (middle - low) * below
    scale = _to_float16(tl.maximum(((high - middle) * above + (middle - low) * below) / most, TINIEST))
    q = _whole((w - first[:, None]) * (1.0 / scale)[:, None], 0.0, most)
    average = tl.sum(q * error_weights, 1)
    centred = q - average[:, None]
    variance = tl.sum(centred * centred * error_weights, 1)
    fitted = tl.sum((w - mean[:, None]) * centred * error_weights, 1) / tl.maximum(variance, TINIEST)
    scale = tl.where(variance > 0.0, _to_float16(tl.maximum(fitted, TINIEST)), scale)
    minimum = _to_float16(mean - scale * average)
    q = _whole((w - minimum[:, None]) * (1.0 / scale)[:, None], 0.0, most)
    off = q * scale[:, None] + minimum[:, None] - w
    return tl.sum(off * off * error_weights, 1), q, scale, minimum


@triton.jit
def _fit_middle(w, error_weights, factor: tl.constexpr, offset: tl.constexpr, BITS: tl.constexpr):
    """Errors [G], numbers [G, GROUP] from -offset on, and scales [G] for a factor on a group's range."""
    low, high = tl.min(w, 1), tl.max(w, 1)
    far = tl.where(high > -low, high, low)
    full = far / -offset if BITS < 8 else tl.abs(far) / (offset - 1.0)
    scale = _to_float16(full * factor)
    scale = tl.where(tl.abs(scale) < TINIEST, TINIEST, scale)
    q = _whole(w * (1.0 / scale)[:, None], -offset, offset - 1.0)
    if BITS < 8:
        squares = tl.sum(q * q * error_weights, 1)
        fitted = _to_float16(tl.sum(w * q * error_weights, 1) / tl.maximum(squares, TINIEST))
        scale = tl.where(tl.abs(fitted) < TINIEST, scale, fitted)
        q = _whole(w * (1.0 / scale)[:, None], -offset, offset - 1.0)
    off = q * scale[:, None] - w
    return tl.sum(off * off * error_weights, 1), q, scale


@triton.jit
def _fit(w, error_weights, BITS: tl.constexpr, LOWEST: tl.constexpr, TRIED: tl.constexpr):
    """Unsigned numbers [G, GROUP], scales [G], and minima or zero points [G] (unused if the scheme has none) of the
    candidate of TRIED with the smallest error."""
    most: tl.constexpr = 2.0**BITS - 1.0
    offset: tl.constexpr = 2.0 ** (BITS - 1)
    if LOWEST == "minimum":
        error, q, scale, lowest = _fit_minimum(w, error_weights, TRIED[0][0], TRIED[0][1], most)
        for n in tl.static_range(1, len(TRIED)):
            other, q_, scale_, lowest_ = _fit_minimum(w, error_weights, TRIED[n][0], TRIED[n][1], most)
            better = other < error
            error, q = tl.where(better, other, error), tl.where(better[:, None], q_, q)
            scale, lowest = tl.where(better, scale_, scale), tl.where(better, lowest_, lowest)
    elif LOWEST == "middle":
        error, q, scale = _fit_middle(w, error_weights, TRIED[0], offset, BITS)
        for n in tl.static_range(1, len(TRIED)):
            other, q_, scale_ = _fit_middle(w, error_weights, TRIED[n], offset, BITS)
            better = other < error
            error, q = tl.where(better, other, error), tl.where(better[:, None], q_, q)
            scale = tl.where(better, scale_, scale)
        q, lowest = q + offset, scale
    else:
        low, high = tl.minimum(tl.min(w, 1), 0.0), tl.maximum(tl.max(w, 1), 0.0)
        scale = _to_float16(tl.maximum((high - low) / most, TINIEST))
        lowest = _whole(-low / scale, 0.0, most)
        q = tl.clamp(_whole(w * (1.0 / scale)[:, None], -most, most) + lowest[:, None], 0.0, most)
    return q, scale, lowest


@triton.jit
def _round(
    weight, importance, values, scales, lowest, total, groups, width, cols, lacking,
    BITS: tl.constexpr, GROUP: tl.constexpr, LOWEST: tl.constexpr, TRIED: tl.constexpr, COUNTED: tl.constexpr,
    GROUPS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mine, lane = number < total, tl.arange(0, GROUP)
    row, column = number // groups, (number % groups)[:, None] * GROUP + lane[None, :]
    # Columns past the last one repeat it, which changes neither end of a range.
    source = tl.minimum(column, width - 1)
    w = tl.load(weight + row[:, None] * width + source, mine[:, None], other=0.0).to(tl.float32)
    error_weights = tl.full([GROUPS, GROUP], 1.0 / GROUP, tl.float32)
    if COUNTED:
        error_weights = tl.load(importance + source, mine[:, None], other=1.0)
        error_weights = error_weights / tl.sum(error_weights, 1)[:, None]
    q, scale, group_lowest = _fit(w, error_weights, BITS, LOWEST, TRIED)
    tl.store(scales + number, scale.to(tl.float16), mine)
    if LOWEST != "middle":
        tl.store(lowest + number, group_lowest.to(lowest.dtype.element_ty), mine)
    if BITS == 8:
        target = column - lacking
        kept = mine[:, None] & (target >= 0) & (target < cols)
        tl.store(values + row[:, None] * cols + target, q.to(tl.uint8), kept)
    else:
        # A byte has a number of a unit's first half in its low bits, and one of the second half in its high bits.
        UNITS: tl.constexpr = GROUPS * GROUP // UNIT
        nibbles = tl.reshape(q.to(tl.int32), [UNITS, 2, UNIT // 2]) << (tl.arange(0, 2) * 4)[None, :, None]
        unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
        each_row = groups * GROUP // UNIT
        target = unit % each_row - lacking // UNIT
        kept = (unit < total * GROUP // UNIT) & (target >= 0) & (target < cols // UNIT)
        place = (unit // each_row * (cols // UNIT) + target) * (UNIT // 2)
        byte = tl.arange(0, UNIT // 2)
        tl.store(values + place[:, None] + byte[None, :], tl.sum(nibbles, 1).to(tl.uint8), kept[:, None])


def round_on_gpu(weight: torch.Tensor, into: QuantisedWeight, importance: torch.Tensor | None = None) -> None:
    """The `Rounding` for GPUs, in one launch; torch rounds to schemes with wider groups."""
    scheme, (rows, width) = into.scheme, weight.shape
    if not has_kernel(scheme):
        round_into(weight, into, importance)
        return
    assert weight.is_contiguous() and into.values.is_contiguous()
    groups = triton.cdiv(width, scheme.group)
    groups_at_once = TILE // scheme.group
    _round[(triton.cdiv(rows * groups, groups_at_once),)](
        weight,
        weight if importance is None else importance,
        into.values,
        into.scales,
        into.scales if into.lowest is None else into.lowest,
        rows * groups,
        groups,
        width,
        into.shape[1],
        into.lacking,
        BITS=scheme.bits,
        GROUP=scheme.group,
        LOWEST=scheme.lowest,
        TRIED=tried_factors(scheme),
        COUNTED=importance is not None,
        GROUPS=groups_at_once,
        UNIT=UNIT,
    )


def has_kernel(scheme: Scheme) -> bool:
    """Return True if the kernel rounds to the numbers of `scheme`."""
    divides = scheme.group <= LARGEST_GROUP and LARGEST_GROUP % scheme.group == 0
    return scheme.lowest in ("middle", "zero", "minimum", "nested") and scheme.bits in (4, 8) and divides


def tried_factors(scheme: Scheme) -> tuple[tuple[float, float], ...] | tuple[float, ...]:
    """Factors on a group's range that are tried for a scheme."""
    factors: tuple[tuple[float, float], ...] | tuple[float, ...] = (
        SIDE_FACTORS if scheme.lowest == "minimum" else RANGE_FACTORS
    )
    return factors if scheme.bits < 8 else factors[:1]
