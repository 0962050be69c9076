"""Latent attention over a paged cache of latents, in the absorbed form: each latent is read once for the keys and the
values of a block of heads. Decode rows are split among programs as in attention.py, whose parts are joined alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.ranks.kernels import attention_inputs
from weft.ranks.kernels.attention import AttentionShape, KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.latents import AbsorbedQueries, ExpandedContext, LatentDims, LatentNorm
from weft.ranks.kernels.triton.attention import LN_2, LOG2_E, MAX_SPLITS, MIN_PRODUCT, _join
from weft.ranks.kernels.usable import AMPERE_SHARED_BYTES
from weft.ranks.kernels.warm import KernelLaunch, first_of_variants

HEADS = 16  # query heads of a program that decodes
QUERIES = 32  # queries of a program of a row of several tokens, tokens times heads
QUERY_BYTES = 1 << 10  # bytes of the widest query for which this many fit next to the latents; else half
PROGRAMS = 2  # per multiprocessor, until which contexts are split
TILE_BYTES = 32 << 10  # bytes of the latents that a program works on at once
WIDE_HEADS, WIDE_TILE = 64, 64  # queries and latents of a program that multiplies by warp groups
WIDE_SHARED_BYTES = 216 << 10  # bytes of shared memory that such a program takes, with latents of 512 + 64 values
EXPANDED_WIDTH = 1 << 10  # bytes of a key and its value, the next power of two, of which whole tiles fit
JOINED_NUMBERS = 512  # float32 numbers of one part of a context that a warp joins at once
WIDE_SPLITS = 4  # parts of a context, up to which wide programs decode: then all latents are read half as often
ROTATED = 8  # heads of queries that a program rotates


@triton.jit
def _load_queries(q, places, kept, width, WIDTH: tl.constexpr):
    """A part of queries at `places` [ROWS], `width` columns of it: [ROWS, WIDTH]."""
    columns = tl.arange(0, WIDTH)
    return tl.load(q + places[:, None] + columns[None, :], kept[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _load_rows(rows, places, exists, width: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Rows [M, WIDTH] of `width` columns at `places` [M]; if MASKED, zeros for rows that do not exist."""
    columns = tl.arange(0, WIDTH)
    at = rows + places[:, None] + columns[None, :]
    if MASKED:
        loaded = tl.load(at, exists[:, None] & (columns < width)[None, :], other=0.0)
    elif width == WIDTH:
        loaded = tl.load(at)
    else:
        loaded = tl.load(at, (columns < width)[None, :], other=0.0)
    return loaded


@triton.jit
def _weigh(scores, scale, top, total):
    """One tile of the online softmax: the weights of unscaled `scores`, the factor by which earlier sums fade, the new
    maximum and the new sum of weights."""
    peak = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key yet stays as it is: infinity less infinity would be NaN.
    still = tl.where(peak == float("-inf"), 0.0, peak) * scale
    weights, fade = tl.exp2(scores * scale - still[:, None]), tl.exp2(top * scale - still)
    return weights, fade, peak, total * fade + tl.sum(weights, 1)


