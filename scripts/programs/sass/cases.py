"""Kernels at their default sizes, and the work of one pass of each one's inner loop, as data.

Sizes are those of Llama-3.1-8B, of Llama-3.2-1B with its heads of 64, of Qwen3-30B-A3B with its experts, or of
DeepSeek-V2-Lite with its latents. Launches go through the functions that the engine calls, so that tiles, warps and
stages are the engine's own choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from scripts.programs.sass.launches import Launch, recorded
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import Experts
from weft.checkpoint.quantised.schemes import UNIT, Scheme
from weft.machine.hardware.gpus import FP8_CAPABILITY
from weft.ranks.kernels.attention import HeadNorm, KVCache
from weft.ranks.kernels.batch import NO_ROWS, Batch
from weft.ranks.kernels.latents import AbsorbedQueries, ExpandedContext, LatentNorm
from weft.ranks.kernels.matrices import ExpertStack
from weft.ranks.kernels.sampling import mask_words
from weft.ranks.kernels.staged import StagedStep
from weft.ranks.kernels.triton import (
    attention,
    experts,
    grouped,
    latents,
    pointwise,
    products,
    rounding,
    router,
    routing,
    sampling,
)
from weft.ranks.kernels.triton.staged import fill_batch
from weft.ranks.kernels.usable import AMPERE_SHARED_BYTES
from weft.ranks.quant.quantised import QuantisedWeight

PROCESSORS = 132  # of the GPU that launches are cut for: an H200
HIDDEN, FFN, Q_HEADS, KV_HEADS, VOCAB = 4096, 14336, 32, 8, 128256
LATENT_HEADS, RANK, ROPE_DIM = 16, 512, 64
RANKS = 2  # of a sum over ranks
MIXTURE, MIXTURE_HIDDEN = Experts(count=128, top_k=8, width=768), 2048
GROUPED = Experts(  # DeepSeek-V3
    count=256,
    top_k=8,
    width=2048,
    scoring="sigmoid",
    correction=True,
    scaling=2.5,
    groups=8,
    top_groups=4,
    group_score="top2",
)
GROUPED_HIDDEN = 7168
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HOPPER = 90, 100  # instructions for groups of warps that no other architecture has
HOPPER_SHARED_BYTES = 227 << 10
FP8_SINCE = 10 * FP8_CAPABILITY[0] + FP8_CAPABILITY[1]
Arguments = Mapping[str, Any]  # of a launch, by the kernel's own names


class Work(NamedTuple):
    """Work of one program in one pass: bytes of the GPU's memory read and written, or, of a kernel that tensor cores
    bound, its operations."""

    bytes: float = 0.0
    flops: float = 0.0


def decode_work(a: Arguments) -> Work:
    """A tile of keys and one of values; queries are in registers."""
    return Work(bytes=2 * a["TILE"] * a["HEAD"] * a["keys"].itemsize)


def join_work(a: Arguments) -> Work:
    """Results of AT_ONCE parts of a context, of the heads that share keys."""
    return Work(bytes=attention.AT_ONCE.value * a["q_heads"] // a["kv_heads"] * a["head_dim"] * a["parts"].itemsize)


def latents_work(a: Arguments) -> Work:
    """A tile of latents, which are keys and values of a block of heads; of several blocks, the first reads it, and the
    others find it in the second cache. The parts of a tile are padded."""
    blocks = -(-a["heads"] // a["ROWS"])
    return Work(bytes=a["TILE"] * (a["rank"] + a["rope_dim"]) * a["latents"].itemsize / blocks)


def store_latents_work(a: Arguments) -> Work:
    """A latent as it comes and as the cache keeps it; other programs rotate the queries of some heads."""
    return Work(bytes=2 * (a["rank"] + 2 * a["half"]) * a["latents"].itemsize)


def latents_flops(a: Arguments) -> Work:
    """Scores and weighted latents of a tile."""
    return Work(flops=2 * a["ROWS"] * a["TILE"] * (2 * a["RANK"] + a["ROPE"]))


def expanded_flops(a: Arguments) -> Work:
    """Scores and weighted values of a tile of one head."""
    return Work(flops=2 * a["ROWS"] * a["TILE"] * (a["NOPE"] + a["ROPE"] + a["VALUE"]))


def prefill_work(a: Arguments) -> Work:
    """Scores and weighted values of a tile; its keys serve many programs, which find them in the second cache."""
    return Work(flops=2 * 2 * a["ROWS"] * a["TILE"] * a["HEAD"])


def multiply_work(a: Arguments) -> Work:
    """A tile of the quantised matrix; x serves many programs."""
    return Work(bytes=a["ROWS"] * a["UNITS"] * UNIT * stored_bytes(a))


def experts_work(a: Arguments) -> Work:
    """A tile of an expert's matrix, or, with a block of many tokens, the operations with it."""
    numbers = a["ROWS"] * a["UNITS"] * UNIT
    if a["TOKENS"] > 64:
        return Work(flops=2 * numbers * a["TOKENS"])
    return Work(bytes=numbers * (a["words"].itemsize if a["LOWEST"] == "none" else stored_bytes(a)))


