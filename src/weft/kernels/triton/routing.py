"""Routing of tokens to experts: the choice of experts, rows sorted by expert, and weighted sums of the results.

Nothing waits for the GPU, and no size depends on what the tokens choose, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.architectures.shape import Experts
from weft.kernels.experts import MIN_SUM, is_plain_choice

NOBODY = -1  # number of the expert that a padding row chooses; owner of a block without rows; row that does not exist
PAIRS = 1024  # pairs of token and choice, which one program of _sort reads in one pass
MIN_BINS = 32  # bins of a histogram
COLUMNS = 1024  # columns of the hidden dim that one program of _sum computes
UNAVAILABLE = tl.constexpr(-(2**31))  # below the place of every score


@triton.jit
def _place(value):
    """Integers in the order of floats, of which none is a NaN."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


@triton.jit
def _weigh(score, SIGMOID: tl.constexpr):
    """Weights of the experts with these scores, -inf of those that do not exist."""
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-score))
    else:
        weight = tl.exp(score - tl.max(score, 0))
        weight = weight / tl.sum(weight, 0)
    return weight


@triton.jit
def _in_best_groups(
    value, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr,
):  # fmt: skip
    """True for the experts of the best groups. `value` is -inf for experts that do not exist."""
    grouped = tl.reshape(value, [GROUP_BLOCK, SIZE_BLOCK])
    total = tl.max(grouped, 1)
    if GROUP_BEST == 2:
        first = tl.arange(0, SIZE_BLOCK)[None, :] == tl.argmax(grouped, 1)[:, None]
        total += tl.max(tl.where(first, float("-inf"), grouped), 1)
    group = tl.arange(0, GROUP_BLOCK)
    place = tl.where(group < GROUPS, _place(total), UNAVAILABLE)
    for _ in tl.static_range(TOP_GROUPS):
        place = tl.where(group == tl.argmax(place, 0), UNAVAILABLE, place)
    taken = (group < GROUPS) & (place == UNAVAILABLE)
    return tl.reshape(tl.broadcast_to(taken[:, None], [GROUP_BLOCK, SIZE_BLOCK]), [GROUP_BLOCK * SIZE_BLOCK])


