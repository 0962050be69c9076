"""Rounding: weights to the numbers of a scheme, with the scales that lose least."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from weft.formats.schemes import Scheme
from weft.quant.quantised import QuantisedWeight, pack_nibbles

# Rounds weight [rows, cols], of any float dtype, into a matrix of those rows. Its first column begins the first group
# of the matrix; its last one ends the last group, or the whole weight. The importance [cols] float32 of columns, above
# zero and about 1, says what the squares of their errors count; None where all count alike. 8 bits do not ask.
Rounding = Callable[[torch.Tensor, QuantisedWeight, torch.Tensor | None], None]

# (q, scale, lowest) of groups: q [rows, groups, group] uint8, the others [rows, groups, 1] float32. `lowest` is the
# minimum or the zero point, None where zero is in the middle.
Rounded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

# Elements rounded at once: on a CPU what is made on the way stays in a core's cache, on a GPU launches are few.
CHUNK, GPU_CHUNK = 1 << 17, 1 << 22
# Shares of a group's range that are tried for its 16 steps: the few numbers at its ends may be worth less than finer
# steps for all. With one alone, the error of normally distributed weights is a tenth larger.
SHARES = (1.0, 0.9, 0.8)
# The same where a group has a minimum: of what is below the middle of the range, and of what is above it.
BELOW_AND_ABOVE = ((1.0, 1.0), (1.0, 0.9), (0.9, 1.0), (0.9, 0.9))
TINY = 1e-7  # no scale is below it: half a step of the smallest float16


def round_into(weight: torch.Tensor, into: QuantisedWeight, importance: torch.Tensor | None = None) -> None:
    """A `Rounding` for every device."""
    step = max(1, (CHUNK if weight.device.type == "cpu" else GPU_CHUNK) // weight.shape[1])
    for row, some in zip(range(0, len(weight), step), weight.split(step), strict=True):
        part = into.narrow(0, row, len(some))
        q, scale, lowest = round_weight(some.float(), into.scheme, importance)
        numbers = q.flatten(1)[:, into.lacking : into.lacking + into.shape[1]]
        part.values.copy_(pack_nibbles(numbers) if into.scheme.bits == 4 else numbers)
        part.scales.copy_(scale[..., 0])
        if part.lowest is not None and lowest is not None:
            part.lowest.copy_(lowest[..., 0])


def round_weight(weight: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None) -> Rounded:
    """weight [rows, cols] float32, whose first column begins a group and whose last group may be short."""
    group = min(scheme.group, weight.shape[1])  # a row may be one
    each = column_weights(importance, weight.shape[1], group, weight.device)
    missing = -weight.shape[1] % group
    if missing:
        # Copies of the last column change neither end of the range.
        weight = F.pad(weight, (0, missing), mode="replicate")
    return ROUND[scheme.lowest](weight.unflatten(1, (-1, group)), each, scheme.bits)


def column_weights(importance: torch.Tensor | None, width: int, group: int, device: torch.device) -> torch.Tensor:
    """What the square of each column's error counts in its group: [groups, group] float32, of each group 1 in all."""
    groups = -(-width // group)
    if importance is None:
        return torch.full((groups, group), 1 / group, device=device)
    each = F.pad(importance.unsqueeze(0), (0, groups * group - width), mode="replicate").view(groups, group)
    return each / each.sum(dim=1, keepdim=True)


def _minimum(w: torch.Tensor, each: torch.Tensor, bits: int) -> Rounded:
    """w = scale * q + minimum, both fitted to q by least squares, in which each column counts as `each` says."""
    most, low, high = 2**bits - 1, *w.aminmax(dim=2, keepdim=True)
    middle, mean = (high + low) / 2, (w * each).sum(dim=2, keepdim=True)
    found: list[tuple[torch.Tensor, ...]] = []
    for below, above in BELOW_AND_ABOVE if bits < 8 else BELOW_AND_ABOVE[:1]:
        first = middle - (middle - low) * below
        scale = _half((((high - middle) * above + (middle - low) * below) / most).clamp_(min=TINY))
        q = ((w - first) * scale.reciprocal()).round_().clamp_(0, most)
        average = (q * each).sum(dim=2, keepdim=True)
        centred = q - average
        variance = (centred.square() * each).sum(dim=2, keepdim=True)
        fitted = ((w - mean) * centred * each).sum(dim=2, keepdim=True) / variance.clamp(min=TINY)
        scale = torch.where(variance > 0, _half(fitted.clamp_(min=TINY)), scale)
        minimum = _half(mean - scale * average)
        q = ((w - minimum) * scale.reciprocal()).round_().clamp_(0, most)
        off = (q * scale).add_(minimum).sub_(w).square_()
        found.append((off.mul_(each).sum(dim=2, keepdim=True), q, scale, minimum))
    q, scale, minimum = _best(found)
    return q.to(torch.uint8), scale, minimum


def _middle(w: torch.Tensor, each: torch.Tensor, bits: int) -> Rounded:
    """w = scale * (q - 2^(bits - 1)). Of 4 bits the number farthest from zero is on the side that has one step more."""
    half, (low, high) = 2 ** (bits - 1), w.aminmax(dim=2, keepdim=True)
    far = torch.where(high > -low, high, low)
    full = far / -half if bits < 8 else far.abs() / (half - 1)
    found: list[tuple[torch.Tensor, ...]] = []
    for share in SHARES if bits < 8 else (1.0,):
        scale = _half(full * share)
        scale = torch.where(scale.abs() < TINY, TINY, scale)
        q = (w * scale.reciprocal()).round_().clamp_(-half, half - 1)
        if bits < 8:
            squares = (q.square() * each).sum(dim=2, keepdim=True)
            fitted = _half((w * q * each).sum(dim=2, keepdim=True) / squares.clamp_(min=TINY))
            scale = torch.where(fitted.abs() < TINY, scale, fitted)
            q = (w * scale.reciprocal()).round_().clamp_(-half, half - 1)
        found.append(((q * scale).sub_(w).square_().mul_(each).sum(dim=2, keepdim=True), q, scale))
    q, scale = _best(found)
    return q.add_(half).to(torch.uint8), scale, None


def _zero(w: torch.Tensor, each: torch.Tensor, bits: int) -> Rounded:
    """w = scale * (q - zero), a range that holds zero."""
    most = 2**bits - 1
    low, high = w.amin(dim=2, keepdim=True).clamp_(max=0), w.amax(dim=2, keepdim=True).clamp_(min=0)
    scale = _half(((high - low) / most).clamp_(min=TINY))
    zero = (-low / scale).round_().clamp_(0, most)
    q = (w * scale.reciprocal()).round_().add_(zero).clamp_(0, most)
    return q.to(torch.uint8), scale, zero


# Of w [rows, groups, group] and what its columns count [groups, group].
ROUND: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Rounded]] = {
    "minimum": _minimum,
    "middle": _middle,
    "zero": _zero,
}


def _half(x: torch.Tensor) -> torch.Tensor:
    """As it is stored."""
    return x.half().float()


def _best(found: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Of several (error, ...) the one with the least error, group by group."""
    error, *best = found[0]
    for other, *parts in found[1:]:
        better = other < error
        error = torch.where(better, other, error)
        best = [torch.where(better, new, old) for new, old in zip(parts, best, strict=True)]
    return best