def choose_work(a: Arguments) -> Work:
    """The scores of a token, and the numbers and shares of its experts."""
    return Work(bytes=4 * a["count"] + (8 + 4) * a["TOP_K"])


def route_work(a: Arguments) -> Work:
    """A tile of the router's weights."""
    return Work(bytes=a["EXPERTS"] * a["COLUMNS"] * a["weight"].itemsize)


def score_work(a: Arguments) -> Work:
    """Products of a tile of tokens with one of the router's weights, which stay in the second cache."""
    return Work(flops=2 * a["TOKENS"] * a["EXPERTS"] * a["COLUMNS"])


def add_counts_work(a: Arguments) -> Work:
    """Counts of some programs, read and written."""
    return Work(bytes=2 * a["AT_ONCE"] * a["BLOCK"] * a["counts"].itemsize)


def place_pairs_work(a: Arguments) -> Work:
    """Numbers of experts, and the places of their rows."""
    return Work(bytes=a["TILE"] * (a["numbers"].itemsize + a["members"].itemsize))


def sort_work(a: Arguments) -> Work:
    """Numbers of experts."""
    return Work(bytes=a["PAIRS"] * a["numbers"].itemsize)


def place_work(a: Arguments) -> Work:
    """Numbers of rows, read and written, and owners of blocks."""
    return Work(bytes=a["BLOCK"] * (2 * a["members"].itemsize + a["owners"].itemsize))


def sum_work(a: Arguments) -> Work:
    """Columns of the parts of a token's experts, and of their sum."""
    return Work(bytes=(a["TOP_K"] + 1) * a["BLOCK"] * a["parts"].itemsize)


def dequantise_work(a: Arguments) -> Work:
    return Work(bytes=a["ROWS"] * a["UNITS"] * UNIT * (stored_bytes(a) + a["out"].itemsize))


def round_work(a: Arguments) -> Work:
    return Work(bytes=a["GROUPS"] * a["GROUP"] * (stored_bytes(a) + a["weight"].itemsize))


def stored_bytes(a: Arguments) -> float:
    """Bytes of one number of a quantised matrix, with its share of its group's scale and minimum."""
    scheme = Scheme(bits=a["BITS"], group=a["GROUP"], lowest=a["LOWEST"])
    return (scheme.bits + scheme.group_bits / scheme.group) / 8


def norm_work(a: Arguments) -> Work:
    """A row of x and of the result, and with ADD the residual twice."""
    return Work(bytes=(4 if a["ADD"] else 2) * a["width"] * a["x"].itemsize)