@triton.jit
def _choose(
    scores, correction, slots, chosen, shares, count, size, scaling,
    TOP_K: tl.constexpr, NORMALISED: tl.constexpr, PLAIN: tl.constexpr, SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    PADDED: tl.constexpr, NOBODY: tl.constexpr, MIN_SUM: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    index, choice = tl.arange(0, GROUP_BLOCK * SIZE_BLOCK), tl.arange(0, CHOICES)
    expert, exists = index, index < count
    if GROUPS > 1:
        member = index % SIZE_BLOCK
        expert = index // SIZE_BLOCK * size + member
        exists = (index // SIZE_BLOCK < GROUPS) & (member < size)
    score = tl.load(scores + token * count + expert, exists, other=float("-inf"))
    score = tl.where(score == score, score, float("-inf"))
    weight, value = score, score
    if not PLAIN:
        weight = _weigh(score, SIGMOID)
        value = weight
        if CORRECTED:
            value += tl.load(correction + expert, exists, other=0.0)
        value = tl.where(exists & (value == value), value, float("-inf"))
    # Experts that were chosen stay apart from one of value -inf.
    place = tl.where(exists, _place(value), UNAVAILABLE)
    if GROUPS > 1:
        best_groups = _in_best_groups(value, GROUPS, TOP_GROUPS, GROUP_BEST, GROUP_BLOCK, SIZE_BLOCK)
        place = tl.where(best_groups, place, UNAVAILABLE)
    highest, numbers = tl.full([CHOICES], float("-inf"), tl.float32), tl.full([CHOICES], NOBODY, tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(place, 0)
        number = best // SIZE_BLOCK * size + best % SIZE_BLOCK if GROUPS > 1 else best
        numbers = tl.where(choice == k, number.to(tl.int64), numbers)
        highest = tl.where(choice == k, tl.max(tl.where(index == best, weight, float("-inf")), 0), highest)
        place = tl.where(index == best, UNAVAILABLE, place)
    if PLAIN:
        top = tl.max(highest, 0)
        share = tl.exp(highest - top)
        if NORMALISED:
            share = share / tl.sum(share, 0)
        else:
            share = share / tl.sum(tl.exp(score - top), 0)
    else:
        share = tl.where(choice < TOP_K, highest, 0.0)
        if NORMALISED:
            share = share / (tl.sum(share, 0) + MIN_SUM)
        share = share * scaling
    if PADDED:
        numbers = tl.where(tl.load(slots + token) >= 0, numbers, NOBODY)
    tl.store(chosen + token * TOP_K + choice, numbers, choice < TOP_K)
    tl.store(shares + token * TOP_K + choice, share, choice < TOP_K)


def choose_experts(
    scores: torch.Tensor, spec: Experts, slots: torch.Tensor | None = None, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Pointwise.choose_experts` in one launch."""
    tokens, count = scores.shape
    chosen = torch.empty(tokens, spec.top_k, dtype=torch.int64, device=scores.device)
    shares = torch.empty(tokens, spec.top_k, dtype=torch.float32, device=scores.device)
    if tokens:
        size = count // spec.groups
        _choose[(tokens,)](
            scores,
            scores if correction is None else correction,
            chosen if slots is None else slots,
            chosen,
            shares,
            count,
            size,
            spec.scaling,
            TOP_K=spec.top_k,
            NORMALISED=spec.normalised,
            PLAIN=is_plain_choice(spec),
            SIGMOID=spec.scoring == "sigmoid",
            CORRECTED=correction is not None,
            GROUPS=spec.groups,
            TOP_GROUPS=spec.top_groups,
            GROUP_BEST=2 if spec.group_score == "top2" else 1,
            PADDED=slots is not None,
            NOBODY=NOBODY,
            MIN_SUM=MIN_SUM,
            GROUP_BLOCK=triton.next_power_of_2(spec.groups),
            SIZE_BLOCK=triton.next_power_of_2(size),
            CHOICES=triton.next_power_of_2(spec.top_k),
            num_warps=1,
        )
    return chosen, shares


class SortedRows(NamedTuple):
    """Rows of tokens in the order of experts: row token * top_k + k is that of choice k of a token.

    A block of rows belongs to one expert. `members` [blocks, size] int32 are the numbers of its rows, NOBODY after the
    last one. `owners` [blocks] int32 are the experts of the blocks, counted from the rank's first one, NOBODY for
    blocks without rows.
    """

    members: torch.Tensor
    owners: torch.Tensor


# The numbers of rows and of blocks differ from step to step.
@triton.jit(do_not_specialize=["rows", "blocks", "first"])
def _sort(
    numbers, members, owners, routed, rows, blocks, first, count,
    SIZE: tl.constexpr, REACH: tl.constexpr, PAIRS: tl.constexpr, BINS: tl.constexpr, NOBODY: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    bins, each = tl.arange(0, BINS), tl.arange(0, PAIRS)
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, rows, PAIRS):
        own = tl.load(numbers + begin + each, begin + each < rows, other=-1).to(tl.int32) - first
        # Rows of other ranks' experts are in the bin after the last expert's.
        counts += tl.histogram(tl.where((own >= 0) & (own < count), own, count), BINS)
    block_counts = tl.where(bins < count, (counts + SIZE - 1) // SIZE, 0)
    before = tl.sum(tl.where(bins < expert, block_counts, 0), 0)
    stop = before + tl.sum(tl.where(bins == expert, block_counts, 0), 0)
    for block in range(before, stop):
        tl.store(owners + block, expert)
    mine_in_all = tl.sum(tl.where(bins == expert, counts, 0), 0)
    tl.store(routed + expert, tl.load(routed + expert) + mine_in_all)
    if expert == 0:
        for block in range(tl.sum(block_counts, 0), blocks):
            tl.store(owners + block, NOBODY)
    at = before * SIZE
    for begin in range(0, rows, PAIRS):
        row = begin + each
        mine = (tl.load(numbers + row, row < rows, other=-1).to(tl.int32) - first == expert) & (row < rows)
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(members + at + rank - 1, row, mine)
        at += tl.max(rank, 0)
    padding = at + tl.arange(0, REACH)
    tl.store(members + padding, NOBODY, padding < stop * SIZE)


def sort_rows(chosen: torch.Tensor, first: int, routed: torch.Tensor, size: int) -> SortedRows:
    """Sort the rows of tokens that have chosen [T, top_k] int64 by expert, in blocks of `size` rows.

    `routed` [count] int64 counts the rows of each expert from number `first` on. Rows of other experts are left out.
    """
    rows, count = chosen.numel(), len(routed)
    blocks = most_blocks(rows, count, size)
    members = torch.empty(blocks, size, dtype=torch.int32, device=chosen.device)
    owners = torch.empty(blocks, dtype=torch.int32, device=chosen.device)
    bins = max(MIN_BINS, triton.next_power_of_2(count + 1))
    reach = triton.next_power_of_2(size)
    _sort[(count,)](
        chosen, members, owners, routed, rows, blocks, first, count,
        SIZE=size, REACH=reach, PAIRS=PAIRS, BINS=bins, NOBODY=NOBODY,
    )  # fmt: skip
    return SortedRows(members, owners)


def most_blocks(rows: int, count: int, size: int) -> int:
    """The most blocks that `rows` rows of `count` experts can need: as many experts as possible have one row more than
    full blocks."""
    return rows if rows <= count else count + (rows - count) // size


@triton.jit(do_not_specialize=["first"])
def _sum(
    parts, numbers, shares, shared, gate, out, width, first, count,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        row = token * TOP_K + k
        own = tl.load(numbers + row) - first
        # Nobody has written the parts of other experts.
        stop = tl.where((own >= 0) & (own < count), width, 0)
        part = tl.load(parts + row * width + columns, columns < stop, other=0.0)
        total += tl.where(columns < stop, part.to(tl.float32) * tl.load(shares + row), 0.0)
    if SHARED:
        part = tl.load(shared + token * width + columns, columns < width, other=0.0).to(tl.float32)
        if GATED:
            part = part / (1.0 + tl.exp(-tl.load(gate + token)))
        total += part
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), columns < width)


def sum_parts(
    parts: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    first: int,
    count: int,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of the parts [T * top_k, hidden] of each token's experts from `first` on, `count` of them, weighted by its
    shares [T, top_k], in the order of its choices: [T, hidden].

    Last comes the part of the `shared` experts [T, hidden], times the sigmoid of `gate` [T, 1] float32.
    """
    (tokens, top_k), width = chosen.shape, parts.shape[1]
    out = parts.new_empty(tokens, width)
    _sum[(tokens, triton.cdiv(width, COLUMNS))](
        parts,
        chosen,
        shares,
        out if shared is None else shared,
        shares if gate is None else gate,
        out,
        width,
        first,
        count,
        TOP_K=top_k,
        SHARED=shared is not None,
        GATED=gate is not None,
        BLOCK=COLUMNS,
    )
    return out
