"""Attention over paged KV: decode rows of one token, whose contexts are split among programs, and prefill rows.

The softmax is the online one of Milakov and Gimelshein (2018). Splitting a long context, and joining the parts by the
logarithms of their sums, is Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl

from weft.ranks.kernels import attention_inputs
from weft.ranks.kernels.attention import AttentionShape, KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.triton.tuning import DECODE, DEFAULT, PREFILL, Tuning, Tunings
from weft.ranks.kernels.usable import AMPERE_SHARED_BYTES
from weft.ranks.kernels.warm import KernelLaunch, first_of_variants

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
MIN_PRODUCT = 16  # rows or columns of the smallest matrix product
HEAD_BYTES = 256  # bytes of the widest head whose tiles fit the 99 KiB of any GPU since Ampere; half as wide for 64 KiB
MAX_SPLITS = 32
AT_ONCE = tl.constexpr(4)  # parts that the program that joins them loads at once


@triton.jit
def _mix_tile(
    query, keys, values, table, at, oldest, stop, last, window, kv_head, kv_heads, scale, top, total, mixed,
    head_dim: tl.constexpr, WINDOWED: tl.constexpr, KV_BLOCK: tl.constexpr, HEAD: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of the online softmax: the maximum of unscaled scores, the sum of weights and the weighted values after
    TILE positions from `at` on. Unless MASKED, all of them exist and are seen by every row.

    Keys past `stop` are not read, nor those before `oldest`, behind every window: their blocks may be another
    request's.
    """
    columns, position = tl.arange(0, HEAD), at + tl.arange(0, TILE)
    inside, exists = columns < head_dim, position < stop
    if WINDOWED:
        exists = exists & (position >= oldest)
    block = tl.load(table + position // KV_BLOCK, exists, other=0).to(tl.int64)
    place = ((block * KV_BLOCK + position % KV_BLOCK) * kv_heads + kv_head) * head_dim
    if MASKED:
        key = tl.load(keys + place[None, :] + columns[:, None], exists[None, :] & inside[:, None], other=0.0)
    elif head_dim == HEAD:
        key = tl.load(keys + place[None, :] + columns[:, None])
    else:
        key = tl.load(keys + place[None, :] + columns[:, None], inside[:, None], other=0.0)
    scores = tl.dot(query, key.to(query.dtype), input_precision="ieee")
    if MASKED:
        seen = exists[None, :] & (position[None, :] <= last[:, None])
        if WINDOWED:
            seen = seen & (position[None, :] > last[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key yet stays as it is: infinity less infinity would be NaN.
    still = tl.where(peak == float("-inf"), 0.0, peak) * scale
    # One multiplication and addition for each weight: the scores themselves are not scaled.
    weights = tl.exp2(scores * scale - still[:, None])
    fade = tl.exp2(top * scale - still)
    if MASKED:
        value = tl.load(values + place[:, None] + columns[None, :], exists[:, None] & inside[None, :], other=0.0)
    elif head_dim == HEAD:
        value = tl.load(values + place[:, None] + columns[None, :])
    else:
        value = tl.load(values + place[:, None] + columns[None, :], inside[None, :], other=0.0)
    kind = tl.float32 if value.dtype == tl.float32 else tl.bfloat16 if value.dtype == tl.bfloat16 else tl.float16
    mixed = mixed * fade[:, None] + tl.dot(weights.to(kind), value.to(kind), input_precision="ieee")
    return peak, total * fade + tl.sum(weights, 1), mixed


@triton.jit
def _mix(
    query, keys, values, table, begin, whole, rest, oldest, stop, last, window, kv_head, kv_heads, scale,
    head_dim: tl.constexpr, WINDOWED: tl.constexpr, KV_BLOCK: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Weighted values [ROWS, HEAD] for query [ROWS, HEAD] over positions from `oldest` to `stop`; `begin` is the first
    of a tile, at most `oldest`; and logarithms to base 2 of the sums of weights [ROWS].

    A row sees positions up to its `last` [ROWS], of which only the last `window`. A row that sees none gets zeros. All
    rows see the tiles from `whole` to `rest`, which come first and without masks; None if no tile is known to be such.
    """
    if keys.dtype.element_ty == tl.float8e4nv and query.dtype == tl.bfloat16:
        # Two 8-bit keys become float16 in one instruction, but bfloat16 only by way of float32.
        query = query.to(tl.float16)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD], tl.float32)
    skipped = 0
    if whole is not None:
        for at in range(whole, rest, TILE):
            top, total, mixed = _mix_tile(
                query, keys, values, table, at, oldest, stop, last, window, kv_head, kv_heads, scale, top, total, mixed,
                head_dim, False, KV_BLOCK, HEAD, TILE, False,
            )  # fmt: skip
        skipped = rest - whole
    for tile in range(begin, stop - skipped, TILE):
        at = tile
        if whole is not None:
            at = tl.where(tile < whole, tile, tile + skipped)
        top, total, mixed = _mix_tile(
            query, keys, values, table, at, oldest, stop, last, window, kv_head, kv_heads, scale, top, total, mixed,
            head_dim, WINDOWED, KV_BLOCK, HEAD, TILE, True,
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)
    return mixed / total[:, None], top * scale + tl.log2(total)


@triton.jit
def _shrink(result, logs, sinks, heads, mine, SINKS: tl.constexpr):
    """Results [ROWS, HEAD] with the sinks of their `heads`; `logs` to base 2 are the logarithms of the sums of their
    weights."""
    if SINKS:
        sink = tl.load(sinks + heads, mine, other=0.0).to(tl.float32)
        result = result * tl.sigmoid(logs * LN_2 - sink)[:, None]
    return result


@triton.jit
def _join(parts, sums, heads, mine, kept, splits, head_dim, GROUP: tl.constexpr, HEAD: tl.constexpr):
    """Results [GROUP, HEAD] of these heads from all parts, always added in the same order, and logarithms to base 2 of
    the sums of weights [GROUP]. Parts are not read from the L1 cache, which does not see stores of other
    multiprocessors."""
    top = tl.full([GROUP], float("-inf"), tl.float32)
    for each in range(splits):
        top = tl.maximum(top, tl.load(sums + heads * splits + each, mine, other=float("-inf"), cache_modifier=".cg"))
    still = tl.where(top == float("-inf"), 0.0, top)
    total, mixed = tl.zeros([GROUP], tl.float32), tl.zeros([GROUP, HEAD], tl.float32)
    columns = tl.arange(0, HEAD)
    for each in tl.range(0, splits, loop_unroll_factor=AT_ONCE):
        at_part = heads * splits + each
        weight = tl.exp2(tl.load(sums + at_part, mine, other=float("-inf"), cache_modifier=".cg") - still)
        place = at_part[:, None] * head_dim + columns[None, :]
        mixed += tl.load(parts + place, kept, other=0.0, cache_modifier=".cg") * weight[:, None]
        total += weight
    total = tl.where(total == 0.0, 1.0, total)
    return mixed / total[:, None], top + tl.log2(total)


# Integers that differ from step to step must not cause a new compilation.
@triton.jit(do_not_specialize=["table_width", "window", "splits"])
def _decode(
    q, keys, values, out, lse, sinks, parts, sums, through, tables, context, order, table_width, q_heads, kv_heads,
    head_dim: tl.constexpr, scale, window, splits, WINDOWED: tl.constexpr, SPLIT: tl.constexpr, LSE: tl.constexpr,
    SINKS: tl.constexpr, KV_BLOCK: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # Heads first: programs that run at the same time then read whole lines of the KV cache, in which a token's heads
    # are neighbours.
    kv_head, row, split = tl.program_id(0), tl.load(order + tl.program_id(1)), tl.program_id(2)
    group = q_heads // kv_heads
    length = tl.load(context + row)
    begin = 0
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(0, length - window)
        begin = oldest // TILE * TILE
    # Each split has whole tiles, so that nothing is read twice.
    share = tl.cdiv(tl.cdiv(length - begin, TILE), splits) * TILE
    start = begin + split * share
    stop = tl.minimum(start + share, length)
    members, columns = tl.arange(0, GROUP), tl.arange(0, HEAD)
    mine, inside = members < group, columns < head_dim
    heads = row.to(tl.int64) * q_heads + kv_head * group + members
    kept = mine[:, None] & inside[None, :]
    query = tl.load(q + heads[:, None] * head_dim + columns[None, :], kept, other=0.0)
    # A row without context is padding of a captured batch: it gets zeros.
    last = tl.full([GROUP], length - 1, tl.int32)
    result, logs = _mix(
        query, keys, values, tables + row.to(tl.int64) * table_width, start, None, None, oldest, stop, last, window,
        kv_head, kv_heads, scale, head_dim, WINDOWED, KV_BLOCK, GROUP, HEAD, TILE,
    )  # fmt: skip
    if SPLIT:
        at_part = heads * splits + split
        tl.store(parts + at_part[:, None] * head_dim + columns[None, :], result, kept)
        tl.store(sums + at_part, logs, mine)
        # All threads have written before one of them counts this part as finished.
        tl.debug_barrier()
        arrived = through + row * kv_heads + kv_head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
            tl.store(arrived, 0)  # for the next layer
            joined, logs = _join(parts, sums, heads, mine, kept, splits, head_dim, GROUP, HEAD)
            joined = _shrink(joined, logs, sinks, kv_head * group + members, mine, SINKS)
            tl.store(out + heads[:, None] * head_dim + columns[None, :], joined.to(out.dtype.element_ty), kept)
            if LSE:
                tl.store(lse + heads, logs * LN_2, mine)
    else:
        result = _shrink(result, logs, sinks, kv_head * group + members, mine, SINKS)
        tl.store(out + heads[:, None] * head_dim + columns[None, :], result.to(out.dtype.element_ty), kept)
        if LSE:
            tl.store(lse + heads, logs * LN_2, mine)


def splits_of(tuning: Tuning, processors: int, rows: int, kv_heads: int) -> int:
    """Number of parts into which the contexts of a decode step of `rows` rows are split."""
    return min(MAX_SPLITS, triton.cdiv(tuning.programs * processors, rows * kv_heads))


def tile_of(tuning: Tuning, part: int, cache: KVCache) -> int:
    """Number of keys in a tile, with `part` of `tiles`. 8-bit keys are twice as many, in as many bytes."""
    return max(MIN_PRODUCT, tuning.tile * (2 if cache.keys.itemsize == 1 else 1) // part)


def tiles(head_dim: int, dtype: torch.dtype, shared: int) -> tuple[int, int]:
    """Width of a head in the kernels, and the number by which a tile's rows are divided to fit into `shared` bytes."""
    head = max(MIN_PRODUCT, triton.next_power_of_2(head_dim))
    widest = HEAD_BYTES if shared >= AMPERE_SHARED_BYTES else HEAD_BYTES // 2
    return head, max(1, head * dtype.itemsize // widest)


def decode(
    q: torch.Tensor, cache: KVCache, batch: Batch, rows: int, scale: float, window: int | None, processors: int,
    out: torch.Tensor, tuning: Tuning = DECODE, shared: int = AMPERE_SHARED_BYTES, through: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Attention of the first `rows` rows, of one token each: q [rows, q_heads, head_dim] into out [rows, q_heads *
    head_dim] and `lse`. `through` are int32 zeros, one for each row and KV head: the number of programs that have
    finished."""
    _, q_heads, head_dim = q.shape
    kv_heads = cache.keys.shape[2]
    splits = splits_of(tuning, processors, rows, kv_heads)
    head, part = tiles(head_dim, q.dtype, shared)
    parts = sums = out
    if through is None:
        through = q.new_zeros(rows * kv_heads, dtype=torch.int32)
    if splits > 1:
        parts = q.new_empty((rows, q_heads, splits, head_dim), dtype=torch.float32)
        sums = q.new_empty((rows, q_heads, splits), dtype=torch.float32)
    _decode[(kv_heads, rows, splits)](
        q,
        cache.keys,
        cache.values,
        out,
        out if lse is None else lse,
        q if sinks is None else sinks,
        parts,
        sums,
        through,
        batch.tables,
        batch.context,
        batch.order,
        batch.tables.stride(0),
        q_heads,
        kv_heads,
        head_dim,
        scale * LOG2_E,
        window or 0,
        splits,
        WINDOWED=window is not None,
        SPLIT=splits > 1,
        LSE=lse is not None,
        SINKS=sinks is not None,
        KV_BLOCK=cache.block_size,
        GROUP=max(MIN_PRODUCT, triton.next_power_of_2(q_heads // kv_heads)),
        HEAD=head,
        TILE=tile_of(tuning, part, cache),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


@triton.jit(do_not_specialize=["first_row", "rows", "table_width", "window"])
def _prefill(
    q, keys, values, out, lse, sinks, row_starts, tables, context, first_row, rows, table_width, q_heads, kv_heads,
    head_dim: tl.constexpr, scale, window, WINDOWED: tl.constexpr, LSE: tl.constexpr, SINKS: tl.constexpr,
    KV_BLOCK: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    number, kv_head = tl.program_id(0), tl.program_id(1)
    # Row r's programs begin at (its first token // QUERIES) + r: there is at most one surplus program per row.
    origin = tl.load(row_starts + first_row)
    low, high = 0, rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = (tl.load(row_starts + first_row + middle) - origin) // QUERIES + middle
        if begins <= number:
            low = middle
        else:
            high = middle - 1
    row = first_row + low
    start = tl.load(row_starts + row)
    count = tl.load(row_starts + row + 1) - start
    # A row's last tokens first: they see the most keys, and would run alone at the end.
    first = (tl.cdiv(count, QUERIES) - 1 - number + (start - origin) // QUERIES + low) * QUERIES
    if first >= 0:
        length = tl.load(context + row)
        lanes, columns = tl.arange(0, ROWS), tl.arange(0, HEAD)
        token, member = first + lanes // GROUP, lanes % GROUP
        real, inside = (lanes < QUERIES * GROUP) & (token < count), columns < head_dim
        heads = (start + token).to(tl.int64) * q_heads + kv_head * GROUP + member
        places = heads * head_dim
        kept = real[:, None] & inside[None, :]
        query = tl.load(q + places[:, None] + columns[None, :], kept, other=0.0)
        stop = length - count + tl.minimum(first + QUERIES, count)
        begin = 0
        whole = 0
        rest = (length - count + first + 1) // TILE * TILE
        oldest = 0
        if WINDOWED:
            oldest = tl.maximum(0, length - count + first - window + 1)
            begin = oldest // TILE * TILE
            whole = tl.minimum(tl.cdiv(tl.maximum(0, stop - window), TILE) * TILE, rest)
        result, logs = _mix(
            query, keys, values, tables + row.to(tl.int64) * table_width, begin, whole, rest, oldest, stop,
            length - count + token, window, kv_head, kv_heads, scale, head_dim, WINDOWED, KV_BLOCK, ROWS, HEAD, TILE,
        )  # fmt: skip
        result = _shrink(result, logs, sinks, kv_head * GROUP + member, real, SINKS)
        tl.store(out + places[:, None] + columns[None, :], result.to(out.dtype.element_ty), kept)
        if LSE:
            tl.store(lse + heads, logs * LN_2, real)


def prefill(
    q: torch.Tensor, cache: KVCache, batch: Batch, first_row: int, scale: float, window: int | None, out: torch.Tensor,
    tuning: Tuning = PREFILL, shared: int = AMPERE_SHARED_BYTES, lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Attention of the rows from `first_row` on, of any number of tokens: q [T, q_heads, head_dim] into out [T, q_heads
    * head_dim] and `lse`. Only these rows' tokens are read and written. Rows before them have one token each."""
    tokens, q_heads, head_dim = q.shape
    kv_heads, rows = cache.keys.shape[2], batch.rows - first_row
    group = q_heads // kv_heads
    head, part = tiles(head_dim, q.dtype, shared)
    lanes = max(tuning.rows // part, MIN_PRODUCT, triton.next_power_of_2(group))
    queries = lanes // group
    _prefill[((tokens - first_row) // queries + rows, kv_heads)](
        q,
        cache.keys,
        cache.values,
        out,
        out if lse is None else lse,
        q if sinks is None else sinks,
        batch.row_starts,
        batch.tables,
        batch.context,
        first_row,
        rows,
        batch.tables.stride(0),
        q_heads,
        kv_heads,
        head_dim,
        scale * LOG2_E,
        window or 0,
        WINDOWED=window is not None,
        LSE=lse is not None,
        SINKS=sinks is not None,
        KV_BLOCK=cache.block_size,
        GROUP=group,
        QUERIES=queries,
        ROWS=lanes,
        HEAD=head,
        TILE=max(MIN_PRODUCT, tuning.tile // part),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


class TritonAttention:
    """The Triton implementation of `PagedAttention`. `processors` is the number of the device's multiprocessors,
    `shared` the bytes of shared memory that a program may ask for."""

    name = "triton"
    capturable = True

    def __init__(self, processors: int, tunings: Tunings = DEFAULT, shared: int = AMPERE_SHARED_BYTES) -> None:
        self._processors, self.tunings, self._shared = processors, tunings, shared
        # By their number. They are never freed, as CUDA graphs read them.
        self._through: dict[int, torch.Tensor] = {}

    def prepare(self, batch: Batch) -> None:
        """Do nothing: each program works out what it needs."""

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        scale: float,
        window: int | None,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        if batch.decodes:
            self.decode(q, cache, batch, scale, window, out, lse, sinks)
        if batch.decodes < batch.rows:
            prefill(q, cache, batch, batch.decodes, scale, window, out, self.tunings.prefill, self._shared, lse, sinks)
        return out

    def decode(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        scale: float,
        window: int | None,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attention of the batch's decode rows only, into `out` and `lse`."""
        rows = batch.decodes
        count = triton.next_power_of_2(rows * cache.keys.shape[2])
        if count not in self._through:
            self._through[count] = torch.zeros(count, dtype=torch.int32, device=q.device)
        sizes = self.tunings.for_rows(rows), self._shared
        decode(q, cache, batch, rows, scale, window, self._processors, out, *sizes, self._through[count], lse, sinks)

    def launches(self, shape: AttentionShape, device: torch.device) -> list[list[KernelLaunch]]:
        def decode_variant(rows: int) -> tuple[Tuning, bool]:
            tuning = self.tunings.for_rows(rows)
            return replace(tuning, programs=0), splits_of(tuning, self._processors, rows, shape.kv_heads) > 1

        variants = first_of_variants(decode_variant, shape.rows)
        decodes = [attention_inputs.decode_inputs(shape, device, [1] * rows) for rows in variants]
        sinks = torch.zeros(shape.q_heads, dtype=shape.dtype, device=device) if shape.sinks else None
        attend = partial(self.attend, sinks=sinks)
        prompts = [attention_inputs.prompt_inputs(shape, device, [2], [2])] * (shape.length > 1)
        return [
            [partial(attend, *inputs, shape.scale, window) for inputs in steps for window in shape.windows]
            for steps in (decodes, prompts)
        ]