def lay_work(a: Arguments) -> Work:
    """Tokens, positions, KV slots (8 bytes), contexts and order, and a piece of a block table, read and written."""
    return Work(bytes=2 * (a["TOKENS"] * (4 + 4 + 8 + 4 + 4) + a["COLUMNS"] * 4))


def sum_norm_work(a: Arguments) -> Work:
    """A row of each rank's part, of the residual twice, and of the result."""
    return Work(bytes=(a["SIZE"] + 3) * a["width"] * a["residual"].itemsize)


def silu_work(a: Arguments) -> Work:
    return Work(bytes=3 * a["BLOCK"] * a["out"].itemsize)


def rotate_work(a: Arguments) -> Work:
    """Heads that are read once and written once."""
    return Work(bytes=2 * a["HEADS"] * 2 * a["half"] * a["qkv"].itemsize)


def logits_work(a: Arguments) -> Work:
    """Blocks of a row's logits."""
    return Work(bytes=a["BLOCKS"] * a["BLOCK"] * a["logits"].itemsize)


def draw_work(a: Arguments) -> Work:
    """The greatest logit and the sum of every block of a row, and the logits of the block that won."""
    return Work(bytes=8 * a["blocks"] + a["BLOCK"] * a["logits"].itemsize)


def mask_work(a: Arguments) -> Work:
    """Words of a mask, and the logits of their tokens, written."""
    return Work(bytes=a["WORDS"] * (a["masks"].itemsize + a["BITS"] * a["logits"].itemsize))


@dataclass(frozen=True)
class Case:
    """A kernel in one variant: `call` launches it, once or beside other kernels, and `work` is that of one pass of its
    innermost loop with the most instructions, or of number `loop` in that order. GPUs below `since` do not have it, nor
    those from `until` on."""

    kernel: str
    variant: str
    work: Callable[[Arguments], Work]
    call: Callable[[], object]
    since: int = 75
    until: int = 1 << 16
    loop: int = 0

    def is_for(self, architecture: int) -> bool:
        return self.since <= architecture < self.until

    def launch(self) -> Launch:
        """The recorded launch of the kernel; raises ValueError unless there is exactly one."""
        with recorded() as launches:
            self.call()
        (launch,) = (launch for launch in launches if launch.name == self.kernel)
        return launch


def made_cache(head_dim: int, kept: torch.dtype) -> KVCache:
    keys, values = (torch.empty(1, 16, KV_HEADS, head_dim, dtype=kept) for _ in range(2))
    return KVCache(keys, values)


def made_batch(rows: int, decodes: int | None = None) -> Batch:
    """A batch of zeros with one token per row: launches read only its shapes and types."""
    numbers = torch.zeros(rows + 1, dtype=torch.int32)
    return Batch(
        tokens=numbers,
        positions=numbers,
        slots=numbers.long(),
        row_starts=numbers,
        context=numbers[:rows],
        tables=torch.zeros(rows, 64, dtype=torch.int32),
        order=numbers,
        decodes=rows if decodes is None else decodes,
    )


def decode(rows: int, head_dim: int, kept: torch.dtype = BF16) -> None:
    """A step of `rows` requests, of which each writes one token."""
    q = torch.empty(rows, Q_HEADS, head_dim, dtype=BF16)
    out = torch.empty(rows, Q_HEADS * head_dim, dtype=BF16)
    attention.decode(q, made_cache(head_dim, kept), made_batch(rows), rows, 1.0, None, PROCESSORS, out)


def attend_latents(rows: int, decodes: int, heads: int = LATENT_HEADS, *, hopper: bool = False) -> None:
    """A step of `rows` requests, of which `decodes` write one token each."""
    cache = KVCache.of_latents(torch.empty(1, 16, 1, RANK + ROPE_DIM, dtype=BF16), RANK)
    shared = HOPPER_SHARED_BYTES if hopper else AMPERE_SHARED_BYTES
    kernels = latents.TritonLatents(PROCESSORS, shared, warp_groups=hopper)
    whole = torch.empty(rows, heads, 128 + ROPE_DIM, dtype=BF16)
    q = AbsorbedQueries(torch.empty(rows, heads, RANK, dtype=BF16), whole[..., 128:])
    kernels.attend(q, cache, made_batch(rows, decodes), 1.0)


