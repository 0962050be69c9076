"""Products with routers, whose scores are float32, and the choice of experts by them: one launch for decode batches.

Tensor cores multiply x with the router's weights in the dtype of activations, exactly, and add in float32; with float32
activations all is float32. Neither is converted to memory first. For few tokens the weights are divided among programs
by rows and columns; the program that finishes last adds the parts, always in the same order, and chooses.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from weft.architectures.shape import Experts
from weft.kernels.triton.routing import Choice, choice_constants, choose_and_store, choose_experts, expert_columns
from weft.kernels.warm import KernelLaunch
from weft.quant.dense import dense_weight
from weft.quant.quantised import QuantisedWeight

FEW = 64  # tokens whose scores one launch computes and adds; for more, programs take whole rows of the weights
# Tokens and experts of a program, columns at once, and warps; with few tokens and with many. Chosen by compiled code.
FEW_TILES, MANY_TILES = (16, 32, 128, 4), (64, 64, 64, 4)
PROGRAMS = 64  # wanted for each FEW_TILES tokens
PART_COLUMNS = 256  # columns of a program at least: with fewer it ends before its loads overlap


@triton.jit
def _scores_of_tile(
    x, weight, token, expert, tokens, count, cols, begin, stop, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Products [EXPERTS, TOKENS] float32 over the columns from `begin` to `stop`."""
    total = tl.zeros([EXPERTS, TOKENS], tl.float32)
    mine, real = (expert < count)[:, None], (token < tokens)[None, :]
    for first in range(begin, stop, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < stop
        value = tl.load(x + token[None, :] * cols + column[:, None], real & inside[:, None], other=0.0)
        row = tl.load(weight + expert[:, None] * cols + column[None, :], mine & inside[None, :], other=0.0)
        total = tl.dot(row, value, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])
