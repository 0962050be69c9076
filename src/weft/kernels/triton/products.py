"""Products with quantised weights W, which are dequantised in registers.

A program multiplies some rows of W with some rows of x. If that makes fewer programs than the device can run at once,
columns are split among programs as well; the last program to finish adds all parts, always in the same order. For many
rows of x, W is dequantised once, some rows at a time, for the library's own product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from weft.formats.schemes import UNIT, Scheme
from weft.kernels.warm import KernelLaunch, first_of_variants
from weft.quant.quantised import QuantisedWeight

# Rows of x per program (16 is the least of tensor cores): rows of W, units of UNIT columns at once, and warps. Chosen
# by the compiled code: with 16 rows 5 instructions per number of W, and registers for 20 warps on a multiprocessor. Not
# yet measured.
TILES = {16: (64, 2, 2), 32: (64, 4, 4), 64: (64, 4, 4), 128: (128, 2, 8)}
MOST = {2: 128, 4: 32}  # rows of x per program at most, by bytes of a number: with more, tiles exceed 99 KiB
WARPS = 16  # wanted on a multiprocessor, to hide each other's latency
PART_UNITS = 8  # of a program's columns at least: with fewer it ends before its loads overlap
SUMS_SHARE = 0.5  # of W's bytes: the most that writing and reading sums of parts may move, unless processors are idle
# Rows of x from which W is dequantised to memory instead. That moves 4.5 more bytes per number of W (4 bits read, 16
# written and read again), which takes 4.5 / B seconds at a bandwidth B. A product in which each program dequantises
# reaches perhaps two fifths of the tensor cores' F, the library's product four fifths: the former takes 2.5 / F seconds
# longer per number and row of x. The two are equal at 1.8 F / B rows: 280 on an A100 (312 TFLOPS, 2.0 TB/s), 370 on an
# H200 (990, 4.8), 300 on an RTX 4090 (165, 1.0). Not yet measured.
MANY = 257
SCRATCH_BYTES = 64 << 20  # of W that is dequantised at once
AT_ONCE = tl.constexpr(4)  # parts that the program that adds them loads at once
TABLE_ROWS, TABLE_UNITS = 4, 16  # of W that one program dequantises to memory


@triton.jit
def _number(words, scale, offset, at: tl.constexpr, mask, BITS: tl.constexpr, KIND: tl.constexpr):
    """Number q at index `at` of each word, as scale * (q + 16 or, with 8 bits, 256) + offset: the bits of q become the
    upper ones of a mantissa, which takes fewer instructions than a conversion."""
    low: tl.constexpr = at * BITS
    high: tl.constexpr = 23 - BITS
    if low < high:
        moved = words << (high - low)
    else:
        moved = words >> (low - high)
    one: tl.constexpr = 0x41800000 if BITS == 4 else 0x43800000
    return (((moved & mask) | one).to(tl.float32, bitcast=True) * scale + offset).to(KIND)


@triton.jit
def _weights(
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
    scale = tl.load(scales + at, inside, other=0.0).to(tl.float32)
    added: tl.constexpr = 16 if BITS == 4 else 256
    if LOWEST == "middle":
        offset = scale * (-added - 2 ** (BITS - 1))
    elif LOWEST == "zero":
        # Two per load: Triton lays tiles out for their narrowest numbers, and those of 8 bits spoil the layout of x.
        both = tl.load(lowest + at // 2, inside, other=0).to(tl.int32)
        offset = scale * (-added - (both >> (at % 2 * 8) & 255).to(tl.float32))
    else:
        offset = tl.load(lowest + at, inside, other=0.0).to(tl.float32) - scale * added
    scale = tl.broadcast_to(scale[:, :, None], [ROWS, UNITS * EACH, BITS // EACH])
    offset = tl.broadcast_to(offset[:, :, None], [ROWS, UNITS * EACH, BITS // EACH])
    scale, offset = tl.reshape(scale, [ROWS, UNITS * BITS]), tl.reshape(offset, [ROWS, UNITS * BITS])
    # units >> 31 is 0, which the compiler does not know. An instruction has room for one of the two constants; the mask
    # therefore stays in a register, while a constant that the compiler knows would be loaded again each time.
    mask = (0x00780000 if BITS == 4 else 0x007F8000) | (units >> 31)
    n0 = _number(packed, scale, offset, 0, mask, BITS, KIND)
    n1 = _number(packed, scale, offset, 1, mask, BITS, KIND)
    n2 = _number(packed, scale, offset, 2, mask, BITS, KIND)
    n3 = _number(packed, scale, offset, 3, mask, BITS, KIND)
    if BITS == 8:
        weight = tl.join(tl.join(n0, n2), tl.join(n1, n3))
    else:
        n4 = _number(packed, scale, offset, 4, mask, BITS, KIND)
        n5 = _number(packed, scale, offset, 5, mask, BITS, KIND)
        n6 = _number(packed, scale, offset, 6, mask, BITS, KIND)
        n7 = _number(packed, scale, offset, 7, mask, BITS, KIND)
        weight = tl.join(tl.join(tl.join(n0, n4), tl.join(n2, n6)), tl.join(tl.join(n1, n5), tl.join(n3, n7)))
    return tl.reshape(weight, [ROWS, UNITS * 32])


@triton.jit(do_not_specialize=["tokens", "lacking", "share"])
def _multiply(
    x, words, scales, lowest, bias, out, sums, through, tokens, rows, units, groups, lacking, share,
    BITS: tl.constexpr, GROUP: tl.constexpr, LOWEST: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row, part, parts = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(2), tl.num_programs(2)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    mine, exists = row < rows, token < tokens
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    stop = tl.minimum(units, (part + 1) * share)
    for first in range(part * share, stop, UNITS):
        column = first * 32 + tl.arange(0, UNITS * 32)
        value = tl.load(
            x + token.to(tl.int64)[None, :] * (units * 32) + column[:, None],
            exists[None, :] & (column < stop * 32)[:, None],
            other=0.0,
        )
        weight = _weights(
            words, scales, lowest, row.to(tl.int64), mine, first, stop, units, groups, lacking, BITS, GROUP, LOWEST,
            ROWS, UNITS, x.dtype.element_ty,
        )  # fmt: skip
        total = tl.dot(weight, value, total, input_precision="ieee")
    place, inside = token.to(tl.int64)[None, :] * rows + row[:, None], mine[:, None] & exists[None, :]
    last = True
    if SPLIT:
        count = tokens.to(tl.int64) * rows
        tl.store(sums + part * count + place, total, inside)
        # All threads have written before one of them counts this part as finished.
        tl.debug_barrier()
        counter = through + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        last = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
        if last:
            tl.store(counter, 0)  # for the next product
            total = tl.zeros([ROWS, TOKENS], tl.float32)
            for each in tl.range(0, parts, loop_unroll_factor=AT_ONCE):
                # Not from the L1 cache, which does not see stores of other multiprocessors.
                total += tl.load(sums + each * count + place, inside, other=0.0, cache_modifier=".cg")
    if last:
        if BIAS:
            total += tl.load(bias + row, mine, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count", "begin", "lacking"])
def _dequantise(
    words, scales, lowest, numbers, out, count, begin, units, groups, lacking, BITS: tl.constexpr, GROUP: tl.constexpr,
    LOWEST: tl.constexpr, PICK: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    place, first = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * UNITS
    mine, column = place < count, first * 32 + tl.arange(0, UNITS * 32)
    row = (begin + place).to(tl.int64)
    if PICK:
        row = tl.load(numbers + place, mine, other=0)
    weight = _weights(
        words, scales, lowest, row, mine, first, units, units, groups, lacking, BITS, GROUP, LOWEST, ROWS, UNITS,
        out.dtype.element_ty,
    )  # fmt: skip
    target = place.to(tl.int64)[:, None] * (units * 32) + column[None, :]
    tl.store(out + target, weight, mine[:, None] & (column < units * 32)[None, :])


@dataclass(frozen=True, kw_only=True)
class QuantisedMatrix:
    """A quantised weight W on a GPU: x [T, cols] -> x W^T + bias [T, rows], and W's rows, for an embedding.

    `words` [rows, cols * bits / 32] int32 are W's numbers; those of 4 bits are in the order of their columns
    (`nibbles_in_order`), as x has them. `scales` and `lowest` are those of `QuantisedWeight`, except that two zero
    points are one int16. `lowest` is unused (any tensor) for symmetric schemes. The first group lacks `lacking` units.
    `through` are int32 zeros, one for each tile that a product can have: the number of programs that have finished
    their part of the tile.
    """

    words: torch.Tensor
    scales: torch.Tensor
    lowest: torch.Tensor
    scheme: Scheme
    lacking: int
    dtype: torch.dtype
    bias: torch.Tensor | None
    through: torch.Tensor
    processors: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply_packed(x) if x.shape[0] < MANY else self._multiply_dequantised(x)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows of W: [N] int64 -> [N, cols]."""
        out = torch.empty(len(numbers), self.shape[1], dtype=self.dtype, device=numbers.device)
        self._dequantise_rows(out, 0, numbers)
        return out

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols) of W."""
        return self.words.shape[0], self.words.shape[1] * 32 // self.scheme.bits

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold W."""
        return self.words, self.scales, self.lowest

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        """Take the values of another weight, of the same dims and scheme."""
        assert isinstance(weight, QuantisedWeight), self.scheme
        packed = create_quantised_matrix(weight, self.bias, self.processors)
        for held, values in zip(self.tensors, packed.tensors, strict=True):
            held.copy_(values)

    @property
    def nbytes(self) -> int:
        """Bytes of W."""
        middle = self.scheme.lowest == "middle"
        return self.words.nbytes + self.scales.nbytes + (0 if middle else self.lowest.nbytes)

    def _multiply_packed(self, x: torch.Tensor) -> torch.Tensor:
        (rows, cols), tokens = self.shape, x.shape[0]
        out, units = x.new_empty(tokens, rows), cols // UNIT
        taken, share = self._cut(tokens)
        taken_rows, taken_units, warps = TILES[taken]
        grid, parts = (triton.cdiv(rows, taken_rows), triton.cdiv(tokens, taken)), triton.cdiv(units, share)
        sums = out if parts == 1 else x.new_empty((parts, tokens, rows), dtype=torch.float32)
        _multiply[(*grid, parts)](
            x,
            self.words,
            self.scales,
            self.lowest,
            out if self.bias is None else self.bias,
            out,
            sums,
            self.through,
            tokens,
            rows,
            units,
            self.scales.shape[1],
            self.lacking,
            share,
            **self._constants,
            BIAS=self.bias is not None,
            SPLIT=parts > 1,
            ROWS=taken_rows,
            UNITS=taken_units,
            TOKENS=taken,
            num_warps=warps,
        )
        return out

    def launches(self, most: int) -> list[KernelLaunch]:
        """Calls that launch each variant of the kernel that multiplies up to `most` rows of x."""
        cols, units = self.shape[1], self.shape[1] // UNIT

        def variant(tokens: int) -> tuple[int, bool]:
            taken, share = self._cut(tokens)
            return taken, share < units

        zeros = partial(torch.zeros, dtype=self.dtype, device=self.words.device)
        return [partial(self, zeros(tokens, cols)) for tokens in first_of_variants(variant, min(most, MANY - 1))]

    def _cut(self, tokens: int) -> tuple[int, int]:
        """Number of rows of x, and of units of columns, that one program multiplies."""
        rows, units = self.shape[0], self.shape[1] // UNIT
        taken = min(MOST[self.dtype.itemsize], max(min(TILES), triton.next_power_of_2(tokens)))
        taken_rows, taken_units, warps = TILES[taken]
        parts = self._parts(tokens, triton.cdiv(rows, taken_rows) * triton.cdiv(tokens, taken), warps)
        return taken, max(PART_UNITS, triton.cdiv(units, parts * taken_units) * taken_units)

    def _parts(self, tokens: int, tiles: int, warps: int) -> int:
        """Number of parts to split the columns into, if unsplit columns make `tiles` programs of `warps` warps."""
        wanted = triton.cdiv(WARPS * self.processors, tiles * warps)
        cheap = int(SUMS_SHARE * self.nbytes) // (2 * 4 * tokens * self.shape[0])
        return min(wanted, max(cheap, triton.cdiv(self.processors, tiles)))

    def _multiply_dequantised(self, x: torch.Tensor) -> torch.Tensor:
        rows, cols = self.shape
        pieces = triton.cdiv(rows * cols * x.element_size(), SCRATCH_BYTES)
        step = triton.cdiv(rows, pieces)
        scratch = x.new_empty(step, cols)
        if pieces == 1:
            self._dequantise_rows(scratch, 0)
            return F.linear(x, scratch, self.bias)
        out = x.new_empty(x.shape[0], rows)
        for first in range(0, rows, step):
            band = slice(first, min(first + step, rows))
            piece = scratch[: band.stop - first]
            self._dequantise_rows(piece, first)
            out[:, band] = F.linear(x, piece, None if self.bias is None else self.bias[band])
        return out

    def _dequantise_rows(self, out: torch.Tensor, begin: int, numbers: torch.Tensor | None = None) -> None:
        """Write rows of W into `out` [N, cols]: rows `numbers`, or those from `begin` on."""
        count, units = len(out), out.shape[1] // UNIT
        _dequantise[(triton.cdiv(count, TABLE_ROWS), triton.cdiv(units, TABLE_UNITS))](
            self.words,
            self.scales,
            self.lowest,
            out if numbers is None else numbers,
            out,
            count,
            begin,
            units,
            self.scales.shape[1],
            self.lacking,
            **self._constants,
            PICK=numbers is not None,
            ROWS=TABLE_ROWS,
            UNITS=TABLE_UNITS,
        )

    @property
    def _constants(self) -> dict[str, int | str]:
        return {"BITS": self.scheme.bits, "GROUP": self.scheme.group, "LOWEST": self.scheme.lowest}