def attend_expanded(*, hopper: bool = False) -> None:
    """A prompt of 512 tokens in the expanded form, the last ones of 2,048."""
    both = torch.empty(2048, LATENT_HEADS, 2 * 128, dtype=BF16)
    q = torch.empty(512, LATENT_HEADS, 128 + ROPE_DIM, dtype=BF16)
    context = ExpandedContext(
        both[..., :128], both[..., 128:], torch.empty(2048, RANK + ROPE_DIM, dtype=BF16)[:, RANK:]
    )
    shared = HOPPER_SHARED_BYTES if hopper else AMPERE_SHARED_BYTES
    kernels = latents.TritonLatents(PROCESSORS, shared, warp_groups=hopper)
    kernels.attend_expanded(q, context, 1.0, torch.empty(512, LATENT_HEADS, 128, dtype=BF16))


def store_latents(tokens: int) -> None:
    cache = KVCache.of_latents(torch.empty(1, 16, 1, RANK + ROPE_DIM, dtype=BF16), RANK)
    kernels = latents.TritonLatents(PROCESSORS)
    q = torch.empty(tokens, LATENT_HEADS, 128 + ROPE_DIM, dtype=BF16)
    new, norm = torch.empty(tokens, RANK + ROPE_DIM, dtype=BF16), LatentNorm(torch.empty(RANK, dtype=BF16), 1e-6)
    rope = torch.empty(64, ROPE_DIM)
    kernels.rotate_and_store(q, new, rope, cache, made_batch(tokens), norm, interleaved=True)


def prefill(head_dim: int, kept: torch.dtype = BF16) -> None:
    q = torch.empty(256, Q_HEADS, head_dim, dtype=BF16)
    out = torch.empty(256, Q_HEADS * head_dim, dtype=BF16)
    attention.prefill(q, made_cache(head_dim, kept), made_batch(2), 0, 1.0, None, out)


def rotate(head_dim: int, norm: HeadNorm | None) -> None:
    qkv = torch.empty(2, (Q_HEADS + 2 * KV_HEADS) * head_dim, dtype=BF16)
    cache = made_cache(head_dim, BF16)
    pointwise.rotate_and_store(qkv, Q_HEADS, torch.empty(64, head_dim), cache, made_batch(2), norm)


def norm(add: bool) -> None:
    x = torch.empty(2, HIDDEN, dtype=BF16)
    pointwise.norm(x, x if add else None, x[0], 1e-6)


def silu_mul() -> None:
    pointwise.silu_mul(torch.empty(2, 2 * FFN, dtype=BF16))


def sum_add_norm() -> None:
    x = torch.empty(2, HIDDEN, dtype=BF16)
    pointwise.sum_add_norm(torch.zeros(RANKS, dtype=torch.int64), x, x[0], 1e-6)


def sample() -> None:
    longs, settings = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.float64)
    sampling.sample_tokens(torch.empty(2, VOCAB, dtype=BF16), longs, longs, settings, longs, filtered=True)


def made_weight(scheme: str) -> QuantisedWeight:
    return QuantisedWeight.empty(scheme, HIDDEN, Span(0, HIDDEN), BF16, torch.device("cpu"))


def multiply(scheme: str, tokens: int) -> None:
    products.create_quantised_matrix(made_weight(scheme), None, PROCESSORS)(torch.empty(tokens, HIDDEN, dtype=BF16))


