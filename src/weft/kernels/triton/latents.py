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

from weft.kernels import attention_inputs
from weft.kernels.base import AttentionShape, KVCache, PagedAttention
from weft.kernels.batch import Batch
from weft.kernels.latents import EXPANDED_BLOCK, ExpandedContext, LatentDims, LatentNorm, attend_padded, contiguous_row
from weft.kernels.triton.attention import LN_2, LOG2_E, MAX_SPLITS, MIN_PRODUCT, _join
from weft.kernels.usable import AMPERE_SHARED_BYTES
from weft.kernels.warm import KernelLaunch, first_of_variants

HEADS = 16  # query heads of a program that decodes
QUERIES = 32  # queries of a program of a row of several tokens, tokens times heads
QUERY_BYTES = 1 << 10  # bytes of the widest query of which so many fit beside the latents; of wider ones half as many
PROGRAMS = 2  # per multiprocessor, until which contexts are split
TILE_BYTES = 32 << 10  # bytes of the latents that a program works on at once
ROTATED = 8  # heads of queries that a program rotates


@triton.jit
def _load_queries(q, places, kept, rank, rope_dim, RANK: tl.constexpr, ROPE: tl.constexpr):
    """Queries as two tensors: [ROWS, RANK] and, of their rotated part, [ROWS, ROPE]."""
    columns, turned = tl.arange(0, RANK), tl.arange(0, ROPE)
    low = tl.load(q + places[:, None] + columns[None, :], kept[:, None] & (columns < rank)[None, :], other=0.0)
    high = tl.load(
        q + places[:, None] + rank + turned[None, :], kept[:, None] & (turned < rope_dim)[None, :], other=0.0
    )
    return low, high


