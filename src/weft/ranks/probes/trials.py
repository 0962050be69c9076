"""Trials of the attention kernels: each candidate size is timed on the GPU, over contexts of mixed lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import torch

from weft.ranks.kernels.attention import AttentionShape, KVCache
from weft.ranks.kernels.attention_inputs import AttentionInputs, decode_inputs, prompt_inputs
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.contest import Clock, graph_seconds
from weft.ranks.kernels.triton.attention import decode, prefill
from weft.ranks.kernels.triton.tuning import DECODE, DECODE_CANDIDATES, PREFILL, PREFILL_CANDIDATES, Tuning, Tunings
from weft.ranks.kernels.usable import multiprocessor_count, shared_memory_bytes

ROWS = (1, 8, 64, 256)  # rows of decode steps; other numbers use the nearest
SHORTEST, LONGEST = 100, 2048  # contexts of decode steps, in tokens
PROMPTS = {"4 prompts of 512": ([512] * 4, [512] * 4), "2,048 tokens after 6,144": ([2048], [8192])}  # counts, contexts
# A race takes keys and values from several caches in turn: more bytes in all than the L2 of any GPU holds, but at most
# PLACES caches.
COLD_BYTES, PLACES = 256 << 20, 64
MARGIN = 0.03  # a size must be faster than the default by this share to replace it
ROUNDING = 0.02  # results may differ by this share of the largest value
OTHER_NUMBERS = "it gives other numbers"  # the obstacle of a size whose results differ by more

# Queries, a cache and a batch -> [T, q_heads * head_dim].
Attend = Callable[[torch.Tensor, KVCache, Batch], torch.Tensor]
# Seconds of a layer by kernel size or backend, and why others are excluded.
Times = dict[object, float]
Obstacles = dict[object, str]


@dataclass
class Race:
    """Attention by several `entries` over the same `samples`: equal inputs at several places of memory."""

    title: str
    samples: Sequence[AttentionInputs]
    entries: dict[object, Attend]

    def run_entries(self, clock: Clock = graph_seconds) -> tuple[Times, Obstacles]:
        """Time every entry. Excluded are entries that fail on this device, or differ from the first that runs."""
        times: Times = {}
        obstacles: Obstacles = {}
        expected = None
        for name, attend in self.entries.items():
            try:
                result = attend(*self.samples[0]).float()
                expected = result if expected is None else expected
                if not (result - expected).abs().max() <= ROUNDING * expected.abs().max():
                    obstacles[name] = OTHER_NUMBERS
                else:
                    times[name] = clock(partial(self._attend_all, attend)) / len(self.samples)
            except Exception as error:  # too little memory on the device, or code that it does not run
                obstacles[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        return times, obstacles

    def _attend_all(self, attend: Attend) -> None:
        for sample in self.samples:
            attend(*sample)


def decode_race(shape: AttentionShape, device: torch.device, contexts: list[int]) -> Race:
    """Race of one decode step with these context lengths, over DECODE_CANDIDATES."""
    q, cache, batch = decode_inputs(shape, device, contexts)
    copies = min(PLACES - 1, COLD_BYTES // (cache.keys.nbytes + cache.values.nbytes))
    caches = [cache, *(KVCache(cache.keys.clone(), cache.values.clone()) for _ in range(copies))]

    through = torch.zeros(len(contexts) * shape.kv_heads, dtype=torch.int32, device=device)

    def attend(tuning: Tuning, q: torch.Tensor, cache: KVCache, batch: Batch) -> torch.Tensor:
        out, sizes = torch.empty_like(q).flatten(1), (tuning, shared_memory_bytes(device), through)
        decode(q, cache, batch, batch.rows, shape.scale, shape.windows[0], multiprocessor_count(device), out, *sizes)
        return out

    least, most = min(contexts), max(contexts)
    title = f"{step_name(len(contexts))} over {least:,}" + (f" to {most:,} tokens" if most > least else " tokens")
    samples = [(q, place, batch) for place in caches]
    return Race(title, samples, {tuning: partial(attend, tuning) for tuning in DECODE_CANDIDATES})


def prefill_race(shape: AttentionShape, device: torch.device, title: str) -> Race:
    """Race of a case of PROMPTS, cut to the longest allowed context, over PREFILL_CANDIDATES."""
    counts, contexts = ([min(length, shape.length) for length in lengths] for lengths in PROMPTS[title])

    def attend(tuning: Tuning, q: torch.Tensor, cache: KVCache, batch: Batch) -> torch.Tensor:
        out = torch.empty_like(q).flatten(1)
        prefill(q, cache, batch, 0, shape.scale, shape.windows[0], out, tuning, shared_memory_bytes(device))
        return out

    sample = prompt_inputs(shape, device, counts, contexts)
    return Race(title, [sample], {tuning: partial(attend, tuning) for tuning in PREFILL_CANDIDATES})


def step_name(rows: int) -> str:
    """Name of a decode step with this number of rows."""
    return f"decode of {rows} row{'s' * (rows > 1)}"


def mixed_lengths(rows: int, longest: int) -> list[int]:
    """Context lengths spread evenly from SHORTEST to LONGEST, or to `longest` if less, in a fixed random order."""
    most = min(LONGEST, longest)
    least = min(SHORTEST, most)
    contexts = [least + (most - least) * (2 * row + 1) // (2 * rows) for row in range(rows)]
    return Random(0).sample(contexts, rows)


def measure_tunings(
    shape: AttentionShape,
    device: torch.device,
    clock: Clock = graph_seconds,
    report: Callable[[str, Times, Obstacles], object] = lambda title, times, obstacles: None,
) -> Tunings:
    """Find the fastest sizes for decode and prefill; `report` gets the result of every race.

    A race that does not fit into memory keeps the default. Raises RuntimeError with the reason if no race can run.
    """
    results: list[tuple[Times, Obstacles]] = []

    def run_race(title: str, build: Callable[[], Race]) -> Times:
        try:
            race = build()
            title, (times, obstacles) = race.title, race.run_entries(clock)
        except torch.OutOfMemoryError as error:
            times, obstacles = {}, {"all": str(error).splitlines()[0]}
        results.append((times, obstacles))
        report(title, times, obstacles)
        return times

    decode_tunings = {}
    for rows in [rows for rows in ROWS if rows <= shape.rows]:
        build = partial(decode_race, shape, device, mixed_lengths(rows, shape.length))
        decode_tunings[rows] = fastest_tuning([run_race(step_name(rows), build)], DECODE)
    prefills = [run_race(title, partial(prefill_race, shape, device, title)) for title in PROMPTS]
    if not any(times for times, _ in results):
        raise RuntimeError(next(iter(results[0][1].values())))
    return Tunings(decode_tunings, fastest_tuning(prefills, PREFILL))


def fastest_tuning(races: Sequence[Mapping[object, float]], default: Tuning) -> Tuning:
    """The size with the least time over all races, each with equal weight; `default` unless another is faster by
    MARGIN."""
    complete = [name for name in races[0] if isinstance(name, Tuning) and all(name in times for times in races)]
    totals = {tuning: sum(times[tuning] / min(times.values()) for times in races) for tuning in complete}
    if not totals or totals.get(default, float("inf")) <= min(totals.values()) * (1 + MARGIN):
        return default
    return min(totals, key=totals.__getitem__)