@triton.jit
def _mix_tile(
    low, high, latents, table, at, stop, last, scale, top, total, mixed,
    rank: tl.constexpr, rope_dim: tl.constexpr, KV_BLOCK: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The maximum, sum of weights and weighted latents after TILE positions from `at` on; unless MASKED, all of them
    exist and are seen by every row."""
    position = at + tl.arange(0, TILE)
    exists = position < stop
    block = tl.load(table + position // KV_BLOCK, exists, other=0).to(tl.int64)
    place = (block * KV_BLOCK + position % KV_BLOCK) * (rank + rope_dim)
    latent = _load_rows(latents, place, exists, rank, RANK, MASKED)
    rotated = _load_rows(latents + rank, place, exists, rope_dim, ROPE, MASKED)
    scores = tl.dot(low, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(high, tl.trans(rotated), acc=scores, input_precision="ieee")
    if MASKED:
        scores = tl.where(exists[None, :] & (position[None, :] <= last[:, None]), scores, float("-inf"))
    weights, fade, top, total = _weigh(scores, scale, top, total)
    mixed = tl.dot(weights.to(latent.dtype), latent, acc=mixed * fade[:, None], input_precision="ieee")
    return top, total, mixed


@triton.jit
def _mix_latents(
    low, high, latents, table, start, whole, stop, last, scale,
    rank: tl.constexpr, rope_dim: tl.constexpr, KV_BLOCK: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Weighted latents [ROWS, RANK] over positions [start, stop), and logarithms to base 2 of the sums of weights. A
    row sees positions up to its `last`; one that sees none gets zeros. All rows see the tiles before `whole`."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, RANK], tl.float32)
    if whole is not None:
        for at in range(start, whole, TILE):
            top, total, mixed = _mix_tile(
                low, high, latents, table, at, stop, last, scale, top, total, mixed, rank, rope_dim, KV_BLOCK, RANK,
                ROPE, TILE, False,
            )  # fmt: skip
        start = whole
    for at in range(start, stop, TILE):
        top, total, mixed = _mix_tile(
            low, high, latents, table, at, stop, last, scale, top, total, mixed, rank, rope_dim, KV_BLOCK, RANK, ROPE,
            TILE, True,
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)
    return mixed / total[:, None], top * scale + tl.log2(total)


# Integers that differ from step to step must not cause a new compilation.
@triton.jit(do_not_specialize=["table_width", "splits"])
def _decode_latents(
    q, rotated, latents, out, lse, parts, sums, through, tables, context, order, table_width, q_head, rotated_head,
    heads, rank: tl.constexpr, rope_dim: tl.constexpr, scale, splits, SPLIT: tl.constexpr, LSE: tl.constexpr,
    KV_BLOCK: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    # Blocks of heads first: programs that run at the same time then read the same latents.
    block, row, split = tl.program_id(0), tl.load(order + tl.program_id(1)), tl.program_id(2)
    length = tl.load(context + row)
    # Each split has whole tiles, so that nothing is read twice.
    share = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    start = split * share
    members, columns = block * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK)
    mine = members < heads
    each = row.to(tl.int64) * heads + members
    kept = mine[:, None] & (columns < rank)[None, :]
    low = _load_queries(q, each * q_head, mine, rank, RANK)
    high = _load_queries(rotated, each * rotated_head, mine, rope_dim, ROPE)
    # A row without context is padding of a captured batch: it gets zeros.
    last = tl.full([ROWS], length - 1, tl.int32)
    result, logs = _mix_latents(
        low, high, latents, tables + row.to(tl.int64) * table_width, start, None, tl.minimum(start + share, length),
        last, scale, rank, rope_dim, KV_BLOCK, ROWS, RANK, ROPE, TILE,
    )  # fmt: skip
    if SPLIT:
        at_part = each * splits + split
        tl.store(parts + at_part[:, None] * rank + columns[None, :], result, kept)
        tl.store(sums + at_part, logs, mine)
        # All threads have written before one of them counts this part as finished.
        tl.debug_barrier()
        arrived = through + row * tl.num_programs(0) + block
        if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
            tl.store(arrived, 0)  # for the next layer
            # Some columns at a time: all of them, of the parts that are loaded at once, would not fit the registers.
            some = tl.arange(0, JOINED)
            for at in range(0, rank, JOINED):
                within = mine[:, None] & (at + some < rank)[None, :]
                joined, logs = _join(parts + at, sums, each, mine, within, splits, rank, ROWS, JOINED)
                target = out + each[:, None] * rank + at + some[None, :]
                tl.store(target, joined.to(out.dtype.element_ty), within)
                if LSE:
                    tl.store(lse + each, logs * LN_2, mine)
    else:
        tl.store(out + each[:, None] * rank + columns[None, :], result.to(out.dtype.element_ty), kept)
        if LSE:
            tl.store(lse + each, logs * LN_2, mine)


@triton.jit(do_not_specialize=["first_row", "rows", "table_width"])
def _prefill_latents(
    q, rotated, latents, out, lse, row_starts, tables, context, first_row, rows, table_width, q_head, rotated_head,
    heads, rank: tl.constexpr, rope_dim: tl.constexpr, scale, LSE: tl.constexpr, KV_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    # Row r's programs begin at (its first query // ROWS) + r: there is at most one surplus program per row.
    origin = tl.load(row_starts + first_row)
    low, high = 0, rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = (tl.load(row_starts + first_row + middle) - origin) * heads // ROWS + middle
        if begins <= number:
            low = middle
        else:
            high = middle - 1
    row = first_row + low
    start = tl.load(row_starts + row)
    count = tl.load(row_starts + row + 1) - start
    # A row's last queries first: they see the most latents, and would run alone at the end.
    first = (tl.cdiv(count * heads, ROWS) - 1 - number + (start - origin) * heads // ROWS + low) * ROWS
    if first >= 0:
        length = tl.load(context + row)
        query, columns = first + tl.arange(0, ROWS), tl.arange(0, RANK)
        real = query < count * heads
        each = start.to(tl.int64) * heads + query
        last = length - count + query // heads
        near = _load_queries(q, each * q_head, real, rank, RANK)
        far = _load_queries(rotated, each * rotated_head, real, rope_dim, ROPE)
        stop = length - count + tl.minimum(first + ROWS - 1, count * heads - 1) // heads + 1
        whole = (length - count + first // heads + 1) // TILE * TILE
        result, logs = _mix_latents(
            near, far, latents, tables + row.to(tl.int64) * table_width, 0, whole, stop, last, scale, rank, rope_dim,
            KV_BLOCK, ROWS, RANK, ROPE, TILE,
        )  # fmt: skip
        kept = real[:, None] & (columns < rank)[None, :]
        tl.store(out + each[:, None] * rank + columns[None, :], result.to(out.dtype.element_ty), kept)
        if LSE:
            tl.store(lse + each, logs * LN_2, real)


@triton.jit
def _expanded_tile(
    low, high, keys, values, rotated, at, stop, last, key_row, value_row, rotated_row, scale, top, total, mixed,
    nope_dim: tl.constexpr, rope_dim: tl.constexpr, value_dim: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    VALUE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The same as `_mix_tile` for keys and values of one head, rows of which are `key_row` and `value_row` apart."""
    position = at + tl.arange(0, TILE)
    exists, place = position < stop, position.to(tl.int64)
    key = _load_rows(keys, place * key_row, exists, nope_dim, NOPE, MASKED)
    shared = _load_rows(rotated, place * rotated_row, exists, rope_dim, ROPE, MASKED)
    scores = tl.dot(low, tl.trans(key), input_precision="ieee")
    scores = tl.dot(high, tl.trans(shared), acc=scores, input_precision="ieee")
    if MASKED:
        scores = tl.where(exists[None, :] & (position[None, :] <= last[:, None]), scores, float("-inf"))
    value = _load_rows(values, place * value_row, exists, value_dim, VALUE, MASKED)
    weights, fade, top, total = _weigh(scores, scale, top, total)
    mixed = tl.dot(weights.to(value.dtype), value, acc=mixed * fade[:, None], input_precision="ieee")
    return top, total, mixed


# Integers that differ from step to step must not cause a new compilation.
@triton.jit(do_not_specialize=["tokens", "context"])
def _attend_expanded(
    q, keys, values, rotated, out, tokens, context, q_row, key_row, value_row, rotated_row, out_row, key_head,
    value_head, scale, nope_dim: tl.constexpr, rope_dim: tl.constexpr, value_dim: tl.constexpr, NOPE: tl.constexpr,
    ROPE: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # The last tokens first: they see the most keys, and would run alone at the end.
    first, head = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS, tl.program_id(1).to(tl.int64)
    token, columns = first + tl.arange(0, ROWS), tl.arange(0, VALUE)
    real, before = token < tokens, context - tokens
    places = token.to(tl.int64) * q_row + head * (nope_dim + rope_dim)
    low = _load_queries(q, places, real, nope_dim, NOPE)
    high = _load_queries(q, places + nope_dim, real, rope_dim, ROPE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE], tl.float32)
    keys += head * key_head
    values += head * value_head
    # All tokens see the tiles before `whole`, so nothing of these is masked.
    whole, stop = (before + first + 1) // TILE * TILE, before + tl.minimum(first + ROWS, tokens)
    for at in range(0, whole, TILE):
        top, total, mixed = _expanded_tile(
            low, high, keys, values, rotated, at, stop, before + token, key_row, value_row, rotated_row, scale, top,
            total, mixed, nope_dim, rope_dim, value_dim, NOPE, ROPE, VALUE, TILE, False,
        )  # fmt: skip
    for at in range(whole, stop, TILE):
        top, total, mixed = _expanded_tile(
            low, high, keys, values, rotated, at, stop, before + token, key_row, value_row, rotated_row, scale, top,
            total, mixed, nope_dim, rope_dim, value_dim, NOPE, ROPE, VALUE, TILE, True,
        )  # fmt: skip
    target = out + (token.to(tl.int64) * out_row + head * value_dim)[:, None] + columns[None, :]
    kept = real[:, None] & (columns < value_dim)[None, :]
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), kept)


