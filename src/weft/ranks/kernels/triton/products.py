"""Products with quantised weights W, which are dequantised in registers.

A program multiplies some rows of W with some rows of x. If that makes fewer programs than the device can run at once,
columns are split among programs as well; the last program to finish adds all parts, always in the same order. For many
rows of x, W is dequantised once, some rows at a time, for the library's own product.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from weft.ranks.kernels.triton.weights import PackedWeight, load_weights, pack_weight
from weft.ranks.kernels.warm import KernelLaunch, first_of_variants
from weft.ranks.quant.quantised import QuantisedWeight

# Rows of x per program (16 is the least of tensor cores): rows of W, units of UNIT columns at once, and warps. Chosen
# by the compiled code: with 16 rows 5 instructions per number of W, and registers for 20 warps on a multiprocessor. Not
# yet measured.
TILES = {16: (64, 2, 2), 32: (64, 4, 4), 64: (64, 4, 4), 128: (128, 2, 8)}
MAX_ROWS = {2: 128, 4: 32}  # rows of x per program, by bytes of a number: with more, tiles exceed 99 KiB
WARPS = 16  # wanted on a multiprocessor, to hide each other's latency
PART_UNITS = 8  # units of a program's columns at least: with fewer it ends before its loads overlap
SUMS_SHARE = 0.5  # of W's bytes: the most that writing and reading sums of parts may move, unless processors are idle
# Rows of x from which W is dequantised to memory instead. That moves 4.5 more bytes per number of W (4 bits read, 16
# written and read again), which takes 4.5 / B seconds at a bandwidth B. A product in which each program dequantises
# reaches perhaps two fifths of the tensor cores' F, the library's product four fifths: the former takes 2.5 / F seconds
# longer per number and row of x. The two are equal at 1.8 F / B rows: 280 on an A100 (312 TFLOPS, 2.0 TB/s), 370 on an
# H200 (990, 4.8), 300 on an RTX 4090 (165, 1.0). Not yet measured.
MANY = 257
SCRATCH_BYTES = 64 << 20  # bytes of W that is dequantised at once
AT_ONCE = tl.constexpr(4)  # parts that the program that adds them loads at once
TABLE_ROWS, TABLE_UNITS = 4, 16  # of W that one program dequantises to memory


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
        weight = load_weights(
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
    weight = load_weights(
        words, scales, lowest, row, mine, first, units, units, groups, lacking, BITS, GROUP, LOWEST, ROWS, UNITS,
        out.dtype.element_ty,
    )  # fmt: skip
    target = place.to(tl.int64)[:, None] * (units * 32) + column[None, :]
    tl.store(out + target, weight, mine[:, None] & (column < units * 32)[None, :])


@dataclass(frozen=True, kw_only=True)
class QuantisedMatrix:
    """A quantised weight W on a GPU: x [T, cols] -> x W^T + bias [T, rows], and W's rows, for an embedding.

    `through` are int32 zeros, one for each tile that a product can have: the number of programs that have finished
    their part of the tile.
    """

    weight: PackedWeight
    bias: torch.Tensor | None
    through: torch.Tensor
    processors: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply_packed(x) if x.shape[0] < MANY else self._multiply_dequantised(x)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows of W: [N] int64 -> [N, cols]."""
        out = torch.empty(len(numbers), self.weight.cols, dtype=self.weight.dtype, device=numbers.device)
        self._dequantise_rows(out, 0, numbers)
        return out

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold W."""
        return self.weight.tensors

    @property
    def kind(self) -> Hashable:
        """Key of products that launch the same kernels."""
        return self.weight.kind, self.bias is None

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        """Take the values of another weight, of the same dims and scheme."""
        self.weight.replace(weight)

    def _multiply_packed(self, x: torch.Tensor) -> torch.Tensor:
        weight, tokens = self.weight, x.shape[0]
        rows, units = weight.rows, weight.units
        out = x.new_empty(tokens, rows)
        taken, share = self._cut(tokens)
        taken_rows, taken_units, warps = TILES[taken]
        grid, parts = (triton.cdiv(rows, taken_rows), triton.cdiv(tokens, taken)), triton.cdiv(units, share)
        sums = out if parts == 1 else x.new_empty((parts, tokens, rows), dtype=torch.float32)
        _multiply[(*grid, parts)](
            x,
            weight.words,
            weight.scales,
            weight.lowest,
            out if self.bias is None else self.bias,
            out,
            sums,
            self.through,
            tokens,
            rows,
            units,
            weight.groups,
            weight.lacking,
            share,
            **weight.constants,
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
        cols, units = self.weight.cols, self.weight.units

        def variant(tokens: int) -> tuple[int, bool]:
            taken, share = self._cut(tokens)
            return taken, share < units

        zeros = partial(torch.zeros, dtype=self.weight.dtype, device=self.through.device)
        return [partial(self, zeros(tokens, cols)) for tokens in first_of_variants(variant, min(most, MANY - 1))]

    def _cut(self, tokens: int) -> tuple[int, int]:
        """Number of rows of x, and of units of columns, that one program multiplies."""
        rows, units = self.weight.rows, self.weight.units
        taken = min(MAX_ROWS[self.weight.dtype.itemsize], max(min(TILES), triton.next_power_of_2(tokens)))
        taken_rows, taken_units, warps = TILES[taken]
        parts = self._parts(tokens, triton.cdiv(rows, taken_rows) * triton.cdiv(tokens, taken), warps)
        return taken, max(PART_UNITS, triton.cdiv(units, parts * taken_units) * taken_units)

    def _parts(self, tokens: int, tiles: int, warps: int) -> int:
        """Number of parts to split the columns into, if unsplit columns make `tiles` programs of `warps` warps."""
        wanted = triton.cdiv(WARPS * self.processors, tiles * warps)
        cheap = int(SUMS_SHARE * self.weight.nbytes) // (2 * 4 * tokens * self.weight.rows)
        return min(wanted, max(cheap, triton.cdiv(self.processors, tiles)))

    def _multiply_dequantised(self, x: torch.Tensor) -> torch.Tensor:
        rows, cols = self.weight.rows, self.weight.cols
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
        weight, count = self.weight, len(out)
        units = weight.units
        _dequantise[(triton.cdiv(count, TABLE_ROWS), triton.cdiv(units, TABLE_UNITS))](
            weight.words,
            weight.scales,
            weight.lowest,
            out if numbers is None else numbers,
            out,
            count,
            begin,
            units,
            weight.groups,
            weight.lacking,
            **weight.constants,
            PICK=numbers is not None,
            ROWS=TABLE_ROWS,
            UNITS=TABLE_UNITS,
        )


def create_quantised_matrix(
    weight: QuantisedWeight,
    bias: torch.Tensor | None,
    processors: int,
    product: type[QuantisedMatrix] = QuantisedMatrix,
) -> QuantisedMatrix:
    """Prepare a quantised weight [rows, cols] for the kernels, to be multiplied by a class of `product`."""
    packed = pack_weight(weight)
    tiles = triton.cdiv(packed.rows, min(rows for rows, _, _ in TILES.values()))
    tiles *= triton.cdiv(MANY, MAX_ROWS[packed.dtype.itemsize])
    through = torch.zeros(tiles, dtype=torch.int32, device=packed.words.device)
    return product(weight=packed, bias=bias, through=through, processors=processors)