def create_quantised_matrix(weight: QuantisedWeight, bias: torch.Tensor | None, processors: int) -> QuantisedMatrix:
    """Prepare a quantised weight [rows, cols] for the kernels; numbers of 4 bits and zero points are copied once."""
    lowest = weight.scales if weight.lowest is None else weight.lowest
    if lowest.dtype == torch.uint8:
        flat = lowest.flatten()
        lowest = F.pad(flat, (0, len(flat) % 2)).view(torch.int16)
    values = nibbles_in_order(weight.values) if weight.scheme.bits == 4 else weight.values
    tiles = triton.cdiv(len(values), min(rows for rows, _, _ in TILES.values()))
    tiles *= triton.cdiv(MANY, MOST[weight.dtype.itemsize])
    return QuantisedMatrix(
        words=values.view(torch.int32),
        scales=weight.scales,
        lowest=lowest,
        scheme=weight.scheme,
        lacking=weight.lacking // UNIT,
        dtype=weight.dtype,
        bias=bias,
        through=torch.zeros(tiles, dtype=torch.int32, device=values.device),
        processors=processors,
    )


def nibbles_in_order(nibbles: torch.Tensor) -> torch.Tensor:
    """Reorder nibbles of `QuantisedWeight` so that byte i has columns 2i (low) and 2i + 1 (high): [rows, cols / 2]."""
    even, odd = nibbles.unflatten(1, (-1, UNIT // 4, 2)).unbind(3)
    return torch.cat((even & 15 | odd << 4, even >> 4 | odd & 240), dim=2).flatten(1)
