"""The MLPs of a rank's experts, each of which computes the tokens that chose it: two launches for all of them, and for
the experts that see every token.

A program multiplies some rows of one expert's matrix with a block of that expert's tokens. Blocks without tokens end at
once. Their number depends on the number of tokens alone, so that a CUDA graph can hold the launches. The weights of
an expert are read once for each block, and from the second cache if its other blocks run at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.matrices import ExpertStack
from weft.ranks.kernels.triton.products import MAX_ROWS, TILES, QuantisedMatrix
from weft.ranks.kernels.triton.routing import MOST_ALONE, SortedRows, most_blocks, sort_rows, sum_parts
from weft.ranks.kernels.triton.weights import PackedWeight, load_weights, pack_weight
from weft.ranks.kernels.warm import KernelLaunch, first_of_variants
from weft.ranks.quant.dense import DenseProduct
from weft.ranks.quant.quantised import QuantisedWeight

# The same as TILES for weights that are not quantised: chosen by bytes in flight and shared memory. Not yet measured.
FLOAT_TILES = {16: (64, 2, 4), 32: (64, 2, 4), 64: (64, 2, 4), 128: (128, 2, 8)}
MIN_ROWS = 32  # rows of a matrix per program, if whole tiles' programs would be fewer than the processors
# Blocks that go through all rows of the matrices before the next ones: their tokens stay in the second cache.
TOGETHER = 16
# Tokens up to which shared experts are computed together with the routed ones; for more, products of their own have
# larger tiles. Not yet measured.
MAX_SHARED_TOKENS = 64


# None of two values that a branch chooses between may be a constant, as a 1 would be.
VARIABLE = ["blocks", "tokens", "units", "shared_units", "groups", "shared_groups", "lacking", "shared_lacking"]


@triton.jit(do_not_specialize=VARIABLE)
def _multiply_experts(
    x, words, scales, lowest, bias, members, owners, out, blocks, rows, cols, units, groups, lacking,
    shared_x, shared_words, shared_scales, shared_lowest, shared_out, tokens, shared_rows, shared_cols, shared_units,
    shared_groups, shared_lacking, gain, limit, up_offset,
    SHARED: tl.constexpr, CHOICES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, LOWEST: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, ROWS)
    number, beyond = tl.program_id(0), tl.program_id(0) - blocks * tiles
    if SHARED:
        number = tl.where(beyond < 0, number, 0)
    begin = number // (TOGETHER * tiles) * TOGETHER
    size = tl.minimum(blocks - begin, TOGETHER)
    within = number - begin * tiles
    block, tile = begin + within % size, within // size
    expert = tl.load(owners + block).to(tl.int64)
    member = tl.load(members + block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    source = member // CHOICES
    if SHARED:
        # Further programs multiply blocks of all tokens with the matrix of the shared experts.
        across = tl.cdiv(tokens, TOKENS)
        if beyond >= 0:
            source = (beyond % across * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
            member = tl.where(source < tokens, source, -1)
            tile, expert = beyond // across, expert * 0
            x, words, scales, lowest, out = shared_x, shared_words, shared_scales, shared_lowest, shared_out
            rows, cols, units, groups, lacking = shared_rows, shared_cols, shared_units, shared_groups, shared_lacking
    if expert < 0:
        return
    exists = member >= 0
    at = tile * ROWS + tl.arange(0, ROWS)
    mine, row = at < rows, at
    if GATED:
        row = at % 2 * (rows // 2) + at // 2  # of the gate and of the up projection in turns
    row += expert * rows
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in range(0, units, UNITS):
        column = first * 32 + tl.arange(0, UNITS * 32)
        inside = column < cols
        value = tl.load(x + source[None, :] * cols + column[:, None], exists[None, :] & inside[:, None], other=0.0)
        if LOWEST == "none":
            place = words + row[:, None] * cols + column[None, :]
            weight = tl.load(place, mine[:, None] & inside[None, :], other=0.0)
        else:
            weight = load_weights(
                words, scales, lowest, row, mine, first, units, units, groups, lacking, BITS, GROUP, LOWEST, ROWS,
                UNITS, x.dtype.element_ty,
            )  # fmt: skip
        total = tl.dot(weight, value, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + row, mine, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [ROWS // 2, 2, TOKENS]), [0, 2, 1]))
        # A NaN stays one, so that a broken text ends as such.
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        active = gate / (1.0 + tl.exp(-gain * gate)) * (up + up_offset)
        column, width = tile * (ROWS // 2) + tl.arange(0, ROWS // 2), rows // 2
        target = out + member[None, :] * width + column[:, None]
        tl.store(target, active.to(out.dtype.element_ty), (column < width)[:, None] & exists[None, :])
    else:
        target = out + member[None, :] * rows + at[:, None]
        tl.store(target, total.to(out.dtype.element_ty), mine[:, None] & exists[None, :])


@dataclass(frozen=True)
class TritonStack:
    """The matrices of a rank's experts, `rows` rows each, one after the other, and their biases [experts, rows]."""

    weight: PackedWeight
    rows: int
    bias: torch.Tensor | None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold the weights."""
        return self.weight.tensors

    @property
    def kind(self) -> Hashable:
        """Key of stacks that are multiplied by the same kernels."""
        return self.weight.kind, self.rows, self.bias is None

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        """Take the values of another stack, of the same dims and scheme."""
        self.weight.replace(weight)


def pack_stack(stack: ExpertStack) -> TritonStack:
    """Prepare a stack of matrices for the kernels."""
    return TritonStack(pack_weight(stack.weight), stack.weight.shape[-2], stack.bias)


class SharedRows(NamedTuple):
    """The product of all rows of x with a matrix of the shared experts, into `out`."""

    x: torch.Tensor
    weight: PackedWeight
    out: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TritonExperts:
    """`ExpertProducts` in Triton, of the experts from number `first` on. Work is spread over `processors`.

    The rows of `gate_up` are the gate's and then the up projection's.
    """

    spec: Experts
    gate_up: TritonStack
    down: TritonStack
    first: int
    processors: int
    routed: torch.Tensor = field(init=False)

    capturable = True

    def __post_init__(self) -> None:
        device = self.gate_up.weight.words.device
        object.__setattr__(self, "routed", torch.zeros(self._count, dtype=torch.int64, device=device))

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden] in four launches."""
        return self.with_shared(x, chosen, shares, None, None)

    def with_shared(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        shared: tuple[PackedWeight, PackedWeight] | None,
        gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute also the MLP of `shared` matrices, of gate and up and of down projection, on all tokens, times the
        sigmoid of `gate` [T, 1]."""
        if not len(x):
            return torch.empty_like(x)
        x, chosen, shares, rows = x.contiguous(), chosen.contiguous(), shares.contiguous(), chosen.numel()
        blocks = sort_rows(chosen, self.first, self.routed, self._block_size(rows))
        inner, parts = x.new_empty(rows, self.down.weight.cols), x.new_empty(rows, x.shape[1])
        first = second = None
        if shared:
            first = SharedRows(x, shared[0], x.new_empty(len(x), shared[1].cols))
            second = SharedRows(first.out, shared[1], torch.empty_like(x))
        self.multiply(x, self.gate_up, blocks, inner, choices=chosen.shape[1], gated=True, shared=first)
        self.multiply(inner, self.down, blocks, parts, choices=1, gated=False, shared=second)
        return sum_parts(parts, chosen, shares, self.first, self._count, second and second.out, gate)

    @property
    def kind(self) -> Hashable:
        """Key of experts that launch the same kernels."""
        return self.spec, self.gate_up.kind, self.down.kind

    def launches(self, most: int) -> list[KernelLaunch]:
        """Calls that launch each variant of the kernels that compute up to `most` tokens."""
        top_k, zeros = self.spec.top_k, partial(torch.zeros, device=self.gate_up.weight.words.device)
        dtype, hidden = self.gate_up.weight.dtype, self.gate_up.weight.cols

        def launch(tokens: int) -> KernelLaunch:
            choice = zeros(tokens, top_k, dtype=torch.int64), zeros(tokens, top_k)
            return partial(self, zeros(tokens, hidden, dtype=dtype), *choice)

        return [launch(tokens) for tokens in first_of_variants(self.variant, most)]

    def variant(self, tokens: int) -> Hashable:
        """Key of the variants of the kernels that compute as many tokens."""
        rows = tokens * self.spec.top_k
        return self._tile(self.gate_up, rows), self._tile(self.down, rows), rows > MOST_ALONE

    @property
    def _count(self) -> int:
        """Number of experts of this rank."""
        return self.down.weight.rows // self.down.rows

    def _block_size(self, rows: int) -> int:
        """Number of rows of a block: about as many as an expert has if all are chosen alike."""
        most = MAX_ROWS[self.down.weight.dtype.itemsize]
        return min(most, max(min(TILES), triton.next_power_of_2(triton.cdiv(rows, self.spec.count))))

    def _tile(self, stack: TritonStack, rows: int) -> tuple[int, int, int, int]:
        """Tokens of a program, its rows of a matrix, units of columns at once, and warps, for `rows` rows of tokens."""
        size = self._block_size(rows)
        taken_rows, taken_units, warps = (FLOAT_TILES if stack.weight.scheme is None else TILES)[size]
        blocks = most_blocks(rows, self._count, size)
        while taken_rows > MIN_ROWS and blocks * triton.cdiv(stack.rows, taken_rows) < self.processors:
            taken_rows //= 2
        return size, taken_rows, taken_units, warps

    def multiply(
        self,
        x: torch.Tensor,
        stack: TritonStack,
        blocks: SortedRows,
        out: torch.Tensor,
        *,
        choices: int,
        gated: bool,
        shared: SharedRows | None = None,
    ) -> None:
        """Multiply the rows of all blocks with their experts' matrices; row r of the result belongs to row r // choices
        of x, activated if `gated`. Programs after these multiply the `shared` rows likewise."""
        spec, weight, count = self.spec, stack.weight, len(blocks.owners)
        tokens, taken_rows, taken_units, warps = self._tile(stack, len(out))
        programs = count * triton.cdiv(stack.rows, taken_rows)
        extra = shared or SharedRows(x, weight, out)
        if shared:
            programs += triton.cdiv(len(shared.x), tokens) * triton.cdiv(shared.weight.rows, taken_rows)
        _multiply_experts[(programs,)](
            x,
            weight.words,
            weight.scales,
            weight.lowest,
            out if stack.bias is None else stack.bias,
            blocks.members,
            blocks.owners,
            out,
            count,
            stack.rows,
            weight.cols,
            weight.units,
            weight.groups,
            weight.lacking,
            extra.x,
            extra.weight.words,
            extra.weight.scales,
            extra.weight.lowest,
            extra.out,
            len(extra.x),
            extra.weight.rows,
            extra.weight.cols,
            extra.weight.units,
            extra.weight.groups,
            extra.weight.lacking,
            float(spec.gain),
            math.inf if spec.limit is None else float(spec.limit),
            float(spec.up_offset),
            SHARED=shared is not None,
            CHOICES=choices,
            **weight.constants,
            BIAS=stack.bias is not None,
            GATED=gated,
            ROWS=taken_rows,
            UNITS=taken_units,
            TOKENS=tokens,
            TOGETHER=TOGETHER,
            num_warps=warps,
        )


@dataclass(frozen=True, kw_only=True)
class TritonMixture:
    """`MixtureProducts` in Triton: routed experts, and the experts that see every token, in the same launches."""

    experts: TritonExperts
    shared: tuple[PackedWeight, PackedWeight]  # of the gate and up projection, and of the down projection

    most_tokens = MAX_SHARED_TOKENS

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, gate: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden] in four launches."""
        return self.experts.with_shared(x, chosen, shares, self.shared, gate)

    @property
    def kind(self) -> Hashable:
        """Key of mixtures that launch the same kernels."""
        return self.experts.kind, *(weight.kind for weight in self.shared)

    def launches(self, most: int) -> list[KernelLaunch]:
        """Calls that launch each variant of the kernels that compute up to `most` tokens."""
        spec, zeros = self.experts.spec, partial(torch.zeros, device=self.shared[0].words.device)

        def launch(tokens: int) -> KernelLaunch:
            choice = zeros(tokens, spec.top_k, dtype=torch.int64), zeros(tokens, spec.top_k)
            x = zeros(tokens, self.shared[0].cols, dtype=self.shared[0].dtype)
            return partial(self, x, *choice, zeros(tokens, 1) if spec.shared_gate else None)

        return [launch(tokens) for tokens in first_of_variants(self.experts.variant, min(most, self.most_tokens))]


def create_mixture(experts: TritonExperts, gate_up: object, down: object) -> TritonMixture | None:
    """The mixture of routed experts with shared ones, whose products are given; None if the kernels cannot multiply
    both in one launch: if these have biases, another scheme or another activation."""
    spec, first, second = experts.spec, packed_weight(gate_up), packed_weight(down)
    if first is None or second is None or (spec.gain, spec.limit, spec.up_offset) != (1.0, None, 0.0):
        return None
    for stack, weight in ((experts.gate_up, first), (experts.down, second)):
        alike = stack.weight.constants == weight.constants and stack.weight.dtype == weight.dtype
        if stack.bias is not None or not alike:
            return None
    return TritonMixture(experts=experts, shared=(first, second))


def packed_weight(product: object) -> PackedWeight | None:
    """The weight of a product without a bias, as the kernels read it, in the same memory; None for other products."""
    if isinstance(product, QuantisedMatrix) and product.bias is None:
        return product.weight
    if isinstance(product, DenseProduct) and not product.has_bias:
        return pack_weight(product.weight)
    return None