def _score(
    x, weight, bias, scores, tokens, count, cols,
    BIAS: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    total = _scores_of_tile(x, weight, token, expert, tokens, count, cols, 0, cols, TOKENS, EXPERTS, COLUMNS)
    if BIAS:
        total += tl.load(bias + expert, expert < count, other=0.0).to(tl.float32)[:, None]
    inside = (expert < count)[:, None] & (token < tokens)[None, :]
    tl.store(scores + token[None, :] * count + expert[:, None], total, inside)


@triton.jit(do_not_specialize=["tokens"])
def _route(
    x, weight, bias, correction, slots, sums, through, scores, chosen, shares, tokens, count, cols, share, size,
    scaling, BIAS: tl.constexpr, CHOOSE: tl.constexpr,
    TOP_K: tl.constexpr, NORMALISED: tl.constexpr, PLAIN: tl.constexpr, SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    PADDED: tl.constexpr, NOBODY: tl.constexpr, MIN_SUM: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, CHOICES: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block, part, parts = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    token = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    stop = tl.minimum(cols, (part + 1) * share)
    total = _scores_of_tile(
        x, weight, token, expert, tokens, count, cols, part * share, stop, TOKENS, EXPERTS, COLUMNS
    )  # fmt: skip
    # Parts of a token lie side by side: [tokens, parts, experts].
    place = (token[None, :] * parts + part) * count + expert[:, None]
    tl.store(sums + place, total, (expert < count)[:, None] & (token < tokens)[None, :])
    # All threads have written before one of them counts this part as finished.
    tl.debug_barrier()
    last = tl.atomic_add(through + block, 1, sem="acq_rel") == tl.num_programs(0) * parts - 1
    if last:
        tl.store(through + block, 0)  # for the next product
        row, exists = expert_columns(count, size, GROUPS, GROUP_BLOCK, SIZE_BLOCK)
        mine = token < tokens
        inside = mine[:, None] & exists[None, :]
        score = tl.zeros([TOKENS, GROUP_BLOCK * SIZE_BLOCK], tl.float32)
        for each in range(parts):
            # Not from the L1 cache, which does not see stores of other multiprocessors.
            at = (token[:, None] * parts + each) * count + row[None, :]
            score += tl.load(sums + at, inside, other=0.0, cache_modifier=".cg")
        if BIAS:
            score += tl.load(bias + row, exists, other=0.0).to(tl.float32)[None, :]
        if CHOOSE:
            choose_and_store(
                score, row, exists, token, mine, correction, slots, chosen, shares, size, scaling, TOP_K, NORMALISED,
                PLAIN, SIGMOID, CORRECTED, GROUPS, TOP_GROUPS, GROUP_BEST, PADDED, NOBODY, MIN_SUM, GROUP_BLOCK,
                SIZE_BLOCK, CHOICES, TOKENS,
            )  # fmt: skip
        else:
            tl.store(scores + token[:, None] * count + row[None, :], score, inside)


@dataclass(frozen=True, kw_only=True)
class TritonRouter:
    """The product with a router's weight [experts, cols]: x [T, cols] -> x W^T + bias [T, experts] float32, and the
    choice by it.

    The weight has the dtype of activations. `through` are int32 zeros, one for each FEW_TILES tokens of FEW: the number
    of programs that have finished their part.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    through: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.empty(len(x), len(self.weight), dtype=torch.float32, device=x.device)
        if len(x) > FEW:
            self._score(x, scores)
        elif len(x):
            self._route(x, Experts(count=len(self.weight), top_k=1, width=1), None, None, scores, None)
        return scores

    def choose(
        self, x: torch.Tensor, spec: Experts, slots: torch.Tensor | None, correction: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Pointwise.choose_experts` by the scores of x; up to FEW tokens take one launch, more take two."""
        if len(x) > FEW:
            return choose_experts(self(x), spec, slots, correction)
        choice = Choice.empty(len(x), spec, x.device)
        if len(x):
            self._route(x, spec, slots, correction, choice.shares, choice)
        return choice

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.weight,)

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        """Take the values of another weight, of the same dims."""
        self.weight.copy_(dense_weight(weight))

    @property
    def kind(self) -> Hashable:
        """Key of products that launch the same kernels."""
        return self.weight.shape, self.weight.dtype, self.bias is None

    def launches(self, most: int) -> list[KernelLaunch]:
        """Calls that launch each variant of the kernels that multiply up to `most` rows of x, but not those that
        choose."""
        zeros = partial(torch.zeros, dtype=self.weight.dtype, device=self.weight.device)
        return [partial(self, zeros(tokens, self.weight.shape[1])) for tokens in (1, FEW + 1) if tokens <= most]

    def _score(self, x: torch.Tensor, scores: torch.Tensor) -> None:
        x, (count, cols), (tokens, experts, columns, warps) = x.contiguous(), self.weight.shape, MANY_TILES
        _score[(triton.cdiv(len(x), tokens), triton.cdiv(count, experts))](
            x,
            self.weight,
            scores if self.bias is None else self.bias,
            scores,
            len(x),
            count,
            cols,
            BIAS=self.bias is not None,
            TOKENS=tokens,
            EXPERTS=experts,
            COLUMNS=columns,
            num_warps=warps,
        )

    def _route(
        self,
        x: torch.Tensor,
        spec: Experts,
        slots: torch.Tensor | None,
        correction: torch.Tensor | None,
        scores: torch.Tensor,
        choice: Choice | None,
    ) -> None:
        """Compute the scores of at most FEW rows of x; choose by them, or store them without a `choice`."""
        x, (count, cols), (tokens, experts, columns, warps) = x.contiguous(), self.weight.shape, FEW_TILES
        tiles = triton.cdiv(count, experts)
        share = max(PART_COLUMNS, triton.cdiv(triton.cdiv(cols * tiles, PROGRAMS), columns) * columns)
        parts = triton.cdiv(cols, share)
        chosen, shares = choice or (scores, scores)
        _route[(tiles, parts, triton.cdiv(len(x), tokens))](
            x,
            self.weight,
            scores if self.bias is None else self.bias,
            scores if correction is None else correction,
            chosen if slots is None else slots,
            torch.empty(len(x), parts, count, dtype=torch.float32, device=x.device),
            self.through,
            scores,
            chosen,
            shares,
            len(x),
            count,
            cols,
            share,
            count // spec.groups,
            spec.scaling,
            BIAS=self.bias is not None,
            CHOOSE=choice is not None,
            **choice_constants(spec, padded=slots is not None, corrected=correction is not None),
            TOKENS=tokens,
            EXPERTS=experts,
            COLUMNS=columns,
            num_warps=warps,
        )


def create_router(weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> TritonRouter:
    """The product with a router's weight [experts, cols], whose dtype is that of activations."""
    weight = dense_weight(weight)
    through = torch.zeros(triton.cdiv(FEW, FEW_TILES[0]), dtype=torch.int32, device=weight.device)
    return TritonRouter(weight=weight, bias=bias, through=through)