def made_stack(scheme: str | None, rows: int, cols: int) -> experts.TritonStack:
    """The matrices of two experts."""
    if scheme is None:
        return experts.pack_stack(ExpertStack("", torch.empty(2, rows, cols, dtype=BF16), None))
    weight = QuantisedWeight.empty(scheme, rows, Span(0, cols), BF16, torch.device("cpu"), (2,))
    return experts.pack_stack(ExpertStack("", weight, None))


def multiply_experts(scheme: str | None, tokens: int) -> None:
    """The first product of a mixture, with the activation that follows it."""
    gate_up, down = (
        made_stack(scheme, *dims) for dims in ((2 * MIXTURE.width, MIXTURE_HIDDEN), (MIXTURE_HIDDEN, MIXTURE.width))
    )
    mixture = experts.TritonExperts(spec=MIXTURE, gate_up=gate_up, down=down, first=0, processors=PROCESSORS)
    numbers = torch.zeros(tokens, dtype=torch.int32)
    out = torch.empty(tokens * MIXTURE.top_k, MIXTURE.width, dtype=BF16)
    x, blocks = torch.empty(tokens, MIXTURE_HIDDEN, dtype=BF16), routing.SortedRows(numbers, numbers)
    mixture.multiply(x, gate_up, blocks, out, choices=MIXTURE.top_k, gated=True)


def multiply_with_shared() -> None:
    """The same beside an expert that sees every token, for few tokens."""
    stacks = (
        made_stack(None, *dims) for dims in ((2 * MIXTURE.width, MIXTURE_HIDDEN), (MIXTURE_HIDDEN, MIXTURE.width))
    )
    gate_up, down = stacks
    mixture = experts.TritonExperts(spec=MIXTURE, gate_up=gate_up, down=down, first=0, processors=PROCESSORS)
    numbers = torch.zeros(16, dtype=torch.int32)
    x, out = torch.empty(16, MIXTURE_HIDDEN, dtype=BF16), torch.empty(16 * MIXTURE.top_k, MIXTURE.width, dtype=BF16)
    shared = experts.SharedRows(x, gate_up.weight, out[:16])
    rows = routing.SortedRows(numbers, numbers)
    mixture.multiply(x, gate_up, rows, out, choices=MIXTURE.top_k, gated=True, shared=shared)


def sort_rows() -> None:
    routed = torch.zeros(MIXTURE.count, dtype=torch.int64)
    routing.sort_rows(torch.zeros(2, MIXTURE.top_k, dtype=torch.int64), 0, routed, 16)


def place_rows() -> None:
    numbers = torch.zeros(16, 24, dtype=torch.int32)
    grouped.place_rows(routing.SortedRows(numbers, numbers[:, 0].contiguous()), 16)


def activate() -> None:
    grouped.activate(torch.empty(16, 2 * MIXTURE.width, dtype=BF16), MIXTURE)


def sum_parts() -> None:
    numbers = torch.zeros(2, MIXTURE.top_k, dtype=torch.int64)
    parts = torch.empty(2 * MIXTURE.top_k, MIXTURE_HIDDEN, dtype=BF16)
    routing.sum_parts(parts, numbers, numbers.float(), 0, MIXTURE.count)


def choose_experts(spec: Experts = MIXTURE) -> None:
    correction = torch.zeros(spec.count) if spec.correction else None
    routing.choose_experts(torch.empty(2, spec.count), spec, torch.zeros(2, dtype=torch.int64), correction)


def sort_many() -> None:
    routed = torch.zeros(MIXTURE.count, dtype=torch.int64)
    routing.sort_rows(torch.zeros(16384, MIXTURE.top_k, dtype=torch.int64), 0, routed, 128)


def route(tokens: int, hidden: int, spec: Experts = MIXTURE) -> None:
    correction = torch.zeros(spec.count) if spec.correction else None
    product = router.create_router(torch.empty(spec.count, hidden, dtype=BF16), None)
    product.choose_experts(
        torch.empty(tokens, hidden, dtype=BF16), spec, torch.zeros(tokens, dtype=torch.int64), correction
    )


