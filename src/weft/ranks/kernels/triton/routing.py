"""Routing of tokens to experts: the choice of experts, rows sorted by expert, and weighted sums of the results.

Nothing waits for the GPU, and no size depends on what the tokens choose, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.experts import MIN_SUM, is_plain_choice

NOBODY = -1  # number of the expert that a padding row chooses; owner of a block without rows; row that does not exist
PAIRS = 1024  # pairs of token and choice, which one program of _sort reads in one pass
MIN_BINS = 32  # bins of a histogram
# Pairs up to which each expert's program reads all of them, twice: some 1 to 2 us for each PAIRS, against two more
# launches. Not yet measured, nor is what follows.
MOST_ALONE = 8 * PAIRS
PAIRS_EACH = 256  # that a program places, if several do
PLACED = 2048  # numbers of a tile of pairs and experts: with one warp, the fewest instructions for a pair
ADDED = (64, 16)  # programs and experts whose counts are added at once
COLUMNS = 1024  # columns of the hidden dim that one program of _sum computes
UNAVAILABLE = tl.constexpr(-(2**31))  # below the place of every score


@triton.jit
def _order_bits(value):
    """Integers in the order of floats, of which none is a NaN."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


@triton.jit
def _weigh(score, SIGMOID: tl.constexpr):
    """Weights [TOKENS, EXPERTS] of the experts with these scores, -inf for experts that do not exist."""
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-score))
    else:
        weight = tl.exp(score - tl.max(score, 1)[:, None])
        weight = weight / tl.sum(weight, 1)[:, None]
    return weight


@triton.jit
def _in_best_groups(
    value, TOKENS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr,
):  # fmt: skip
    """True for the experts of a token's best groups. `value` is -inf for experts that do not exist."""
    grouped = tl.reshape(value, [TOKENS, GROUP_BLOCK, SIZE_BLOCK])
    total = tl.max(grouped, 2)
    if GROUP_BEST == 2:
        first = tl.arange(0, SIZE_BLOCK)[None, None, :] == tl.argmax(grouped, 2)[:, :, None]
        total += tl.max(tl.where(first, float("-inf"), grouped), 2)
    group = tl.arange(0, GROUP_BLOCK)[None, :]
    place = tl.where(group < GROUPS, _order_bits(total), UNAVAILABLE)
    for _ in tl.static_range(TOP_GROUPS):
        place = tl.where(group == tl.argmax(place, 1)[:, None], UNAVAILABLE, place)
    taken = (group < GROUPS) & (place == UNAVAILABLE)
    spread = tl.broadcast_to(taken[:, :, None], [TOKENS, GROUP_BLOCK, SIZE_BLOCK])
    return tl.reshape(spread, [TOKENS, GROUP_BLOCK * SIZE_BLOCK])


