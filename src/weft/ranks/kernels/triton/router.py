"""Products with routers, whose scores are float32, and the choice of experts by them: one launch for decode batches.

Tensor cores multiply x with the router's weights in the dtype of activations, exactly, and add in float32; with float32
activations all is float32. Neither is converted to memory first. For few tokens the weights are divided among programs
by rows and columns; the program that finishes last adds the parts, always in the same order, and chooses.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.triton.routing import (
    ExpertChoice,
    choice_constants,
    choose_and_store,
    choose_experts,
    expert_columns,
)
from weft.ranks.kernels.warm import KernelLaunch, first_of_variants
from weft.ranks.quant.dense import dense_weight
from weft.ranks.quant.quantised import QuantisedWeight

FEW = 64  # tokens for which one launch computes the scores and chooses


class Tiles(NamedTuple):
    """Sizes of a program: `tokens` that it multiplies, of which `own` are not padding, experts, columns at once, and
    warps."""

    tokens: int
    own: int
    experts: int
    columns: int
    warps: int


# For up to FEW tokens, and for more. Chosen by compiled code: tensor cores multiply 16 tokens at least, and the choice
# of 8 takes as many instructions as a program should issue one after the other. Not yet measured.
FEW_TILES, MANY_TILES = Tiles(16, 8, 32, 128, 8), Tiles(64, 64, 64, 64, 4)
FINISHED = (1, 4, 8)  # tokens for which the last of FEW_TILES' programs chooses: no more than there are
PROGRAMS = 128  # wanted, by dividing columns
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
    TOKENS: tl.constexpr, OWN: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, FINISHED: tl.constexpr,
):  # fmt: skip
    block, part, parts = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    token = block.to(tl.int64) * OWN + tl.arange(0, TOKENS)
    stop_token = tl.minimum(tokens, (block + 1) * OWN)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    stop = tl.minimum(cols, (part + 1) * share)
    total = _scores_of_tile(
        x, weight, token, expert, stop_token, count, cols, part * share, stop, TOKENS, EXPERTS, COLUMNS
    )  # fmt: skip
    # Parts of a token lie side by side: [tokens, parts, experts].
    place = (token[None, :] * parts + part) * count + expert[:, None]
    tl.store(sums + place, total, (expert < count)[:, None] & (token < stop_token)[None, :])
    # All threads have written before one of them counts this part as finished.
    tl.debug_barrier()
    last = tl.atomic_add(through + block, 1, sem="acq_rel") == tl.num_programs(0) * parts - 1
    if last:
        tl.store(through + block, 0)  # for the next product
        row, exists = expert_columns(count, size, GROUPS, GROUP_BLOCK, SIZE_BLOCK)
        done = block.to(tl.int64) * OWN + tl.arange(0, FINISHED)
        mine = done < stop_token
        inside = mine[:, None] & exists[None, :]
        score = tl.zeros([FINISHED, GROUP_BLOCK * SIZE_BLOCK], tl.float32)
        for each in range(parts):
            # Not from the L1 cache, which does not see stores of other multiprocessors.
            at = (done[:, None] * parts + each) * count + row[None, :]
            score += tl.load(sums + at, inside, other=0.0, cache_modifier=".cg")
        if BIAS:
            score += tl.load(bias + row, exists, other=0.0).to(tl.float32)[None, :]
        if CHOOSE:
            choose_and_store(
                score, row, exists, done, mine, correction, slots, chosen, shares, size, scaling, TOP_K, NORMALISED,
                PLAIN, SIGMOID, CORRECTED, GROUPS, TOP_GROUPS, GROUP_BEST, PADDED, NOBODY, MIN_SUM, GROUP_BLOCK,
                SIZE_BLOCK, CHOICES, FINISHED,
            )  # fmt: skip
        else:
            tl.store(scores + done[:, None] * count + row[None, :], score, inside)


@dataclass(frozen=True, kw_only=True)
class TritonRouter:
    """The product with a router's weight [experts, cols]: x [T, cols] -> x W^T + bias [T, experts] float32, and the
    choice by it.

    The weight has the dtype of activations. `through` are PROGRAMS int32 zeros: of each block of tokens, the number of
    programs that have finished their part.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    through: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.empty(len(x), len(self.weight), dtype=torch.float32, device=x.device)
        if not len(x):
            return scores
        if self._share(len(x)) < self.weight.shape[1] or len(x) <= FEW:
            self._route(x, Experts(count=len(self.weight), top_k=1, width=1), None, None, scores, None)
        else:
            self._score(x, scores)
        return scores

    def choose_experts(
        self, x: torch.Tensor, spec: Experts, slots: torch.Tensor | None, correction: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Pointwise.choose_experts` by the scores of x; up to FEW tokens take one launch, more take two."""
        if len(x) > FEW:
            return choose_experts(self(x), spec, slots, correction)
        choice = ExpertChoice.empty(len(x), spec, x.device)
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

    def launches(self, most: int, specs: Iterable[Experts]) -> list[KernelLaunch]:
        """Calls that launch each variant of the kernels that multiply up to `most` rows of x, and of the kernels that
        choose for one of `specs`."""
        count, cols = self.weight.shape

        def variant(tokens: int) -> tuple[int, bool]:
            return self._finished(tokens), self._share(tokens) < cols

        zeros = partial(torch.zeros, dtype=self.weight.dtype, device=self.weight.device)
        inputs = [zeros(tokens, cols) for tokens in first_of_variants(variant, most)]
        calls: list[KernelLaunch] = [partial(self, x) for x in inputs]
        for spec in specs:
            if spec.count == count:
                correction = torch.zeros(count, device=self.weight.device) if spec.correction else None
                calls += [partial(self.choose_experts, x, spec, None, correction) for x in inputs]
        return calls

    @staticmethod
    def _tiles(tokens: int) -> Tiles:
        return FEW_TILES if tokens <= FEW else MANY_TILES

    def _finished(self, tokens: int) -> int:
        """Number of tokens for which the last program of a block adds the parts."""
        own = self._tiles(tokens).own
        return own if tokens > FEW else next(count for count in FINISHED if count >= min(tokens, own))

    def _share(self, tokens: int) -> int:
        """Number of columns of a program, all of them if there are enough programs. For few tokens it does not depend
        on their number, nor does a token's choice."""
        (count, cols), tiles = self.weight.shape, self._tiles(tokens)
        programs = triton.cdiv(count, tiles.experts)
        programs *= 1 if tokens <= FEW else triton.cdiv(tokens, tiles.own)
        share = triton.cdiv(triton.cdiv(cols * programs, PROGRAMS), tiles.columns) * tiles.columns
        return min(cols, max(PART_COLUMNS, share))

    def _score(self, x: torch.Tensor, scores: torch.Tensor) -> None:
        """Compute the scores of rows of x, each by a program with all columns."""
        x, (count, cols), tiles = x.contiguous(), self.weight.shape, MANY_TILES
        _score[(triton.cdiv(len(x), tiles.tokens), triton.cdiv(count, tiles.experts))](
            x,
            self.weight,
            scores if self.bias is None else self.bias,
            scores,
            len(x),
            count,
            cols,
            BIAS=self.bias is not None,
            TOKENS=tiles.tokens,
            EXPERTS=tiles.experts,
            COLUMNS=tiles.columns,
            num_warps=tiles.warps,
        )

    def _route(
        self,
        x: torch.Tensor,
        spec: Experts,
        slots: torch.Tensor | None,
        correction: torch.Tensor | None,
        scores: torch.Tensor,
        choice: ExpertChoice | None,
    ) -> None:
        """Compute the scores of rows of x, whose columns are divided; choose by them, or store them without a
        `choice`."""
        x, (count, cols), tiles, share = x.contiguous(), self.weight.shape, self._tiles(len(x)), self._share(len(x))
        parts, blocks = triton.cdiv(cols, share), triton.cdiv(len(x), tiles.own)
        assert blocks <= len(self.through)
        chosen, shares = choice or (scores, scores)
        _route[(triton.cdiv(count, tiles.experts), parts, blocks)](
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
            TOKENS=tiles.tokens,
            OWN=tiles.own,
            EXPERTS=tiles.experts,
            COLUMNS=tiles.columns,
            FINISHED=self._finished(len(x)),
            num_warps=tiles.warps,
        )


def create_router(weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> TritonRouter:
    """The product with a router's weight [experts, cols], whose dtype is the activations'."""
    weight = dense_weight(weight)
    through = torch.zeros(PROGRAMS, dtype=torch.int32, device=weight.device)
    return TritonRouter(weight=weight, bias=bias, through=through)
