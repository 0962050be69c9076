"""Weights as the kernels of products read them: quantised ones are dequantised in registers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from weft.checkpoint.quantised.schemes import TABLES, UNIT, Scheme
from weft.ranks.quant.quantised import QuantisedWeight


@triton.jit
def _number(words, scale, offset, at: tl.constexpr, mask, BITS: tl.constexpr, KIND: tl.constexpr):
    """Number q at index `at` of each word, as scale * (q + 16 or, with 8 bits, 256) + offset. The bits of q become the
    upper bits of a mantissa, which takes fewer instructions than a conversion."""
    one: tl.constexpr = 0x41800000 if BITS == 4 else 0x43800000
    moved = _moved(words, at * BITS, 23 - BITS)
    return (((moved & mask) | one).to(tl.float32, bitcast=True) * scale + offset).to(KIND)


@triton.jit
def _mxfp4_numbers(words, scale, at: tl.constexpr, KIND: tl.constexpr):
    """Numbers at the indices `at` and `at` + 4 of each word of MXFP4, times scale * 2^-14.

    Both become float16 at once, 2^14 times too small: some are subnormal, which are exact in float16, while a flag of
    the compiler could flush subnormal float32 numbers.
    """
    magnitudes = _moved(words, at * 4, 9) & 0x0E000E00
    both = magnitudes | _moved(words, at * 4, 12) & -0x7FFF8000
    first, second = both.to(tl.int16), (both >> 16).to(tl.int16)
    first = first.to(tl.float16, bitcast=True).to(tl.float32) * scale
    second = second.to(tl.float16, bitcast=True).to(tl.float32) * scale
    return first.to(KIND), second.to(KIND)


@triton.jit
def _table_numbers(words, table, scale, at: tl.constexpr, KIND: tl.constexpr):
    """Numbers at index `at` of each word, which are places of a table of 16 values, times scale. The table is one line
    of the L1 cache, and its values lie in banks of their own."""
    return (tl.load(table + (words >> (at * 4) & 15)) * scale).to(KIND)


@triton.jit
def _fp8_numbers(words, scale, at: tl.constexpr, KIND: tl.constexpr):
    """Numbers of FP8 at the indices `at` (0 or 1) and `at` + 2 of each word, times scale * 2^-8.

    Both become float16 at once, 2^8 times too small, for the reason that MXFP4's do.
    """
    moved = _moved(words, 7 + 8 * at, 14)
    both = (moved & 0x3F803F80) | (_moved(words, 7 + 8 * at, 15) & -0x7FFF8000)
    first, second = both.to(tl.int16), (both >> 16).to(tl.int16)
    first = first.to(tl.float16, bitcast=True).to(tl.float32) * scale
    second = second.to(tl.float16, bitcast=True).to(tl.float32) * scale
    return first.to(KIND), second.to(KIND)


@triton.jit
def _moved(words, low: tl.constexpr, high: tl.constexpr):
    """Words with bit `low` moved to bit `high`."""
    if low < high:
        moved = words << (high - low)
    else:
        moved = words >> (low - high)
    return moved


@triton.jit
def _byte(pairs, at, inside):
    """Bytes at the indices `at`, of which an int16 holds two: Triton lays tiles out for their narrowest numbers, and
    8-bit numbers spoil the layout of x."""
    both = tl.load(pairs + at // 2, inside, other=0).to(tl.int32)
    return both >> (at % 2 * 8).to(tl.int32) & 255


@triton.jit
def _nested_numbers(scales, lowest, at, unit, inside):
    """Scales and minima of units of a nested scheme, float32 both. `at` are the indices of their groups, whose 12 bytes
    `pack_sixes` lays out."""
    place = (unit % 8)[None, :]
    byte = at * 12 + place % 4
    low, mid, high = _byte(lowest, byte, inside), _byte(lowest, byte + 4, inside), _byte(lowest, byte + 8, inside)
    scale = tl.where(place < 4, low & 63, (high & 15) | (low >> 6 << 4)).to(tl.float32)
    minimum = tl.where(place < 4, mid & 63, (high >> 4) | (mid >> 6 << 4)).to(tl.float32)
    scale *= tl.load(scales + at * 2, inside, other=0.0).to(tl.float32)
    return scale, -minimum * tl.load(scales + at * 2 + 1, inside, other=0.0).to(tl.float32)


@triton.jit
def _scales_and_offsets(
    scales, lowest, at, inside, unit, BITS: tl.constexpr, LOWEST: tl.constexpr
):  # fmt: skip
    """Scales and offsets of parts of units, float32 both, for the functions that make numbers of words. `at` are the
    indices of their groups, `unit` the indices of the units among all units of a row."""
    added: tl.constexpr = 16 if BITS == 4 else 256
    if LOWEST == "mxfp4":
        # 2^(byte - 127 + 14).
        scale = ((_byte(scales, at, inside) + 14) << 23).to(tl.float32, bitcast=True)
        offset = scale
    elif LOWEST == "fp8" or LOWEST == "nf4" or LOWEST == "fp4":
        scale = tl.load(scales + at, inside, other=0.0) * (256 if LOWEST == "fp8" else 1)
        offset = scale
    elif LOWEST == "nested":
        scale, offset = _nested_numbers(scales, lowest, at, unit, inside)
        offset -= scale * added
    else:
        scale = tl.load(scales + at, inside, other=0.0).to(tl.float32)
        if LOWEST == "middle" or LOWEST == "signed":
            offset = scale * (-added - 2 ** (BITS - 1))
        elif LOWEST == "zero":
            offset = scale * (-added - _byte(lowest, at, inside).to(tl.float32))
        else:
            offset = tl.load(lowest + at, inside, other=0.0).to(tl.float32) - scale * added
    return scale, offset


@triton.jit
def _numbers_of_bytes(packed, scale, offset, mask, LOWEST: tl.constexpr, KIND: tl.constexpr):
    """The four numbers of each word of 8-bit ones, in their order along a new last dimension of two by two."""
    if LOWEST == "fp8":
        n0, n2 = _fp8_numbers(packed, scale, 0, KIND)
        n1, n3 = _fp8_numbers(packed, scale, 1, KIND)
    else:
        n0 = _number(packed, scale, offset, 0, mask, 8, KIND)
        n1 = _number(packed, scale, offset, 1, mask, 8, KIND)
        n2 = _number(packed, scale, offset, 2, mask, 8, KIND)
        n3 = _number(packed, scale, offset, 3, mask, 8, KIND)
    return tl.join(tl.join(n0, n2), tl.join(n1, n3))


@triton.jit
def _numbers_of_nibbles(packed, lowest, scale, offset, mask, LOWEST: tl.constexpr, KIND: tl.constexpr):
    """The eight numbers of each word of 4-bit ones, in their order along new last dimensions."""
    if LOWEST == "mxfp4":
        n0, n4 = _mxfp4_numbers(packed, scale, 0, KIND)
        n1, n5 = _mxfp4_numbers(packed, scale, 1, KIND)
        n2, n6 = _mxfp4_numbers(packed, scale, 2, KIND)
        n3, n7 = _mxfp4_numbers(packed, scale, 3, KIND)
    elif LOWEST == "nf4" or LOWEST == "fp4":
        n0 = _table_numbers(packed, lowest, scale, 0, KIND)
        n1 = _table_numbers(packed, lowest, scale, 1, KIND)
        n2 = _table_numbers(packed, lowest, scale, 2, KIND)
        n3 = _table_numbers(packed, lowest, scale, 3, KIND)
        n4 = _table_numbers(packed, lowest, scale, 4, KIND)
        n5 = _table_numbers(packed, lowest, scale, 5, KIND)
        n6 = _table_numbers(packed, lowest, scale, 6, KIND)
        n7 = _table_numbers(packed, lowest, scale, 7, KIND)
    else:
        n0 = _number(packed, scale, offset, 0, mask, 4, KIND)
        n1 = _number(packed, scale, offset, 1, mask, 4, KIND)
        n2 = _number(packed, scale, offset, 2, mask, 4, KIND)
        n3 = _number(packed, scale, offset, 3, mask, 4, KIND)
        n4 = _number(packed, scale, offset, 4, mask, 4, KIND)
        n5 = _number(packed, scale, offset, 5, mask, 4, KIND)
        n6 = _number(packed, scale, offset, 6, mask, 4, KIND)
        n7 = _number(packed, scale, offset, 7, mask, 4, KIND)
    return tl.join(tl.join(tl.join(n0, n4), tl.join(n2, n6)), tl.join(tl.join(n1, n5), tl.join(n3, n7)))


@triton.jit
def load_weights(
    words, scales, lowest, row, mine, first, stop, units, groups, lacking, BITS: tl.constexpr, GROUP: tl.constexpr,
    LOWEST: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Weights [ROWS, UNITS * 32] in KIND: the rows `row` if `mine`, UNITS units from `first` on, zeros from `stop`
    on."""
    # Parts of a unit that have a scale: halves if these are groups, else whole units.
    EACH: tl.constexpr = 2 if GROUP < 32 else 1
    word, part = first * BITS + tl.arange(0, UNITS * BITS), first * EACH + tl.arange(0, UNITS * EACH)
    packed = tl.load(
        words + row[:, None] * (units * BITS) + word[None, :], mine[:, None] & (word < stop * BITS)[None, :], other=0
    )
    at = row[:, None] * groups + ((part + lacking) // (GROUP * EACH // 32))[None, :]
    inside = mine[:, None] & (part < stop * EACH)[None, :]
    scale, offset = _scales_and_offsets(scales, lowest, at, inside, part + lacking, BITS, LOWEST)
    scale = tl.broadcast_to(scale[:, :, None], [ROWS, UNITS * EACH, BITS // EACH])
    offset = tl.broadcast_to(offset[:, :, None], [ROWS, UNITS * EACH, BITS // EACH])
    scale, offset = tl.reshape(scale, [ROWS, UNITS * BITS]), tl.reshape(offset, [ROWS, UNITS * BITS])
    # units >> 31 is 0, which the compiler does not know. An instruction has room for one of the two constants; the mask
    # therefore stays in a register, while a constant that the compiler knows would be loaded again each time.
    mask = (0x00780000 if BITS == 4 else 0x007F8000) | (units >> 31)
    if BITS == 8:
        weight = _numbers_of_bytes(packed, scale, offset, mask, LOWEST, KIND)
    else:
        weight = _numbers_of_nibbles(packed, lowest, scale, offset, mask, LOWEST, KIND)
    return tl.reshape(weight, [ROWS, UNITS * 32])


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A weight [rows, cols] on a GPU, as the kernels read it; a stack of them is one weight with the rows of all.

    `words` [rows, cols * bits / 32] int32 are a quantised weight's numbers; 4-bit numbers are in the order of their
    columns (`nibbles_in_order`), as x has them. Without a `scheme` they are the weight itself. `scales` and `lowest`
    are as in `QuantisedWeight`, except that two bytes are one int16, and `lowest` is the table [16] float32 of a scheme
    that has one. They are unused (any tensor) if the scheme has none. The first group lacks `lacking` units. `dtype` is
    the activations'.
    """

    words: torch.Tensor
    scales: torch.Tensor
    lowest: torch.Tensor
    scheme: Scheme | None
    cols: int
    lacking: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.words.shape[0]

    @property
    def units(self) -> int:
        """Number of units of columns, the last of which may be incomplete if the weight is not quantised."""
        return triton.cdiv(self.cols, UNIT)

    @property
    def groups(self) -> int:
        """Number of groups of a row."""
        return 0 if self.scheme is None else triton.cdiv(self.cols + self.lacking * UNIT, self.scheme.group)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold the weight."""
        distinct = {part.data_ptr(): part for part in (self.words, self.scales, self.lowest)}
        return tuple(distinct.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return sum(part.nbytes for part in self.tensors)

    @property
    def constants(self) -> dict[str, int | str]:
        """Constants of the kernels that read the weight."""
        if self.scheme is None:
            return {"BITS": 0, "GROUP": 0, "LOWEST": "none"}
        return {"BITS": self.scheme.bits, "GROUP": self.scheme.group, "LOWEST": self.scheme.lowest}

    @property
    def kind(self) -> Hashable:
        """Key of weights that are multiplied by the same kernels."""
        return self.scheme, self.rows, self.cols, self.dtype

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        """Take the values of another weight, of the same dims and scheme."""
        for held, values in zip(self.tensors, pack_weight(weight).tensors, strict=True):
            held.copy_(values)


def pack_weight(weight: torch.Tensor | QuantisedWeight) -> PackedWeight:
    """Prepare a weight [rows, cols] or a stack [experts, rows, cols] for the kernels; 4-bit numbers and bytes of
    groups are copied once."""
    if isinstance(weight, torch.Tensor):
        words = weight.flatten(0, -2)
        cols, dtype = words.shape[1], words.dtype
        return PackedWeight(words=words, scales=words, lowest=words, scheme=None, cols=cols, lacking=0, dtype=dtype)
    weight = flatten_stack(weight)
    scales = _pairs(weight.scales)
    return PackedWeight(
        words=(nibbles_in_order(weight.values) if weight.scheme.bits == 4 else weight.values).view(torch.int32),
        scales=scales,
        lowest=_lowest(weight, scales),
        scheme=weight.scheme,
        cols=weight.shape[1],
        lacking=weight.lacking // UNIT,
        dtype=weight.dtype,
    )


def _lowest(weight: QuantisedWeight, scales: torch.Tensor) -> torch.Tensor:
    """`PackedWeight.lowest` of a weight; `scales` if the scheme has none."""
    if weight.scheme.lowest in TABLES:
        return torch.tensor(TABLES[weight.scheme.lowest], device=weight.device)
    return scales if weight.lowest is None else _pairs(weight.lowest)


def flatten_stack(weight: QuantisedWeight) -> QuantisedWeight:
    """One matrix with the rows of all matrices of a stack, in the same memory; a matrix as it is."""
    lowest = None if weight.lowest is None else weight.lowest.flatten(0, -2)
    return replace(weight, values=weight.values.flatten(0, -2), scales=weight.scales.flatten(0, -2), lowest=lowest)


def _pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Two bytes as one int16; 16-bit numbers unchanged."""
    if numbers.dtype != torch.uint8:
        return numbers
    flat = numbers.flatten()
    return F.pad(flat, (0, len(flat) % 2)).view(torch.int16)


def nibbles_in_order(nibbles: torch.Tensor) -> torch.Tensor:
    """Reorder nibbles of `QuantisedWeight` so that byte i has columns 2i (low) and 2i + 1 (high): [rows, cols / 2]."""
    even, odd = nibbles.unflatten(1, (-1, UNIT // 4, 2)).unbind(3)
    return torch.cat((even & 15 | odd << 4, even >> 4 | odd & 240), dim=2).flatten(1)
