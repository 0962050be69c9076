"""Quantised weights from a checkpoint: a GGUF file's blocks as they are, everything else rounded while it is read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.planner.place import Span
from weft.quant.quantised import Quantised, pack
from weft.quant.rounding import rounded

CHUNK = 1 << 17  # elements rounded at once: what is made on the way stays in a core's cache

Read = Callable[[Span, Span, torch.Tensor], None]  # rows and columns, to be copied into a tensor


def split(blocks: torch.Tensor, into: Quantised) -> None:
    """Blocks [rows, groups, bytes] uint8 of a GGUF file, of the type of `into`, to its parts."""
    head = 2 if into.lowest is None else 4
    into.scales.copy_(_halves(blocks[..., :2]))
    if into.lowest is not None:
        into.lowest.copy_(_halves(blocks[..., 2:4]))
    values = blocks[..., head:]
    into.values.view(values.shape).copy_(values)
    if into.scheme.bits == 8:
        into.values.bitwise_xor_(128)  # from -128 .. 127 to 0 .. 255


def quantise(read: Read, rows: Span, cols: Span, width: int, head_dim: int, into: Quantised) -> None:
    """Round rows and columns of a matrix `width` columns wide, whose rows may be heads of `head_dim`. Groups that are
    cut are read whole: every rank that has some of one finds the same scale."""
    group = into.scheme.group
    whole = Span(cols.start - into.lacking, min(-(-cols.stop // group) * group, width))
    step = max(1, CHUNK // len(whole) // head_dim) * head_dim  # whole heads, which may be interleaved
    for row in range(rows.start, rows.stop, step):
        some = Span(row, min(row + step, rows.stop))
        weight = torch.empty(len(some), len(whole), dtype=torch.float32, device=into.device)
        read(some, whole, weight)
        part = into.narrow(0, row - rows.start, len(some))
        q, scale, lowest = rounded(weight, into.scheme)
        numbers = q.flatten(1)[:, into.lacking : into.lacking + len(cols)]
        part.values.copy_(pack(numbers) if into.scheme.bits == 4 else numbers)
        part.scales.copy_(scale[..., 0])
        if part.lowest is not None and lowest is not None:
            part.lowest.copy_(lowest[..., 0])


def _halves(two: torch.Tensor) -> torch.Tensor:
    """[..., 2] bytes to [...] float16."""
    return two.contiguous().view(torch.float16)[..., 0]