@triton.jit
def _turn(source, target, angles, exists, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """Rotate [M] rows of 2 `half` columns at `source` [M, 1] into `target`, which may be the same."""
    columns = tl.arange(0, HALF)[None, :]
    inside = exists & (columns < half)
    cos = tl.load(angles + columns, columns < half, other=0.0)
    sin = tl.load(angles + half + columns, columns < half, other=0.0)
    if INTERLEAVED:
        a, b = tl.load(source + 2 * columns, inside, other=0.0), tl.load(source + 2 * columns + 1, inside, other=0.0)
    else:
        a, b = tl.load(source + columns, inside, other=0.0), tl.load(source + half + columns, inside, other=0.0)
    # All threads have read before one of them writes.
    tl.debug_barrier()
    x, y = a.to(tl.float32), b.to(tl.float32)
    tl.store(target + columns, (x * cos - y * sin).to(target.dtype.element_ty), inside)
    tl.store(target + half + columns, (y * cos + x * sin).to(target.dtype.element_ty), inside)


@triton.jit
def _store_latents(
    q, latents, cache, rope, angle_rows, slots, norm, eps, heads, head_dim, rank, half,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = rope + tl.load(angle_rows + token).to(tl.int64) * 2 * half
    if part > 0:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        turned = q + (token * heads + head + 1) * head_dim - 2 * half
        _turn(turned, turned, angles, head < heads, half, INTERLEAVED, HALF)
    else:
        slot, width = tl.load(slots + token), rank + 2 * half
        # A padding row of a captured batch has slot -1.
        if slot >= 0:
            columns = tl.arange(0, RANK)
            inside = columns < rank
            latent = tl.load(latents + token * width + columns, inside, other=0.0)
            exact = latent.to(tl.float32)
            rate = tl.rsqrt(tl.sum(exact * exact, 0) / rank + eps)
            weight = tl.load(norm + columns, inside, other=0.0).to(tl.float32)
            normed = ((exact * rate).to(latent.dtype).to(tl.float32) * weight).to(cache.dtype.element_ty)
            tl.store(cache + slot * width + columns, normed, inside)
            one = tl.zeros([1, 1], tl.int64)
            source, target = latents + token * width + rank + one, cache + slot * width + rank + one
            _turn(source, target, angles, one == 0, half, INTERLEAVED, HALF)


def splits_of(programs: int, wanted: int) -> int:
    """Number of parts into which the contexts of a decode step are split that would take `programs` programs, so that
    it takes about `wanted`."""
    return max(1, min(MAX_SPLITS, triton.cdiv(wanted, programs)))


class LatentTiles(NamedTuple):
    """Sizes of a program: the columns of the two parts of a latent, the `queries` of a program (tokens times heads),
    the latents of a tile, the tiles that are loaded ahead, and its warps."""

    low: int
    high: int
    queries: int
    latents: int
    stages: int
    warps: int

    @property
    def joined(self) -> int:
        """Columns of the parts of a context that a program joins at once."""
        return min(self.low, JOINED_NUMBERS * self.warps // self.queries)


class LatentSizes(NamedTuple):
    """Sizes on a device: of programs that decode, of programs for rows of several tokens, and of programs that decode
    many heads by warp groups, if the device has these instructions."""

    decode: LatentTiles
    prefill: LatentTiles
    wide: LatentTiles | None


def latent_sizes(rank: int, width: int, dtype: torch.dtype, shared: int, *, warp_groups: bool = False) -> LatentSizes:
    """Sizes whose programs need at most `shared` bytes of shared memory; `warp_groups`: the device multiplies by groups
    of four warps, as Hopper does."""
    low, high = (max(MIN_PRODUCT, triton.next_power_of_2(part)) for part in (rank, width - rank))
    if shared < AMPERE_SHARED_BYTES:
        # Turing multiplies in 32 bits, and has 64 KiB for the queries and the latents.
        few = LatentTiles(low, high, HEADS // 2, MIN_PRODUCT, 1, 4)
        return LatentSizes(few, few._replace(warps=8), None)
    latents = max(MIN_PRODUCT, min(64, TILE_BYTES // (low * dtype.itemsize)))
    decode = LatentTiles(low, high, HEADS, latents, 2, 4)
    if warp_groups and shared >= WIDE_SHARED_BYTES and dtype.itemsize == 2:
        wide = LatentTiles(low, high, WIDE_HEADS, WIDE_TILE, 2, 8)
        return LatentSizes(decode, wide, wide)
    queries = QUERIES // 2 if low * dtype.itemsize > QUERY_BYTES else QUERIES
    return LatentSizes(decode, LatentTiles(low, high, queries, latents, 2, 8), None)


class ExpandedTiles(NamedTuple):
    """Sizes of a program in the expanded form: columns of the two parts of a key and of a value, tokens, keys of a
    tile, tiles that are on their way at once, and warps."""

    nope: int
    rope: int
    value: int
    tokens: int
    keys: int
    stages: int
    warps: int


def expanded_tiles(
    nope_dim: int, rope_dim: int, value_dim: int, dtype: torch.dtype, shared: int, *, warp_groups: bool = False
) -> ExpandedTiles:
    """Sizes whose programs need at most `shared` bytes of shared memory."""
    nope, rope, value = (max(MIN_PRODUCT, triton.next_power_of_2(part)) for part in (nope_dim, rope_dim, value_dim))
    # Fewer of wider heads, or of numbers of 32 bits, fit.
    part = max(1, triton.next_power_of_2((nope + rope + value) * dtype.itemsize) // EXPANDED_WIDTH)
    if shared < AMPERE_SHARED_BYTES:
        return ExpandedTiles(nope, rope, value, max(MIN_PRODUCT, 32 // part), MIN_PRODUCT, 1, 4)
    tokens, keys = max(MIN_PRODUCT, 128 // part), max(MIN_PRODUCT, (64 if warp_groups else 32) // part)
    return ExpandedTiles(nope, rope, value, tokens, keys, 2, 8)


def decode_tiles(sizes: LatentSizes, processors: int, rows: int, heads: int) -> tuple[LatentTiles, int]:
    """Sizes for a decode step of `rows` rows, and the number of parts of each context.

    A wide program takes a multiprocessor for itself, and reads the latents once for four times as many heads.
    """
    if sizes.wide and heads >= WIDE_HEADS:
        splits = splits_of(rows * triton.cdiv(heads, WIDE_HEADS), processors)
        if splits <= WIDE_SPLITS:
            return sizes.wide, splits
    return sizes.decode, splits_of(rows * triton.cdiv(heads, sizes.decode.queries), PROGRAMS * processors)


class TritonLatents:
    """The Triton implementation of `LatentKernels`. `processors` is the number of the device's multiprocessors,
    `shared` the bytes of shared memory that a program may ask for. With `warp_groups` the device multiplies by groups
    of four warps."""

    def __init__(self, processors: int, shared: int = AMPERE_SHARED_BYTES, *, warp_groups: bool = False) -> None:
        self._processors, self._shared, self._warp_groups = processors, shared, warp_groups
        # By their number. They are never freed, as CUDA graphs read them.
        self._through: dict[int, torch.Tensor] = {}

    def rotate_and_store(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        rope: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        norm: LatentNorm,
        *,
        interleaved: bool,
    ) -> None:
        (tokens, heads, head_dim), rank = q.shape, len(norm.weight)
        half = (latents.shape[1] - rank) // 2
        _store_latents[(tokens, 1 + triton.cdiv(heads, ROTATED))](
            q,
            latents,
            cache.keys,
            rope,
            batch.angle_rows,
            batch.slots,
            norm.weight,
            norm.eps,
            heads,
            head_dim,
            rank,
            half,
            INTERLEAVED=interleaved,
            HEADS=ROTATED,
            RANK=triton.next_power_of_2(rank),
            HALF=triton.next_power_of_2(half),
            num_warps=1,
        )

    def attend(
        self, q: AbsorbedQueries, cache: KVCache, batch: Batch, scale: float, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert all(part.stride(0) == part.shape[1] * part.stride(1) for part in q), "heads lie one after the other"
        out = q.latent.new_empty(q.latent.shape)
        if batch.decodes:
            self._decode(q, cache, batch, scale, out, lse)
        if batch.decodes < batch.rows:
            self._prefill(q, cache, batch, scale, out, lse)
        return out

    def attend_expanded(self, q: torch.Tensor, context: ExpandedContext, scale: float, out: torch.Tensor) -> None:
        (tokens, heads, _), (keys, values, rotated) = q.shape, context
        dims = keys.shape[2], rotated.shape[1], values.shape[2]
        tiles = expanded_tiles(*dims, q.dtype, self._shared, warp_groups=self._warp_groups)
        _attend_expanded[(triton.cdiv(tokens, tiles.tokens), heads)](
            q,
            keys,
            values,
            rotated,
            out,
            tokens,
            len(keys),
            q.stride(0),
            keys.stride(0),
            values.stride(0),
            rotated.stride(0),
            out.stride(0),
            keys.stride(1),
            values.stride(1),
            scale * LOG2_E,
            *dims,
            NOPE=tiles.nope,
            ROPE=tiles.rope,
            VALUE=tiles.value,
            ROWS=tiles.tokens,
            TILE=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def _decode(
        self,
        q: AbsorbedQueries,
        cache: KVCache,
        batch: Batch,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        (_, heads, rank), rope_dim, rows = out.shape, q.rotated.shape[2], batch.decodes
        tiles, splits = decode_tiles(self._sizes(rank, rope_dim, out.dtype), self._processors, rows, heads)
        blocks = triton.cdiv(heads, tiles.queries)
        count = triton.next_power_of_2(rows * blocks)
        if count not in self._through:
            self._through[count] = torch.zeros(count, dtype=torch.int32, device=out.device)
        parts = sums = out
        if splits > 1:
            parts = out.new_empty((rows, heads, splits, rank), dtype=torch.float32)
            sums = out.new_empty((rows, heads, splits), dtype=torch.float32)
        _decode_latents[(blocks, rows, splits)](
            *q,
            cache.keys,
            out,
            out if lse is None else lse,
            parts,
            sums,
            self._through[count],
            batch.tables,
            batch.context,
            batch.order,
            batch.tables.stride(0),
            q.latent.stride(1),
            q.rotated.stride(1),
            heads,
            rank,
            rope_dim,
            scale * LOG2_E,
            splits,
            SPLIT=splits > 1,
            LSE=lse is not None,
            KV_BLOCK=cache.block_size,
            ROWS=tiles.queries,
            RANK=tiles.low,
            ROPE=tiles.high,
            TILE=tiles.latents,
            JOINED=tiles.joined,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def _prefill(
        self,
        q: AbsorbedQueries,
        cache: KVCache,
        batch: Batch,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        (tokens, heads, rank), rope_dim, rows = out.shape, q.rotated.shape[2], batch.rows - batch.decodes
        tiles = self._sizes(rank, rope_dim, out.dtype).prefill
        _prefill_latents[((tokens - batch.decodes) * heads // tiles.queries + rows,)](
            *q,
            cache.keys,
            out,
            out if lse is None else lse,
            batch.row_starts,
            batch.tables,
            batch.context,
            batch.decodes,
            rows,
            batch.tables.stride(0),
            q.latent.stride(1),
            q.rotated.stride(1),
            heads,
            rank,
            rope_dim,
            scale * LOG2_E,
            LSE=lse is not None,
            KV_BLOCK=cache.block_size,
            ROWS=tiles.queries,
            RANK=tiles.low,
            ROPE=tiles.high,
            TILE=tiles.latents,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def _sizes(self, rank: int, rope_dim: int, dtype: torch.dtype) -> LatentSizes:
        return latent_sizes(rank, rank + rope_dim, dtype, self._shared, warp_groups=self._warp_groups)

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        assert shape.latent
        dims = LatentDims.of(shape.latent, shape.q_heads)
        # The kernels that read latents see one KV head, and no keys' width but theirs.
        absorbed = replace(shape, kv_heads=1, head_dim=dims.rank + dims.rope_dim, latent=None)

        def attend(q: torch.Tensor, cache: KVCache, batch: Batch) -> torch.Tensor:
            # Laid out as in `LatentProducts.absorb`: the rotated part has stayed among the expanded queries.
            whole = q.new_zeros(*q.shape[:2], dims.nope_dim + dims.rope_dim)
            parts = AbsorbedQueries(q[..., : dims.rank].contiguous(), whole[..., dims.nope_dim :])
            return self.attend(parts, KVCache.of_latents(cache.keys, dims.rank), batch, shape.scale)

        sizes = self._sizes(dims.rank, dims.rope_dim, shape.dtype)

        def variant(rows: int) -> tuple[LatentTiles, bool]:
            tiles, splits = decode_tiles(sizes, self._processors, rows, shape.q_heads)
            return tiles, splits > 1

        variants = first_of_variants(variant, shape.rows)
        decodes = [attention_inputs.decode_inputs(absorbed, device, [1] * rows) for rows in variants]
        prompts = [attention_inputs.prompt_inputs(absorbed, device, [2], [2])] * (shape.length > 1)
        # Triton compiles another kernel if a row's length is no multiple of 16.
        expanded = first_of_variants(lambda heads: heads * (dims.nope_dim + dims.value_dim) % 16, shape.q_heads)
        return [
            [partial(attend, *inputs) for inputs in decodes],
            [partial(attend, *inputs) for inputs in prompts],
            [partial(self._attend_expanded, shape, dims, heads, device) for heads in expanded],
        ]

    def _attend_expanded(self, shape: AttentionShape, dims: LatentDims, heads: int, device: torch.device) -> None:
        """Attention of one prompt in the expanded form, with the first `heads` heads."""

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=shape.dtype, device=device)

        keys, values = zeros(2, heads, dims.nope_dim + dims.value_dim).split((dims.nope_dim, dims.value_dim), dim=2)
        context = ExpandedContext(keys, values, zeros(2, dims.rank + dims.rope_dim)[:, dims.rank :])
        q, out = zeros(2, dims.heads, dims.nope_dim + dims.rope_dim), zeros(2, dims.heads, dims.value_dim)
        self.attend_expanded(q[:, :heads], context, shape.scale, out[:, :heads])
