"""Attention: every size of the Triton kernels (weft.ranks.probes.trials), and other backends that are installed; or,
with `chosen`, decode steps with the sizes that are in use: windows, sinks, caches of 8 bits and latents too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from scripts.programs.gpu_check.work import Figure, Options, is_wanted
from scripts.programs.gpu_check.work.products import COLD_BYTES, REPLAYS, timed
from weft.errors import ConfigError
from weft.ranks.kernels import create_kernels
from weft.ranks.kernels.attention import AttentionShape, KVCache, PagedAttention
from weft.ranks.kernels.attention_inputs import decode_inputs
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.contest import graph_seconds
from weft.ranks.kernels.latents import AbsorbedQueries
from weft.ranks.kernels.triton.tuning import DECODE, PREFILL, Tuning
from weft.ranks.probes import trials

HEADS = {"Qwen3-0.6B": (16, 8), "Llama-3.1-8B": (32, 8)}  # of queries, of KV
HEAD_DIM, LENGTH, BLOCK_SIZE = 128, 8192, 16
CUDA = torch.device("cuda", 0)
FP8 = torch.float8_e4m3fn
# Further decode steps: fields of their AttentionShape, and whether there are sinks.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "Qwen3-0.6B, FP8 cache": ({"q_heads": 16, "kv_heads": 8, "cache_dtype": FP8}, False),
    "gpt-oss-20b": ({"q_heads": 64, "kv_heads": 8, "head_dim": 64}, True),
    "gpt-oss-20b, window of 128": ({"q_heads": 64, "kv_heads": 8, "head_dim": 64, "windows": (128,)}, True),
}
KIND_CONTEXTS, LATENT_CONTEXTS, SHORT_CONTEXTS = [1024] * 32, [4096] * 64, [5, 20]
LATENT_HEADS = (16, 128)  # of DeepSeek-V2-Lite, and of DeepSeek-V3
OTHERS = ("flashinfer", "varlen")


def attention(options: Options) -> Iterator[Figure]:
    """Every size and backend; with `chosen`, decode attention with the default sizes only, and KINDS."""
    chosen, rehearse = options.get("chosen", False), options["rehearse"]
    for model, heads in HEADS.items():
        shape = attention_shape(*heads, rehearse=rehearse)
        others, notes = ({}, []) if chosen else backends(shape)
        yield from notes
        decoders = {name: each for name, each in others.items() if name == "flashinfer"}  # torch's is for prompts
        for contexts in decode_contexts(rehearse):
            race = trials.decode_race(shape, CUDA, contexts)
            if not is_wanted(options, f"{model}, {race.title}"):
                continue
            read = 2 * sum(contexts) * shape.kv_heads * shape.head_dim * shape.cache_dtype.itemsize
            add_backends(race, decoders, shape, default=DECODE, only=chosen or rehearse)
            yield from compared(model, race, DECODE, "GB/s", read / 1e9, options["copy_Bps"] / 1e9, rehearse=rehearse)
        if chosen:
            continue
        for name, (counts, contexts) in trials.PROMPTS.items():
            race = trials.prefill_race(shape, CUDA, name)
            counts, contexts = ([min(length, shape.length) for length in each] for each in (counts, contexts))
            pairs = sum(n * (c - n) + n * (n + 1) / 2 for n, c in zip(counts, contexts, strict=True))
            add_backends(race, others, shape, default=PREFILL, only=rehearse)
            flops = 4 * pairs * shape.q_heads * shape.head_dim
            yield from compared(model, race, PREFILL, "TFLOP/s", flops / 1e12, None, rehearse=rehearse)
    if chosen:
        yield from kinds(options)
        yield from latents(options)


def kinds(options: Options) -> Iterator[Figure]:
    """Decode steps of KINDS over caches that are not in the L2."""
    rehearse = options["rehearse"]
    contexts = SHORT_CONTEXTS if rehearse else KIND_CONTEXTS
    for name, (fields, with_sinks) in KINDS.items():
        title = f"{name}, {step_name(contexts)}"
        if not is_wanted(options, title):
            continue
        shape = attention_shape(16, 8, rehearse=True) if rehearse else attention_shape(1, 1, rehearse=False)
        window = fields.get("windows", (None,))[0]
        shape = replace(shape, windows=(window,)) if rehearse else replace(shape, **fields)
        kernels = create_kernels("triton", CUDA, shape)
        q, cache, batch = decode_inputs(shape, CUDA, contexts)
        sinks = torch.randn(shape.q_heads, device=CUDA).to(shape.dtype) if with_sinks else None
        read = 2 * sum(min(context, window or context) for context in contexts)
        read *= shape.kv_heads * shape.head_dim * shape.cache_dtype.itemsize
        caches = [cache] + [KVCache(cache.keys.clone(), cache.values.clone()) for _ in range(copies(read, rehearse))]
        calls = [
            partial(kernels.attention.attend, q, place, batch, shape.scale, window, None, sinks) for place in caches
        ]
        yield read_speed(title, read, calls, options)


def latents(options: Options) -> Iterator[Figure]:
    """Decode steps of DeepSeek's latent attention, in the absorbed form."""
    rehearse = options["rehearse"]
    rank, rope_dim, contexts = (16, 16, SHORT_CONTEXTS) if rehearse else (512, 64, LATENT_CONTEXTS)
    shape = replace(attention_shape(16, 8, rehearse=rehearse), kv_heads=1, head_dim=rank + rope_dim)
    kernels = create_kernels("triton", CUDA, shape)
    _, cache, batch = decode_inputs(shape, CUDA, contexts)
    read = sum(contexts) * shape.head_dim * shape.dtype.itemsize
    caches = [
        KVCache.of_latents(cache.keys if at == 0 else cache.keys.clone(), rank)
        for at in range(1 + copies(read, rehearse))
    ]
    for heads in (4,) if rehearse else LATENT_HEADS:
        title = f"latents, {heads} heads, {step_name(contexts)}"
        if not is_wanted(options, title):
            continue
        q = torch.randn(len(contexts), heads, shape.head_dim, device=CUDA).to(shape.dtype)
        parts = AbsorbedQueries.of(q, rank)
        calls = [partial(kernels.latents.attend, parts, place, batch, shape.head_dim**-0.5) for place in caches]
        yield read_speed(title, read, calls, options)


