"""Sampling of a token per row from the model's logits, without copying or sorting them.

`ranks/kernels/random.py` explains the race that draws a token, and `ranks/kernels/plain/sampling.py` the filters.
First all blocks
of all rows are read in parallel, which gives the greatest logit and the sum of weights of each block; the first race,
among blocks, needs no more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.machine.native.structures import MASK_BITS
from weft.ranks.kernels import sampling, streams

BLOCK = streams.SAMPLING_BLOCK
SURVEY_BLOCKS = 16  # blocks that one program reads
FILTER_BLOCKS = 32  # blocks that a row's program reads or skips at once
MASK_PROGRAM_WORDS = 64  # words of a mask that one program applies

STEP = tl.constexpr(streams.SPLITMIX_STEP)
FIRST = tl.constexpr(streams.SPLITMIX_FIRST)
SECOND = tl.constexpr(streams.SPLITMIX_SECOND)
NOT_FINITE = tl.constexpr(streams.NOT_FINITE)
COLUMNS = tl.constexpr(len(sampling.COLUMNS))
TEMPERATURE, LOG_MIN_P = tl.constexpr(sampling.TEMPERATURE), tl.constexpr(sampling.LOG_MIN_P)
TOP_K, TOP_P = tl.constexpr(sampling.TOP_K), tl.constexpr(sampling.TOP_P)
LOWEST_PLACE = tl.constexpr(-(2**31))  # below the place of any float
HIGHEST_PLACE = tl.constexpr(2**31 - 1)  # the place of NaN, which greedy sampling takes for the greatest


@triton.jit
def _order_bits(x):
    """Integers that are ordered as the float32 numbers x are: int32, the same for -0 and 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & HIGHEST_PLACE), HIGHEST_PLACE)


@triton.jit
def _number(place):
    """The float32 at a place."""
    return (place ^ ((place >> 31) & HIGHEST_PLACE)).to(tl.float32, bitcast=True)


@triton.jit
def _finite(x):
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@triton.jit
def _times(stream, index):
    """Number `index` of `random.exponentials` of a stream, in float64."""
    bits = _mix(stream + (index + 1).to(tl.uint64) * STEP) >> 12
    return -tl.log((bits.to(tl.float64) + 0.5) * 2.0**-52)