@triton.jit
def expert_columns(
    count, size, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr
):  # fmt: skip
    """Numbers of the experts of a token's row, and which of them exist: [GROUP_BLOCK * SIZE_BLOCK] both. Each group of
    `size` experts begins at a multiple of SIZE_BLOCK."""
    index = tl.arange(0, GROUP_BLOCK * SIZE_BLOCK)
    expert, exists = index, index < count
    if GROUPS > 1:
        member = index % SIZE_BLOCK
        expert = index // SIZE_BLOCK * size + member
        exists = (index // SIZE_BLOCK < GROUPS) & (member < size)
    return expert, exists


@triton.jit
def choose_and_store(
    score, expert, exists, token, mine, correction, slots, chosen, shares, size, scaling,
    TOP_K: tl.constexpr, NORMALISED: tl.constexpr, PLAIN: tl.constexpr, SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    PADDED: tl.constexpr, NOBODY: tl.constexpr, MIN_SUM: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Choose the experts of the tokens [TOKENS] int64 that are `mine`, by their scores [TOKENS, GROUP_BLOCK *
    SIZE_BLOCK]; write numbers and shares. `expert` and `exists` are as in `expert_columns`."""
    index, choice = tl.arange(0, GROUP_BLOCK * SIZE_BLOCK)[None, :], tl.arange(0, CHOICES)[None, :]
    score = tl.where(exists[None, :] & (score == score), score, float("-inf"))
    weight, value = score, score
    if not PLAIN:
        weight = _weigh(score, SIGMOID)
        value = weight
        if CORRECTED:
            value += tl.load(correction + expert, exists, other=0.0)[None, :]
        value = tl.where(exists[None, :] & (value == value), value, float("-inf"))
    # Experts that were chosen stay apart from one of value -inf.
    place = tl.where(exists[None, :], _order_bits(value), UNAVAILABLE)
    if GROUPS > 1:
        best_groups = _in_best_groups(value, TOKENS, GROUPS, TOP_GROUPS, GROUP_BEST, GROUP_BLOCK, SIZE_BLOCK)
        place = tl.where(best_groups, place, UNAVAILABLE)
    highest = tl.full([TOKENS, CHOICES], float("-inf"), tl.float32)
    numbers = tl.full([TOKENS, CHOICES], NOBODY, tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(place, 1)[:, None]
        number = best // SIZE_BLOCK * size + best % SIZE_BLOCK if GROUPS > 1 else best
        numbers = tl.where(choice == k, number.to(tl.int64), numbers)
        top = tl.max(tl.where(index == best, weight, float("-inf")), 1)[:, None]
        highest = tl.where(choice == k, top, highest)
        place = tl.where(index == best, UNAVAILABLE, place)
    if PLAIN:
        top = tl.max(highest, 1)[:, None]
        share = tl.exp(highest - top)
        if NORMALISED:
            share = share / tl.sum(share, 1)[:, None]
        else:
            share = share / tl.sum(tl.exp(score - top), 1)[:, None]
    else:
        share = tl.where(choice < TOP_K, highest, 0.0)
        if NORMALISED:
            share = share / (tl.sum(share, 1)[:, None] + MIN_SUM)
        share = share * scaling
    if PADDED:
        numbers = tl.where(tl.load(slots + token, mine, other=-1)[:, None] >= 0, numbers, NOBODY)
    target, inside = token[:, None] * TOP_K + choice, mine[:, None] & (choice < TOP_K)
    tl.store(chosen + target, numbers, inside)
    tl.store(shares + target, share, inside)


@triton.jit
def _choose(
    scores, correction, slots, chosen, shares, count, size, scaling,
    TOP_K: tl.constexpr, NORMALISED: tl.constexpr, PLAIN: tl.constexpr, SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    PADDED: tl.constexpr, NOBODY: tl.constexpr, MIN_SUM: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    expert, exists = expert_columns(count, size, GROUPS, GROUP_BLOCK, SIZE_BLOCK)
    score = tl.load(scores + token[:, None] * count + expert[None, :], exists[None, :], other=float("-inf"))
    choose_and_store(
        score, expert, exists, token, token >= 0, correction, slots, chosen, shares, size, scaling, TOP_K, NORMALISED,
        PLAIN, SIGMOID, CORRECTED, GROUPS, TOP_GROUPS, GROUP_BEST, PADDED, NOBODY, MIN_SUM, GROUP_BLOCK, SIZE_BLOCK,
        CHOICES, 1,
    )  # fmt: skip


class ExpertChoice(NamedTuple):
    """Numbers [T, top_k] int64 and shares [T, top_k] float32 of the experts that tokens choose."""

    chosen: torch.Tensor
    shares: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, spec: Experts, device: torch.device) -> ExpertChoice:
        """Memory for the choices of `tokens` tokens."""
        chosen = torch.empty(tokens, spec.top_k, dtype=torch.int64, device=device)
        return cls(chosen, torch.empty(tokens, spec.top_k, dtype=torch.float32, device=device))


def choice_constants(spec: Experts, *, padded: bool, corrected: bool) -> dict[str, bool | int | float]:
    """Constants of `choose_and_store` for a model; `padded` if the batch may have rows that choose NOBODY, `corrected`
    if there is a correction."""
    return {
        "TOP_K": spec.top_k,
        "NORMALISED": spec.normalised,
        "PLAIN": is_plain_choice(spec),
        "SIGMOID": spec.scoring == "sigmoid",
        "CORRECTED": corrected,
        "GROUPS": spec.groups,
        "TOP_GROUPS": spec.top_groups,
        "GROUP_BEST": 2 if spec.group_score == "top2" else 1,
        "PADDED": padded,
        "NOBODY": NOBODY,
        "MIN_SUM": MIN_SUM,
        "GROUP_BLOCK": triton.next_power_of_2(spec.groups),
        "SIZE_BLOCK": triton.next_power_of_2(spec.count // spec.groups),
        "CHOICES": triton.next_power_of_2(spec.top_k),
    }


def choose_experts(
    scores: torch.Tensor, spec: Experts, slots: torch.Tensor | None = None, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Pointwise.choose_experts` in one launch."""
    tokens, count = scores.shape
    choice = ExpertChoice.empty(tokens, spec, scores.device)
    if tokens:
        _choose[(tokens,)](
            scores,
            scores if correction is None else correction,
            choice.chosen if slots is None else slots,
            *choice,
            count,
            count // spec.groups,
            spec.scaling,
            **choice_constants(spec, padded=slots is not None, corrected=correction is not None),
            num_warps=1,
        )
    return choice


class SortedRows(NamedTuple):
    """Rows of tokens in the order of experts: row token * top_k + k is choice k of a token.

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


# The same for many pairs, in three launches: each program places its own PAIRS of them, and none reads all.
@triton.jit(do_not_specialize=["rows", "first"])
def _count_pairs(
    numbers, counts, rows, first, count, PAIRS: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    bins, row = tl.arange(0, BINS), tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    own = tl.load(numbers + row, row < rows, other=-1).to(tl.int32) - first
    mine = tl.histogram(tl.where((own >= 0) & (own < count), own, count), BINS)
    tl.store(counts + tl.program_id(0) * BINS + bins, mine)


@triton.jit(do_not_specialize=["programs"])
def _add_counts(
    counts, routed, programs, count, BINS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Replace each program's counts by the counts of the programs before it. The sums of all come after the last
    ones."""
    expert = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, programs, AT_ONCE):
        program = begin + tl.arange(0, AT_ONCE)
        place = counts + program[:, None] * BINS + expert[None, :]
        inside = (program < programs)[:, None] & (expert < count)[None, :]
        its = tl.load(place, inside, other=0)
        tl.store(place, total[None, :] + tl.cumsum(its, 0) - its, inside)
        total += tl.sum(its, 0)
    tl.store(counts + programs * BINS + expert, total, expert < count)
    tl.store(routed + expert, tl.load(routed + expert, expert < count, other=0) + total, expert < count)


@triton.jit(do_not_specialize=["rows", "blocks", "first"])
def _place_pairs(
    numbers, counts, members, owners, rows, blocks, first, count,
    SIZE: tl.constexpr, REACH: tl.constexpr, PAIRS: tl.constexpr, COUNTED: tl.constexpr, BINS: tl.constexpr,
    TILE: tl.constexpr, NOBODY: tl.constexpr,
):  # fmt: skip
    # BINS of the COUNTED counters are for this rank's experts.
    program, programs, bins = tl.program_id(0), tl.num_programs(0), tl.arange(0, BINS)
    total = tl.load(counts + programs * COUNTED + bins, bins < count, other=0)
    block_counts = (total + SIZE - 1) // SIZE
    before = tl.cumsum(block_counts, 0) - block_counts
    # Places of the next rows of each expert.
    at = before * SIZE + tl.load(counts + program * COUNTED + bins, bins < count, other=0)
    for begin in range(program * PAIRS, tl.minimum(rows, (program + 1) * PAIRS), TILE):
        row = begin + tl.arange(0, TILE)
        own = tl.load(numbers + row, row < rows, other=-1).to(tl.int32) - first
        own = tl.where(own < count, own, -1)
        mine = own[:, None] == bins[None, :]
        rank = tl.cumsum(mine.to(tl.int32), 0)
        place = tl.sum(tl.where(mine, at[None, :] + rank - 1, 0), 1)
        tl.store(members + place, row, own >= 0)
        at += tl.sum(mine.to(tl.int32), 0)
    for expert in range(program, count, programs):
        its = bins == expert
        start, stop = tl.sum(tl.where(its, before, 0), 0), tl.sum(tl.where(its, before + block_counts, 0), 0)
        for block in range(start, stop):
            tl.store(owners + block, expert)
        padding = start * SIZE + tl.sum(tl.where(its, total, 0), 0) + tl.arange(0, REACH)
        tl.store(members + padding, NOBODY, padding < stop * SIZE)
    for begin in range(tl.sum(block_counts, 0) + program * BINS, blocks, programs * BINS):
        tl.store(owners + begin + bins, NOBODY, begin + bins < blocks)


def sort_rows(chosen: torch.Tensor, first: int, routed: torch.Tensor, size: int) -> SortedRows:
    """Sort the rows of tokens that have chosen [T, top_k] int64 by expert, in blocks of `size` rows.

    `routed` [count] int64 counts the rows of each expert from number `first` on. Rows of other experts are left out.
    One launch, and three for more than MOST_ALONE rows.
    """
    rows, count = chosen.numel(), len(routed)
    blocks = most_blocks(rows, count, size)
    members = torch.empty(blocks, size, dtype=torch.int32, device=chosen.device)
    owners = torch.empty(blocks, dtype=torch.int32, device=chosen.device)
    bins = max(MIN_BINS, triton.next_power_of_2(count + 1))
    reach = triton.next_power_of_2(size)
    if rows <= MOST_ALONE:
        _sort[(count,)](
            chosen,
            members,
            owners,
            routed,
            rows,
            blocks,
            first,
            count,
            SIZE=size,
            REACH=reach,
            PAIRS=PAIRS,
            BINS=bins,
            NOBODY=NOBODY,
        )
        return SortedRows(members, owners)
    programs, own_bins = triton.cdiv(rows, PAIRS_EACH), triton.next_power_of_2(count)
    counts = torch.empty(programs + 1, bins, dtype=torch.int32, device=chosen.device)
    _count_pairs[(programs,)](chosen, counts, rows, first, count, PAIRS=PAIRS_EACH, BINS=bins, num_warps=1)
    _add_counts[(triton.cdiv(count, ADDED[1]),)](
        counts, routed, programs, count, BINS=bins, AT_ONCE=ADDED[0], BLOCK=ADDED[1]
    )
    _place_pairs[(programs,)](
        chosen,
        counts,
        members,
        owners,
        rows,
        blocks,
        first,
        count,
        SIZE=size,
        REACH=reach,
        PAIRS=PAIRS_EACH,
        COUNTED=bins,
        BINS=own_bins,
        TILE=min(PAIRS_EACH, PLACED // own_bins),
        NOBODY=NOBODY,
        num_warps=1,
    )
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
        # No kernel has written the parts of other experts.
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
