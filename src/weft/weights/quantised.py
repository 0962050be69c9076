"""Quantised weights from a checkpoint: a GGUF file's blocks as the numbers that they are, everything else rounded while
it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from weft.architectures.place import Span
from weft.errors import ModelError
from weft.formats.schemes import STORED
from weft.quant.quantised import QuantisedWeight, pack_nibbles
from weft.quant.rounding import Rounding, round_into
from weft.weights.blocks import numbers, zero_of

# Elements that are read before they are rounded: on a CPU as many as a core's cache has room for, on a GPU as few times
# as there is memory for in each thread that reads.
BAND, GPU_BAND = 1 << 19, 1 << 24

Read = Callable[[Span, Span, torch.Tensor], None]  # rows and columns, to be copied into a tensor


def unpack(data: torch.Tensor, type: str, first: int, into: QuantisedWeight) -> None:
    """Rows [rows, bytes] uint8, each whole blocks of a GGUF type that the scheme of `into` holds: their columns from
    `first` on to its parts. Scales and minima that the blocks have as products of two numbers are rounded to float16:
    by 1 / 4096 of them at most, or 3e-8 below 6e-5. Raises ModelError for one that is beyond float16."""
    q, scale, lowest = numbers(data, type)
    q = q.view(len(data), -1)[:, first : first + into.shape[1]]
    into.scales.copy_(_spread(scale, type, first, into))
    if into.lowest is None:
        q = q + (1 << into.scheme.bits - 1) - zero_of(type)
    elif lowest is None:
        into.lowest.copy_(into.scales.float() * -zero_of(type))
    else:
        into.lowest.copy_(_spread(lowest, type, first, into))
    if not all(part.isfinite().all() for part in (into.scales, into.lowest) if part is not None):
        raise ModelError(f"a scale of {type} blocks is beyond the 65,504 that 16 bits hold; give --quantization none")
    into.values.copy_(pack_nibbles(q) if into.scheme.bits == 4 else q)


def _spread(part: torch.Tensor, type: str, first: int, into: QuantisedWeight) -> torch.Tensor:
    """[blocks, groups of a block, 1] to [rows, groups of `into`], which may be finer, from column `first` on."""
    rows, groups = into.scales.shape
    each = part.view(rows, -1).repeat_interleave(STORED[type].group // into.scheme.group, dim=1)
    return each[:, first // into.scheme.group :][:, :groups]


def split(blocks: torch.Tensor, into: QuantisedWeight) -> None:
    """What `unpack` does, of blocks [rows, groups, bytes] uint8 whose type is the scheme of `into`: nothing has to be
    computed, which takes a twentieth of the time."""
    head = 2 if into.lowest is None else 4
    into.scales.copy_(_halves(blocks[..., :2]))
    if into.lowest is not None:
        into.lowest.copy_(_halves(blocks[..., 2:4]))
    values = blocks[..., head:]
    into.values.view(values.shape).copy_(values)
    if into.scheme.bits == 8:
        into.values.bitwise_xor_(128)  # from -128 .. 127 to 0 .. 255


def quantise(
    read: Read,
    rows: Span,
    cols: Span,
    width: int,
    head_dim: int,
    into: QuantisedWeight,
    dtype: torch.dtype = torch.float32,
    rounding: Rounding = round_into,
    importance: torch.Tensor | None = None,
) -> None:
    """Round rows and columns of a matrix `width` columns wide, which is read in `dtype` and whose rows may be heads of
    `head_dim`. Groups that are cut are read whole: every rank that has some of one finds the same scale. The importance
    of columns is for schemes whose groups are never cut."""
    group = into.scheme.group
    whole = Span(cols.start - into.lacking, min(-(-cols.stop // group) * group, width))
    assert importance is None or len(importance) == len(whole)
    for some in bands(rows, len(whole), head_dim, into.device):
        weight = torch.empty(len(some), len(whole), dtype=dtype, device=into.device)
        read(some, whole, weight)
        rounding(weight, into.narrow(0, some.start - rows.start, len(some)), importance)


def bands(rows: Span, width: int, head_dim: int, device: torch.device) -> Iterator[Span]:
    """Rows of `width` elements, as many at once as are read and rounded together on the device: whole heads, which may
    be interleaved."""
    band = BAND if device.type == "cpu" else GPU_BAND
    step = max(1, band // width // head_dim) * head_dim
    for row in range(rows.start, rows.stop, step):
        yield Span(row, min(row + step, rows.stop))


def _halves(two: torch.Tensor) -> torch.Tensor:
    """[..., 2] bytes to [...] float16."""
    return two.contiguous().view(torch.float16)[..., 0]