def mask() -> None:
    logits, masks = torch.empty(2, VOCAB, dtype=BF16), torch.zeros(2, mask_words(VOCAB), dtype=torch.int32)
    sampling.apply_masks(logits, torch.zeros(2, dtype=torch.int64), masks)


def dequantise(scheme: str) -> None:
    products.create_quantised_matrix(made_weight(scheme), None, PROCESSORS).rows(torch.zeros(16, dtype=torch.int64))


def round_weight(scheme: str) -> None:
    rounding.round_on_gpu(torch.empty(HIDDEN, HIDDEN, dtype=BF16), made_weight(scheme))


def lay(rows: int) -> None:
    """The arrays of a step in which `rows` requests write one token each."""
    batch = made_batch(rows)
    numbers = torch.zeros(rows, dtype=torch.int32)
    staged = StagedStep(
        tokens=numbers,
        positions=numbers,
        places=numbers.long()[None],
        row_starts=batch.row_starts,
        context=numbers,
        order=numbers,
        slots=numbers,
        growth=torch.zeros(3, rows, dtype=torch.int32),
        blocks=numbers[None],
        last=numbers.long(),
        tables=batch.tables[None],
        decodes=rows,
        width=batch.tables.shape[1],
        host=NO_ROWS,
    )
    fill_batch(staged, batch)


def head_norm(head_dim: int) -> HeadNorm:
    return HeadNorm(torch.empty(head_dim, dtype=BF16), torch.empty(head_dim, dtype=BF16), 1e-6)