@triton.jit
def _mix_latents(
    low, high, latents, table, start, stop, last, rank, rope_dim, scale,
    KV_BLOCK: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Weighted latents [ROWS, RANK] over positions [start, stop), and logarithms to base 2 of the sums of weights. A
    row sees positions up to its `last`; one that sees none gets zeros."""
    columns, turned = tl.arange(0, RANK), tl.arange(0, ROPE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, RANK], tl.float32)
    for at in range(start, stop, TILE):
        position = at + tl.arange(0, TILE)
        exists = position < stop
        block = tl.load(table + position // KV_BLOCK, exists, other=0).to(tl.int64)
        place = (block * KV_BLOCK + position % KV_BLOCK) * (rank + rope_dim)
        latent = tl.load(
            latents + place[:, None] + columns[None, :], exists[:, None] & (columns < rank)[None, :], other=0.0
        )
        rotated = tl.load(
            latents + place[:, None] + rank + turned[None, :], exists[:, None] & (turned < rope_dim)[None, :], other=0.0
        )
        scores = tl.dot(low, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(high, tl.trans(rotated), acc=scores, input_precision="ieee") * scale
        scores = tl.where(exists[None, :] & (position[None, :] <= last[:, None]), scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet stays as it is: infinity less infinity would be NaN.
        still = tl.where(peak == float("-inf"), 0.0, peak)
        weights, fade = tl.exp2(scores - still[:, None]), tl.exp2(top - still)
        mixed = tl.dot(weights.to(latent.dtype), latent, acc=mixed * fade[:, None], input_precision="ieee")
        top, total = peak, total * fade + tl.sum(weights, 1)
    total = tl.where(total == 0.0, 1.0, total)
    return mixed / total[:, None], top + tl.log2(total)


# Integers that differ from step to step must not cause a new compilation.
@triton.jit(do_not_specialize=["table_width", "splits"])
def _decode_latents(
    q, latents, out, lse, parts, sums, through, tables, context, order, table_width, heads, rank, rope_dim, scale,
    splits, SPLIT: tl.constexpr, LSE: tl.constexpr, KV_BLOCK: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, TILE: tl.constexpr,
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
    low, high = _load_queries(q, each * (rank + rope_dim), mine, rank, rope_dim, RANK, ROPE)
    # A row without context is padding of a captured batch: it gets zeros.
    last = tl.full([ROWS], length - 1, tl.int32)
    result, logs = _mix_latents(
        low, high, latents, tables + row.to(tl.int64) * table_width, start, tl.minimum(start + share, length), last,
        rank, rope_dim, scale, KV_BLOCK, ROWS, RANK, ROPE, TILE,
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
            joined, logs = _join(parts, sums, each, mine, kept, splits, rank, ROWS, RANK)
            tl.store(out + each[:, None] * rank + columns[None, :], joined.to(out.dtype.element_ty), kept)
            if LSE:
                tl.store(lse + each, logs * LN_2, mine)
    else:
        tl.store(out + each[:, None] * rank + columns[None, :], result.to(out.dtype.element_ty), kept)
        if LSE:
            tl.store(lse + each, logs * LN_2, mine)


@triton.jit(do_not_specialize=["first_row", "rows", "table_width"])
def _prefill_latents(
    q, latents, out, lse, row_starts, tables, context, first_row, rows, table_width, heads, rank, rope_dim, scale,
    LSE: tl.constexpr, KV_BLOCK: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    TILE: tl.constexpr,
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
    first = (number - (start - origin) * heads // ROWS - low) * ROWS
    if first < count * heads:
        length = tl.load(context + row)
        query, columns = first + tl.arange(0, ROWS), tl.arange(0, RANK)
        real = query < count * heads
        each = start.to(tl.int64) * heads + query
        last = length - count + query // heads
        near, far = _load_queries(q, each * (rank + rope_dim), real, rank, rope_dim, RANK, ROPE)
        stop = length - count + tl.minimum(first + ROWS - 1, count * heads - 1) // heads + 1
        result, logs = _mix_latents(
            near, far, latents, tables + row.to(tl.int64) * table_width, 0, stop, last, rank, rope_dim, scale, KV_BLOCK,
            ROWS, RANK, ROPE, TILE,
        )  # fmt: skip
        kept = real[:, None] & (columns < rank)[None, :]
        tl.store(out + each[:, None] * rank + columns[None, :], result.to(out.dtype.element_ty), kept)
        if LSE:
            tl.store(lse + each, logs * LN_2, real)


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
    q, latents, cache, rope, positions, slots, norm, eps, heads, head_dim, rank, half,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = rope + tl.load(positions + token).to(tl.int64) * 2 * half
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


def splits_of(processors: int, programs: int) -> int:
    """Number of parts into which the contexts of a decode step are split that would take `programs` programs."""
    return max(1, min(MAX_SPLITS, triton.cdiv(PROGRAMS * processors, programs)))


class LatentTiles(NamedTuple):
    """Sizes of a program: the columns of the two parts of a latent, the latents of a tile, the query heads of a program
    that decodes, the queries of one of a row of several tokens, and the tiles that are on their way at once."""

    low: int
    high: int
    latents: int
    heads: int
    queries: int
    stages: int


def latent_tiles(rank: int, width: int, dtype: torch.dtype, shared: int) -> LatentTiles:
    """Sizes whose programs need at most `shared` bytes of shared memory."""
    low, high = (max(MIN_PRODUCT, triton.next_power_of_2(part)) for part in (rank, width - rank))
    latents = max(MIN_PRODUCT, min(64, TILE_BYTES // (low * dtype.itemsize)))
    if shared < AMPERE_SHARED_BYTES:
        # Turing multiplies in 32 bits, and has 64 KiB for the queries and the latents.
        return LatentTiles(low, high, MIN_PRODUCT, HEADS // 2, HEADS // 2, 1)
    wide = low * dtype.itemsize > QUERY_BYTES
    return LatentTiles(low, high, latents, HEADS, QUERIES // 2 if wide else QUERIES, 2)


class TritonLatents:
    """The Triton implementation of `LatentKernels`; `attention` is used in the expanded form. `processors` is the
    number of the device's multiprocessors, `shared` the bytes of shared memory that a program may ask for."""

    def __init__(self, processors: int, attention: PagedAttention, shared: int = AMPERE_SHARED_BYTES) -> None:
        self._processors, self._attention, self._shared = processors, attention, shared
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
            batch.positions,
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
        self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], cache.values.shape[3])
        if batch.decodes:
            self._decode(q, cache, batch, scale, out, lse)
        if batch.decodes < batch.rows:
            self._prefill(q, cache, batch, scale, out, lse)
        return out

    def attend_expanded(self, q: torch.Tensor, context: ExpandedContext, scale: float, out: torch.Tensor) -> None:
        attend_padded(self._attention, q, context, scale, out)

    def _decode(
        self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        (_, heads, width), rank, rows = q.shape, out.shape[2], batch.decodes
        tiles = latent_tiles(rank, width, q.dtype, self._shared)
        blocks = triton.cdiv(heads, tiles.heads)
        splits = splits_of(self._processors, rows * blocks)
        count = triton.next_power_of_2(rows * blocks)
        if count not in self._through:
            self._through[count] = torch.zeros(count, dtype=torch.int32, device=q.device)
        parts = sums = out
        if splits > 1:
            parts = q.new_empty((rows, heads, splits, rank), dtype=torch.float32)
            sums = q.new_empty((rows, heads, splits), dtype=torch.float32)
        _decode_latents[(blocks, rows, splits)](
            q,
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
            heads,
            rank,
            width - rank,
            scale * LOG2_E,
            splits,
            SPLIT=splits > 1,
            LSE=lse is not None,
            KV_BLOCK=cache.block_size,
            ROWS=tiles.heads,
            RANK=tiles.low,
            ROPE=tiles.high,
            TILE=tiles.latents,
            num_warps=4,
            num_stages=tiles.stages,
        )

    def _prefill(
        self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        (tokens, heads, width), rank, rows = q.shape, out.shape[2], batch.rows - batch.decodes
        tiles = latent_tiles(rank, width, q.dtype, self._shared)
        _prefill_latents[((tokens - batch.decodes) * heads // tiles.queries + rows,)](
            q,
            cache.keys,
            out,
            out if lse is None else lse,
            batch.row_starts,
            batch.tables,
            batch.context,
            batch.decodes,
            rows,
            batch.tables.stride(0),
            heads,
            rank,
            width - rank,
            scale * LOG2_E,
            LSE=lse is not None,
            KV_BLOCK=cache.block_size,
            ROWS=tiles.queries,
            RANK=tiles.low,
            ROPE=tiles.high,
            TILE=tiles.latents,
            num_warps=8,
            num_stages=tiles.stages,
        )

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        assert shape.latent
        dims = LatentDims.of(shape.latent, shape.q_heads)
        # The kernels that read latents see one KV head, and no keys' width but theirs.
        absorbed = replace(shape, kv_heads=1, head_dim=dims.rank + dims.rope_dim, latent=None)

        def attend(q: torch.Tensor, cache: KVCache, batch: Batch) -> torch.Tensor:
            return self.attend(q, KVCache.of_latents(cache.keys, dims.rank), batch, shape.scale)

        tiles = latent_tiles(dims.rank, absorbed.head_dim, shape.dtype, self._shared)
        blocks = triton.cdiv(shape.q_heads, tiles.heads)
        variants = first_of_variants(lambda rows: splits_of(self._processors, rows * blocks) > 1, shape.rows)
        decodes = [attention_inputs.decode_inputs(absorbed, device, [1] * rows) for rows in variants]
        prompts = [attention_inputs.prompt_inputs(absorbed, device, [2], [2])] * (shape.length > 1)
        expanded = first_of_variants(lambda heads: (heads == 1, heads % 16 == 0), shape.q_heads)
        return [
            [partial(attend, *inputs) for inputs in decodes],
            [partial(attend, *inputs) for inputs in prompts],
            [partial(self._attend_expanded, shape, heads, device) for heads in expanded],
        ]

    def _attend_expanded(self, shape: AttentionShape, heads: int, device: torch.device) -> None:
        """Attention of one prompt in the expanded form, with some heads."""
        keys = torch.zeros(1, EXPANDED_BLOCK, heads, shape.head_dim, dtype=shape.dtype, device=device)
        batch = contiguous_row(2, EXPANDED_BLOCK, device)
        self._attention.prepare(batch)
        self._attention.attend(keys[0, :2].contiguous(), KVCache(keys, keys), batch, shape.scale, None)
