"""Rounding of weights to the numbers of a quantisation scheme.

Schemes with minima, and symmetric ones below 8 bits, fit each scale to the smallest squared error. The others take the
scale from the group's range or largest number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from weft.checkpoint.quantised.schemes import MXFP4_VALUES, TABLES, UNIT, Scheme
from weft.ranks.quant.quantised import QuantisedWeight, pack_nibbles, pack_sixes

# Rounds `weight` [rows, cols], of any float dtype, into the rows of a quantised matrix. `weight` starts at a group
# boundary, `into.lacking` columns before the first one that `into` keeps, and ends at a group boundary or at the end of
# the row. `importance` [cols] float32, positive and with a mean near 1, weights the columns' squared errors; None
# weights them equally. Schemes that fit the scale use it: "minimum", "nested", and "middle" below 8 bits.
Rounding = Callable[[torch.Tensor, QuantisedWeight, torch.Tensor | None], None]

# (q, scale, lowest) of groups: q [rows, groups, group] uint8, the others [rows, groups, 1] float32. `lowest` is what
# `QuantisedWeight` stores by that name: minimum or zero point, None for schemes without either. In nested schemes the
# scale is [rows, groups, 2] float32, and `lowest` [rows, groups, 12] uint8 has the packed 6-bit scales and minima.
Rounded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

# Elements rounded at once: on a CPU intermediate results stay in a core's cache; on a GPU there are few launches.
CHUNK, GPU_CHUNK = 1 << 17, 1 << 22
# Factors on a group's range that are tried below 8 bits: clipping outliers may lower the total error, since all steps
# become finer. With 4 bits and the first factor alone, the error of normally distributed weights is a tenth larger.
RANGE_FACTORS = (1.0, 0.9, 0.8)
# The same if a group has a minimum: factors on the part of the range below its middle, and on the part above.
SIDE_FACTORS = ((1.0, 1.0), (1.0, 0.9), (0.9, 1.0), (0.9, 0.9))
MAX_6BIT = 63  # largest 6-bit number
LARGEST_MXFP4_EXPONENT = 2  # exponent of 6.0 = 1.5 * 2^2, MXFP4's largest value
LARGEST_FP8 = 448.0  # largest E4M3 value
TINIEST_FP32_SCALE = 1e-20  # smallest float32 scale: of FP8, tables and signed numbers
TINY = 1e-7  # smallest float16 scale, stored as 2^-23: two steps of subnormal float16. Also the floor of divisors.


def round_into(weight: torch.Tensor, into: QuantisedWeight, importance: torch.Tensor | None = None) -> None:
    """The `Rounding` for every device."""
    step = max(1, (CHUNK if weight.device.type == "cpu" else GPU_CHUNK) // weight.shape[1])
    for row, chunk in zip(range(0, len(weight), step), weight.split(step), strict=True):
        part = into.narrow(0, row, len(chunk))
        q, scale, lowest = round_weight(chunk.float(), into.scheme, importance)
        numbers = q.flatten(1)[:, into.lacking : into.lacking + into.shape[1]]
        part.values.copy_(pack_nibbles(numbers) if into.scheme.bits == 4 else numbers)
        part.scales.copy_(scale.flatten(1))
        if part.lowest is not None and lowest is not None:
            part.lowest.copy_(lowest.flatten(1))


def round_weight(weight: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None) -> Rounded:
    """Round a weight [rows, cols] float32, whose first column begins a group and whose last group may be short."""
    # A group may be a whole row; a nested one has parts, of which a row may lack some.
    group = scheme.group if scheme.lowest == "nested" else min(scheme.group, weight.shape[1])
    error_weights = column_error_weights(importance, weight.shape[1], group, weight.device)
    missing = -weight.shape[1] % group
    if missing:
        # Copies of the last column change neither end of the range.
        weight = F.pad(weight, (0, missing), mode="replicate")
    return ROUND[scheme.lowest](weight.unflatten(1, (-1, group)), error_weights, scheme.bits)


def column_error_weights(importance: torch.Tensor | None, width: int, group: int, device: torch.device) -> torch.Tensor:
    """Weights of the columns' squared errors, which add up to 1 in each group: [groups, group] float32."""
    groups = -(-width // group)
    if importance is None:
        return torch.full((groups, group), 1 / group, device=device)
    error_weights = F.pad(importance.unsqueeze(0), (0, groups * group - width), mode="replicate").view(groups, group)
    return error_weights / error_weights.sum(dim=1, keepdim=True)


def _minimum(w: torch.Tensor, error_weights: torch.Tensor, bits: int) -> Rounded:
    """Round to w = scale * q + minimum.

    Scale and minimum are fitted to q by least squares; `error_weights` weight the columns' squared errors.
    """
    most, low, high = 2**bits - 1, *w.aminmax(dim=2, keepdim=True)
    middle, mean = (high + low) / 2, (w * error_weights).sum(dim=2, keepdim=True)
    candidates: list[tuple[torch.Tensor, ...]] = []
    for below, above in SIDE_FACTORS if bits < 8 else SIDE_FACTORS[:1]:
        first = middle - (middle - low) * below
        scale = _to_float16((((high - middle) * above + (middle - low) * below) / most).clamp_(min=TINY))
        q = ((w - first) * scale.reciprocal()).round_().clamp_(0, most)
        average = (q * error_weights).sum(dim=2, keepdim=True)
        centred = q - average
        variance = (centred.square() * error_weights).sum(dim=2, keepdim=True)
        fitted = ((w - mean) * centred * error_weights).sum(dim=2, keepdim=True) / variance.clamp(min=TINY)
        scale = torch.where(variance > 0, _to_float16(fitted.clamp_(min=TINY)), scale)
        minimum = _to_float16(mean - scale * average)
        q = ((w - minimum) * scale.reciprocal()).round_().clamp_(0, most)
        off = (q * scale).add_(minimum).sub_(w).square_()
        candidates.append((off.mul_(error_weights).sum(dim=2, keepdim=True), q, scale, minimum))
    q, scale, minimum = _best(candidates)
    return q.to(torch.uint8), scale, minimum


def _middle(w: torch.Tensor, error_weights: torch.Tensor, bits: int) -> Rounded:
    """Round to w = scale * (q - 2^(bits - 1)).

    With 4 bits, the value farthest from zero becomes -8, the end with one step more. So the scale may be negative.
    """
    offset, (low, high) = 2 ** (bits - 1), w.aminmax(dim=2, keepdim=True)
    far = torch.where(high > -low, high, low)
    full = far / -offset if bits < 8 else far.abs() / (offset - 1)
    candidates: list[tuple[torch.Tensor, ...]] = []
    for factor in RANGE_FACTORS if bits < 8 else RANGE_FACTORS[:1]:
        scale = _to_float16(full * factor)
        scale = torch.where(scale.abs() < TINY, TINY, scale)
        q = (w * scale.reciprocal()).round_().clamp_(-offset, offset - 1)
        if bits < 8:
            squares = (q.square() * error_weights).sum(dim=2, keepdim=True)
            fitted = _to_float16((w * q * error_weights).sum(dim=2, keepdim=True) / squares.clamp_(min=TINY))
            scale = torch.where(fitted.abs() < TINY, scale, fitted)
            q = (w * scale.reciprocal()).round_().clamp_(-offset, offset - 1)
        candidates.append(((q * scale).sub_(w).square_().mul_(error_weights).sum(dim=2, keepdim=True), q, scale))
    q, scale = _best(candidates)
    return q.add_(offset).to(torch.uint8), scale, None


def _zero(w: torch.Tensor, error_weights: torch.Tensor, bits: int) -> Rounded:
    """Round to w = scale * (q - zero), with a range that contains zero."""
    most = 2**bits - 1
    low, high = w.amin(dim=2, keepdim=True).clamp_(max=0), w.amax(dim=2, keepdim=True).clamp_(min=0)
    scale = _to_float16(((high - low) / most).clamp_(min=TINY))
    zero = (-low / scale).round_().clamp_(0, most)
    q = (w * scale.reciprocal()).round_().add_(zero).clamp_(0, most)
    return q.to(torch.uint8), scale, zero


def _mxfp4(w: torch.Tensor, error_weights: torch.Tensor, bits: int) -> Rounded:
    """Round to the nearest of MXFP4's values, with the scale of the specification (OCP MX 1.0, 6.3): the largest number
    gets the largest exponent. The scale is its stored byte."""
    peak = w.abs().amax(dim=2, keepdim=True).clamp_(min=TINY)
    exponent = peak.log2().floor_().sub_(LARGEST_MXFP4_EXPONENT)
    magnitudes = (w * torch.exp2(-exponent)).abs_()
    values = torch.tensor(MXFP4_VALUES[:8], device=w.device)
    q = torch.bucketize(magnitudes, (values[1:] + values[:-1]) / 2)
    return (q + 8 * w.signbit()).to(torch.uint8), exponent.add_(127), None


def _fp8(w: torch.Tensor, error_weights: torch.Tensor, bits: int) -> Rounded:
    """Round to the nearest of E4M3's values, with the scale that makes the largest number E4M3's largest one."""
    scale = (w.abs().amax(dim=2, keepdim=True) / LARGEST_FP8).clamp_(min=TINIEST_FP32_SCALE)
    q = (w / scale).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return q.view(torch.uint8), scale, None


def _nf4(w: torch.Tensor, error_weights: torch.Tensor, bits: int) -> Rounded:
    return _tabled(w, TABLES["nf4"])


def _fp4(w: torch.Tensor, error_weights: torch.Tensor, bits: int) -> Rounded:
    return _tabled(w, TABLES["fp4"])


def _tabled(w: torch.Tensor, table: tuple[float, ...]) -> Rounded:
    """Round to the nearest of a table's values, times the largest number of the group, as bitsandbytes does."""
    scale = w.abs().amax(dim=2, keepdim=True).clamp_(min=TINIEST_FP32_SCALE)
    values, places = torch.tensor(table, device=w.device).sort()
    q = torch.bucketize(w / scale, (values[1:] + values[:-1]) / 2)
    return places[q].to(torch.uint8), scale, None


def _signed(w: torch.Tensor, error_weights: torch.Tensor, bits: int) -> Rounded:
    """Round to w = scale * (q - 2^(bits - 1)), with the scale that makes the largest number 2^(bits - 1) - 1."""
    offset = 2 ** (bits - 1)
    scale = (w.abs().amax(dim=2, keepdim=True) / (offset - 1)).clamp_(min=TINIEST_FP32_SCALE)
    return (w / scale).round_().add_(offset).to(torch.uint8), scale, None


def _nested(w: torch.Tensor, error_weights: torch.Tensor, bits: int) -> Rounded:
    """Fit each UNIT of columns as `_minimum` does, with minima of at most 0.

    Then store the UNITs' scales and minima as 6-bit multiples of two float16 numbers per group.
    """
    most, units = 2**bits - 1, w.unflatten(2, (-1, UNIT))
    unit_weights = error_weights.unflatten(1, (-1, UNIT)).flatten(0, 1)
    unit_weights = unit_weights / unit_weights.sum(dim=1, keepdim=True)
    _, scale, minimum = _minimum(units.flatten(1, 2), unit_weights, bits)
    assert minimum is not None
    scale, minimum = scale.view(*units.shape[:3]), minimum.view(*units.shape[:3])
    scale = torch.where(minimum > 0, units.amax(dim=3) / most, scale)
    parts = torch.stack((scale, -minimum.clamp(max=0)), dim=2)
    outer_scales = _to_float16((parts.amax(dim=3, keepdim=True) / MAX_6BIT).clamp_(min=TINY))
    sixes = (parts / outer_scales).round_().clamp_(0, MAX_6BIT)
    scale, negated_minimum = (sixes * outer_scales).unsqueeze(4).unbind(2)
    q = ((units + negated_minimum) / scale.clamp(min=TINY)).round_().clamp_(0, most)
    packed = pack_sixes(*sixes.to(torch.uint8).unbind(2))
    return q.flatten(2).to(torch.uint8), outer_scales[..., 0], packed


# By `Scheme.lowest`, functions (w [rows, groups, group], error_weights [groups, group], bits) that round groups.
ROUND: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Rounded]] = {
    "minimum": _minimum,
    "middle": _middle,
    "zero": _zero,
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "nf4": _nf4,
    "fp4": _fp4,
    "signed": _signed,
    "nested": _nested,
}


def _to_float16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to the float16 that is stored."""
    return x.half().float()


def _best(candidates: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Pick, group by group, the candidate (error, ...) with the smallest error; return it without its error."""
    error, *best = candidates[0]
    for other, *parts in candidates[1:]:
        better = other < error
        error = torch.where(better, other, error)
        best = [torch.where(better, new, old) for new, old in zip(parts, best, strict=True)]
    return best