@triton.jit
def _weights(x, best, temperature):
    """exp((x - best) / temperature), for x up to `best`; temperature 0 counts as 1."""
    # If the best logit is not finite nothing can be drawn, and any number will do.
    base = tl.where(_finite(best), best, 0.0)
    return tl.exp((x - base) / tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def _tile(logits, block, vocab, BLOCK: tl.constexpr):
    """Logits of some blocks of a row: [blocks, BLOCK] float32, -inf past its end."""
    tokens = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return tl.load(logits + tokens, tokens < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _survey(
    logits, stride, vocab, slots, settings, tops, sums, floors, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Store, for each block, the place of its greatest logit, and the sum of weights relative to that logit."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS
    temperature = tl.load(settings + tl.load(slots + row) * COLUMNS + TEMPERATURE).to(tl.float32)
    block = first + tl.arange(0, BLOCKS)
    x = _tile(logits + row * stride, block, vocab, BLOCK)
    top = tl.max(_order_bits(x), 1)
    total = tl.sum(_weights(x, _number(top)[:, None], temperature), 1)
    tl.store(tops + row * blocks + block, top, block < blocks)
    tl.store(sums + row * blocks + block, total, block < blocks)
    if first == 0:
        tl.store(floors + row, float("-inf"))


@triton.jit
def _list(top, low, listed, ALL: tl.constexpr):
    """List the blocks that have any logit from the place `low` up; return their number."""
    wanted = top >= low
    tl.debug_barrier()  # all threads have read the last list
    tl.store(listed + tl.cumsum(wanted.to(tl.int32), 0) - 1, tl.arange(0, ALL), wanted)
    tl.debug_barrier()
    return tl.sum(wanted.to(tl.int32), 0)


@triton.jit
def _tally(
    logits, vocab, tops, listed, count, pivot, best, temperature,
    MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sum of the weights (if MASS), or number, of logits in listed blocks from the place `pivot` up, in float64; the
    lowest of their places; and the highest place of the other logits. Blocks without such logits are not read."""
    total = tl.full((), 0.0, tl.float64)
    above = tl.full((), HIGHEST_PLACE, tl.int32)
    below = tl.full((), LOWEST_PLACE, tl.int32)
    for first in range(0, count, BLOCKS):
        index = first + tl.arange(0, BLOCKS)
        block = tl.load(listed + index, index < count, other=vocab)  # past the end
        top = tl.max(tl.load(tops + block, index < count, other=LOWEST_PLACE), 0)
        if top >= pivot:
            x = _tile(logits, block, vocab, BLOCK)
            place = _order_bits(x)
            counts = place >= pivot
            if MASS:
                total += tl.sum(tl.where(counts, _weights(x, best, temperature), 0.0)).to(tl.float64)
            else:
                total += tl.sum(counts.to(tl.int32)).to(tl.float64)
            above = tl.minimum(above, tl.min(tl.where(counts, place, HIGHEST_PLACE)))
            below = tl.maximum(below, tl.max(tl.where(counts, LOWEST_PLACE, place)))
        else:
            below = tl.maximum(below, top)
    return total, above, below


@triton.jit
def _middle(low, high):
    """Mean of two places, rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _last(
    logits, vocab, tops, listed, count, low, goal, best, temperature,
    MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Highest place from which up the weights in listed blocks (if MASS), or their number, reach `goal`, but at least
    `low`.

    The range of places is halved in each pass, so 32 passes are enough for any logits. Both ends move to places of
    actual logits, which takes fewer passes: bfloat16 has half as many bits.
    """
    high = _order_bits(best)
    while low < high:
        pivot = _middle(low, high)
        total, above, below = _tally(logits, vocab, tops, listed, count, pivot, best, temperature, MASS, BLOCK, BLOCKS)
        if total >= goal:
            low = above
        else:
            high = tl.maximum(low, below)
    return low


@triton.jit
def _last_top(top, number, low):
    """Place of the `number`-th greatest of `top`, but at least `low`. As many logits are at that place or above."""
    high = tl.max(top, 0)
    while low < high:
        pivot = _middle(low, high)
        if tl.sum((top >= pivot).to(tl.int32), 0) >= number:
            low = pivot
        else:
            high = pivot - 1
    return low


@triton.jit
def _filter(
    logits, stride, vocab, slots, settings, tops, sums, floors, blocks, lists,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Store the lowest logit of a row that min-p, top-k and top-p keep, and its blocks' sums over kept logits only."""
    row = tl.program_id(0).to(tl.int64)
    mine = settings + tl.load(slots + row) * COLUMNS
    temperature, log_min_p = tl.load(mine + TEMPERATURE).to(tl.float32), tl.load(mine + LOG_MIN_P).to(tl.float32)
    top_k, top_p = tl.load(mine + TOP_K), tl.load(mine + TOP_P)
    logits, listed, tops, sums = logits + row * stride, lists + row * blocks, tops + row * blocks, sums + row * blocks
    every = tl.arange(0, ALL)
    top = tl.load(tops + every, every < blocks, other=LOWEST_PLACE)
    best = _number(tl.max(top, 0))
    limited = (top_k > 0) & (top_k < vocab)
    filtered = limited | (log_min_p > float("-inf")) | (top_p < 1)
    if (temperature > 0) & filtered & _finite(best):
        low = _order_bits(best + temperature * log_min_p)
        if limited:
            low = _last_top(top, top_k, low)
        count = _list(top, low, listed, ALL)
        if limited:
            low = _last(logits, vocab, tops, listed, count, low, top_k, best, temperature, False, BLOCK, BLOCKS)
        if top_p < 1:
            total, _, _ = _tally(logits, vocab, tops, listed, count, low, best, temperature, True, BLOCK, BLOCKS)
            # A whole vocabulary of tokens that unlikely would be half of the weight that top-p leaves out.
            low = tl.maximum(low, _order_bits(best + temperature * tl.log((1 - top_p) / 2 / vocab).to(tl.float32)))
            count = _list(top, low, listed, ALL)
            goal = total * top_p
            low = _last(logits, vocab, tops, listed, count, low, goal, best, temperature, True, BLOCK, BLOCKS)
        tl.store(floors + row, _number(low))
        tl.store(sums + every, 0.0, (every < blocks) & (top < low))
        count = _list(top, low, listed, ALL)
        for first in range(0, count, BLOCKS):
            index = first + tl.arange(0, BLOCKS)
            block = tl.load(listed + index, index < count, other=vocab)
            peak = tl.load(tops + block, index < count, other=LOWEST_PLACE)
            x = _tile(logits, block, vocab, BLOCK)
            kept = tl.where(_order_bits(x) >= low, _weights(x, _number(peak)[:, None], temperature), 0.0)
            tl.store(sums + block, tl.sum(kept, 1), index < count)


@triton.jit
def _draw(
    logits, stride, vocab, slots, positions, settings, keys, tops, sums, floors, blocks, chosen,
    BLOCK: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Store a row's token: the winner of its two races, or, for a greedy row, the first of its greatest logits."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    temperature = tl.load(settings + slot * COLUMNS + TEMPERATURE).to(tl.float32)
    key = tl.load(keys + slot).to(tl.uint64, bitcast=True)
    stream = _mix(_mix(key) + tl.load(positions + row).to(tl.uint64) * STEP)
    block, member = tl.arange(0, ALL), tl.arange(0, BLOCK)
    top = tl.load(tops + row * blocks + block, block < blocks, other=LOWEST_PLACE)
    best = _number(tl.max(top, 0))
    won = tl.argmax(top, 0)
    if temperature > 0:
        total = tl.load(sums + row * blocks + block, block < blocks, other=0.0)
        total *= _weights(_number(top), best, temperature)
        won = tl.argmax(tl.where(block < blocks, total.to(tl.float64) / _times(stream, block), -1.0), 0)
    token = won * BLOCK + member
    x = tl.load(logits + row * stride + token, token < vocab, other=float("-inf")).to(tl.float32)
    place = _order_bits(x)
    best_member = tl.argmax(place, 0)
    if temperature > 0:
        kept = (token < vocab) & (x >= tl.load(floors + row))
        weights = tl.where(kept, _weights(x, _number(tl.max(place, 0)), temperature), 0.0)
        best_member = tl.argmax(weights.to(tl.float64) / _times(stream, blocks + member), 0)
    tl.store(chosen + row, tl.where(_finite(best), won * BLOCK + best_member, NOT_FINITE).to(tl.int64))


@triton.jit
def _mask(logits, stride, vocab, rows, masks, words, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Store -inf for the tokens whose bit is 0, of the mask's words from program_id(1) * WORDS on."""
    number = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, BITS)
    allowed = (tl.load(masks + number * words + word, word < words, other=0)[:, None] >> bit[None, :]) & 1
    token = word[:, None] * BITS + bit[None, :]
    at = logits + tl.load(rows + number) * stride + token
    tl.store(at, float("-inf"), (allowed == 0) & (token < vocab))


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """`Sampling.apply_masks` in one launch."""
    count, words = masks.shape
    if count:
        _mask[(count, triton.cdiv(words, MASK_PROGRAM_WORDS))](
            logits, logits.stride(0), logits.shape[1], rows, masks, words, BITS=MASK_BITS, WORDS=MASK_PROGRAM_WORDS
        )


def survey(
    logits: torch.Tensor, slots: torch.Tensor, settings: torch.Tensor, *, filtered: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Place of the greatest logit of each block, [R, B] int32; sum of its weights, [R, B] float32; lowest logit that
    each row's filters keep, [R] float32. Arguments are as in `sample_tokens`."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    tops = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    floors = torch.empty(rows, dtype=torch.float32, device=logits.device)
    arguments = (logits, logits.stride(0), vocab, slots, settings, tops, sums, floors, blocks)
    grid = (rows, triton.cdiv(blocks, SURVEY_BLOCKS))
    _survey[grid](*arguments, BLOCK=BLOCK, BLOCKS=SURVEY_BLOCKS, num_warps=8)
    if filtered:
        every, lists = triton.next_power_of_2(blocks), torch.empty_like(tops)
        _filter[(rows,)](*arguments, lists, BLOCK=BLOCK, BLOCKS=FILTER_BLOCKS, ALL=every, num_warps=16)
    return tops, sums, floors


def sample_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    *,
    filtered: bool,
) -> torch.Tensor:
    """Sample one token per row: [R] int64, from `logits` [R, V] of any float type; NOT_FINITE if a row's greatest logit
    is not finite.

    `slots` [R] int64 are the rows' request slots, and `positions` [R] int64 the positions of their new tokens. By
    request slot, `settings` [S, 4] float64 are temperature (0: greedy), logarithm of min-p, top-k and top-p, and `keys`
    [S] int64 are the bits of the random streams' keys. Without `filtered`, no row has min-p, top-k or top-p.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        tops, sums, floors = survey(logits, slots, settings, filtered=filtered)
        blocks = tops.shape[1]
        requests, surveyed = (slots, positions, settings, keys), (tops, sums, floors, blocks)
        _draw[(rows,)](
            logits, logits.stride(0), vocab, *requests, *surveyed, chosen,
            BLOCK=BLOCK, ALL=triton.next_power_of_2(blocks), num_warps=8,
        )  # fmt: skip
    return chosen