CASES = (
    Case("_decode", "bf16, head 128", decode_work, partial(decode, 256, 128)),
    Case("_decode", "bf16, head 64", decode_work, partial(decode, 256, 64)),
    Case("_decode", "bf16, head 128, context split", decode_work, partial(decode, 1, 128)),
    Case("_decode", "FP8 cache, head 128", decode_work, partial(decode, 256, 128, FP8), FP8_SINCE),
    Case("_decode", "FP8 cache, head 64", decode_work, partial(decode, 256, 64, FP8), FP8_SINCE),
    Case("_decode", "head 128, parts joined", join_work, partial(decode, 1, 128), loop=1),
    Case("_decode_latents", "bf16, 512 + 64", latents_work, partial(attend_latents, 256, 256)),
    Case("_decode_latents", "bf16, 512 + 64, context split", latents_work, partial(attend_latents, 1, 1)),
    Case(
        "_decode_latents",
        "bf16, 512 + 64, 128 heads, Hopper",
        latents_work,
        partial(attend_latents, 256, 256, 128, hopper=True),
        *HOPPER,
    ),
    Case("_prefill_latents", "bf16, 512 + 64", latents_flops, partial(attend_latents, 256, 0), loop=1),
    Case(
        "_prefill_latents",
        "bf16, 512 + 64, Hopper",
        latents_flops,
        partial(attend_latents, 256, 0, hopper=True),
        *HOPPER,
        loop=1,
    ),
    Case("_attend_expanded", "bf16, 128 + 64, values of 128", expanded_flops, attend_expanded, loop=1),
    Case(
        "_attend_expanded",
        "bf16, 128 + 64, values of 128, Hopper",
        expanded_flops,
        partial(attend_expanded, hopper=True),
        *HOPPER,
        loop=1,
    ),
    Case("_store_latents", "512 + 64", store_latents_work, partial(store_latents, 2)),
    Case("_prefill", "bf16, head 128", prefill_work, partial(prefill, 128), loop=1),
    Case("_prefill", "bf16, head 64", prefill_work, partial(prefill, 64), loop=1),
    Case("_prefill", "FP8 cache, head 128", prefill_work, partial(prefill, 128, FP8), FP8_SINCE, loop=1),
    Case("_rotate_and_store", "head 128", rotate_work, partial(rotate, 128, None)),
    Case("_rotate_and_store", "head 128, norms of heads", rotate_work, partial(rotate, 128, head_norm(128))),
    Case("_lay", "256 rows", lay_work, partial(lay, 256)),
    Case("_rms_norm", "4096", norm_work, partial(norm, False)),
    Case("_rms_norm", "4096, residual added", norm_work, partial(norm, True)),
    Case("_silu_mul", "14336", silu_work, silu_mul),
    Case("_sum_add_norm", "4096, 2 ranks", sum_norm_work, sum_add_norm),
    Case("_survey", "128256", logits_work, sample),
    Case("_filter", "128256", logits_work, sample),
    Case("_draw", "128256", draw_work, sample),
    Case("_mask", "128256", mask_work, mask),
    Case("_multiply", "Q4_1, 1-16 tokens", multiply_work, partial(multiply, "Q4_1", 1)),
    Case("_multiply", "Q4_1, 64 tokens", multiply_work, partial(multiply, "Q4_1", 64)),
    Case("_multiply", "INT8, 1-16 tokens", multiply_work, partial(multiply, "INT8", 1)),
    Case("_multiply", "INT8, 64 tokens", multiply_work, partial(multiply, "INT8", 64)),
    Case("_multiply", "INT4_128, 1-16 tokens", multiply_work, partial(multiply, "INT4_128", 1)),
    Case("_multiply", "INT4_128, 64 tokens", multiply_work, partial(multiply, "INT4_128", 64)),
    Case("_multiply", "FP8_128, 1-16 tokens", multiply_work, partial(multiply, "FP8_128", 1)),
    Case("_multiply", "FP8_128, 64 tokens", multiply_work, partial(multiply, "FP8_128", 64)),
    Case("_multiply", "FP8_ROW, 1-16 tokens", multiply_work, partial(multiply, "FP8_ROW", 1)),
    Case("_dequantise", "Q4_1", dequantise_work, partial(dequantise, "Q4_1")),
    Case("_dequantise", "INT8", dequantise_work, partial(dequantise, "INT8")),
    Case("_dequantise", "FP8_128", dequantise_work, partial(dequantise, "FP8_128")),
    *(
        Case(
            "_multiply_experts",
            f"{scheme or 'bf16'}, blocks of {block}",
            experts_work,
            partial(multiply_experts, scheme, tokens),
        )
        for scheme in (None, "Q4_1", "INT8", "MXFP4", "FP8_128")
        for block, tokens in ((16, 256), (128, 2048))  # of 128 experts, of which a token chooses 8
    ),
    Case("_multiply_experts", "bf16, with a shared expert", experts_work, multiply_with_shared),
    Case("_choose", "8 of 128", choose_work, choose_experts),
    Case("_choose", "8 of 256, in groups", choose_work, partial(choose_experts, GROUPED)),
    Case("_route", "8 of 128", route_work, partial(route, 16, MIXTURE_HIDDEN)),
    Case("_route", "8 of 256, in groups", route_work, partial(route, 16, GROUPED_HIDDEN, GROUPED)),
    Case("_score", "128 experts", score_work, partial(route, 8192, MIXTURE_HIDDEN)),
    Case("_sort", "128 experts", sort_work, sort_rows),
    Case("_count_pairs", "128 experts", sort_work, sort_many),
    Case("_add_counts", "128 experts", add_counts_work, sort_many),
    Case("_place_pairs", "128 experts", place_pairs_work, sort_many),
    Case("_place_rows", "blocks of 24", place_work, place_rows),
    Case("_activate", "768", silu_work, activate),
    Case("_sum", "8 experts", sum_work, sum_parts),
    Case("_round", "Q4_1", round_work, partial(round_weight, "Q4_1")),
    Case("_round", "INT8", round_work, partial(round_weight, "INT8")),
)


def is_first_variant(case: Case) -> bool:
    """True for one case of each kernel."""
    return case is next(other for other in CASES if other.kernel == case.kernel)