def step_name(contexts: list[int]) -> str:
    return f"decode of {len(contexts)} rows over {contexts[-1]:,} tokens"


def read_speed(title: str, read: int, calls: Sequence[Callable[[], torch.Tensor]], options: Options) -> Figure:
    """Bytes of the cache that one of several calls reads per second, beside a copy's."""
    took = timed(calls, 1 if options["rehearse"] else REPLAYS)
    bound = round(options["copy_Bps"] / 1e9, 1)
    return Figure(title, round(read / took / 1e9, 1), "GB/s", bound, note=f"{took * 1e6:.1f} us")


def copies(read: int, rehearse: bool) -> int:
    """Caches beside the first, so that COLD_BYTES are read before the same again."""
    return 1 if rehearse else COLD_BYTES // read


def attention_shape(q_heads: int, kv_heads: int, *, rehearse: bool) -> AttentionShape:
    dtype = torch.float32 if rehearse else torch.bfloat16
    if rehearse:
        q_heads, kv_heads = q_heads // 8, kv_heads // 8
    dim, length = (16, 32) if rehearse else (HEAD_DIM, LENGTH)
    return AttentionShape(
        q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, windows=(None,), scale=dim**-0.5, dtype=dtype,
        cache_dtype=dtype, block_size=BLOCK_SIZE, rows=256, tokens=2048, length=length,
    )  # fmt: skip


def decode_contexts(rehearse: bool) -> list[list[int]]:
    """Contexts of the rows of each batch: as on nano-vllm's workload, mixed, equal, alone."""
    if rehearse:
        return [[5, 20]]
    lengths = random.Random(0)
    nano = [lengths.randint(100, 1500) for _ in range(256)]
    return [nano, trials.mixed_lengths(32, LENGTH), [1024] * 32, [4096]]


def backends(shape: AttentionShape) -> tuple[dict[str, PagedAttention], list[Figure]]:
    """Other backends that run here, and a note for each that does not."""
    usable, notes = {}, []
    for name in OTHERS:
        try:
            usable[name] = create_kernels(name, CUDA, shape).attention
        except ConfigError as error:
            notes.append(Figure(f"attention by {name}, {shape.q_heads} heads", None, "", note=str(error)))
    return usable, notes


def add_backends(
    race: trials.Race, others: dict[str, PagedAttention], shape: AttentionShape, *, default: object, only: bool
) -> None:
    """Have `others` race too; with `only`, ours with no other than the default sizes."""
    if only:
        race.entries = {default: race.entries[default]}
    for name, other in others.items():
        other.prepare(race.samples[0][2])
        race.entries[name] = partial(attend_by, other, shape.scale)


def attend_by(backend: PagedAttention, scale: float, q: torch.Tensor, cache: KVCache, batch: Batch) -> torch.Tensor:
    return backend.attend(q, cache, batch, scale, None)


def compared(
    model: str,
    race: trials.Race,
    default: Tuning,
    unit: str,
    amount: float,
    roofline: float | None,
    *,
    rehearse: bool,
) -> Iterator[Figure]:
    """A figure for each entry that ran, the fastest one marked, the speed of the default sizes to that of the fastest
    ones, and a note for each entry that did not run."""
    if rehearse:
        race.samples = race.samples[:1]
    times, obstacles = race.run_entries(called_once if rehearse else graph_seconds)
    best = min(times.values(), default=None)
    for name, took in times.items():
        note = f"{took * 1e6:.1f} us{', fastest' if took == best and len(times) > 1 else ''}"
        yield Figure(f"{model}, {race.title}: {label(name)}", round(amount / took, 1), unit, roofline, note=note)
    ours = [took for name, took in times.items() if isinstance(name, Tuning)]
    if default in times and len(ours) > 1:
        share = round(min(ours) / times[default], 3)
        yield Figure(f"{model}, {race.title}: chosen sizes to the fastest", share, "times")
    for name, why in obstacles.items():
        yield Figure(f"{model}, {race.title}: {label(name)}", None, unit, note=why)


def called_once(call: Callable[[], object]) -> float:
    """In the place of a clock on a stand-in for a card."""
    call()
    return 1e-3


def label(entry: object) -> str:
    """`entry` by name, the default sizes as "chosen"."""
    return f"{entry} (chosen)" if entry in (DECODE, PREFILL) else str(entry)
