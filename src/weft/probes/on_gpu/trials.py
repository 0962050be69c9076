"""Trials: the attention kernels in each of their sizes, timed where they will run, over contexts of mixed lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import torch

from weft.kernels.attention_inputs import AttentionInputs, decode_inputs, prompt_inputs
from weft.kernels.base import AttentionShape, KVCache
from weft.kernels.batch import Batch
from weft.kernels.contest import Clock, graph_seconds
from weft.kernels.triton.attention import decode, prefill
from weft.kernels.triton.tuning import (
    DECODE,
    DECODE_CANDIDATES,
    PREFILL,
    PREFILL_CANDIDATES,
    Tuning,
    Tunings,
)
from weft.kernels.usable import multiprocessor_count, shared_memory_bytes

ROWS = (1, 8, 64, 256)  # of decode steps; of other numbers the nearest counts
SHORTEST, LONGEST = 100, 2048  # of their contexts
PROMPTS = {"4 prompts of 512": ([512] * 4, [512] * 4), "2,048 tokens after 6,144": ([2048], [8192])}  # counts, contexts
# Of keys and values that a race goes through in turn, more than the L2 of any GPU holds; but in so many places at most.
COLD_BYTES, PLACES = 256 << 20, 64
MARGIN = 0.03  # by which another size has to be faster than the one that was chosen by reading
ROUNDING = 0.02  # of the greatest number, by which results may differ

# Queries, a cache and a batch -> [T, q_heads * head_dim].
Attend = Callable[[torch.Tensor, KVCache, Batch], torch.Tensor]
# Seconds of a layer by what attends, and why others are passed over.
Times = dict[object, float]
Obstacles = dict[object, str]


@dataclass
class Race:
    """What attends to the same queries, over the same keys and values at several places of memory."""

    what: str
    given: Sequence[AttentionInputs]
    entries: dict[object, Attend]

    def run(self, clock: Clock = graph_seconds) -> tuple[Times, Obstacles]:
        """Passed over is what cannot run on this device, and what gives other numbers than the first that does."""
        times: Times = {}
        obstacles: Obstacles = {}
        want = None
        for name, attend in self.entries.items():
            try:
                got = attend(*self.given[0]).float()
                want = got if want is None else want
                if not (got - want).abs().max() <= ROUNDING * want.abs().max():
                    obstacles[name] = "it gives other numbers"
                else:
                    times[name] = clock(partial(self._all, attend)) / len(self.given)
            except Exception as error:  # memory that the device lacks, code that it does not run
                obstacles[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        return times, obstacles

    def _all(self, attend: Attend) -> None:
        for it in self.given:
            attend(*it)


def decode_race(shape: AttentionShape, device: torch.device, contexts: list[int]) -> Race:
    """A decode step, by each of DECODE_CANDIDATES."""
    q, cache, batch = decode_inputs(shape, device, contexts)
    more = min(PLACES - 1, COLD_BYTES // (cache.keys.nbytes + cache.values.nbytes))
    caches = [cache, *(KVCache(cache.keys.clone(), cache.values.clone()) for _ in range(more))]

    through = torch.zeros(len(contexts) * shape.kv_heads, dtype=torch.int32, device=device)

    def attend(tuning: Tuning, q: torch.Tensor, cache: KVCache, batch: Batch) -> torch.Tensor:
        out, sizes = torch.empty_like(q).flatten(1), (tuning, shared_memory_bytes(device), through)
        decode(q, cache, batch, batch.rows, shape.scale, shape.windows[0], multiprocessor_count(device), out, *sizes)
        return out

    least, most = min(contexts), max(contexts)
    what = f"{step(len(contexts))} over {least:,}" + (f" to {most:,} tokens" if most > least else " tokens")
    return Race(what, [(q, it, batch) for it in caches], {it: partial(attend, it) for it in DECODE_CANDIDATES})


def prefill_race(shape: AttentionShape, device: torch.device, what: str) -> Race:
    """One of PROMPTS, as far as they may be that long, by each of PREFILL_CANDIDATES."""
    counts, contexts = ([min(length, shape.length) for length in lengths] for lengths in PROMPTS[what])

    def attend(tuning: Tuning, q: torch.Tensor, cache: KVCache, batch: Batch) -> torch.Tensor:
        out = torch.empty_like(q).flatten(1)
        prefill(q, cache, batch, 0, shape.scale, shape.windows[0], out, tuning, shared_memory_bytes(device))
        return out

    given = prompt_inputs(shape, device, counts, contexts)
    return Race(what, [given], {it: partial(attend, it) for it in PREFILL_CANDIDATES})


def step(rows: int) -> str:
    return f"decode of {rows} row{'s' * (rows > 1)}"


def mixed(rows: int, longest: int) -> list[int]:
    """Contexts that are spread evenly from SHORTEST to LONGEST, or to `longest`, in no order."""
    most = min(LONGEST, longest)
    least = min(SHORTEST, most)
    contexts = [least + (most - least) * (2 * row + 1) // (2 * rows) for row in range(rows)]
    return Random(0).sample(contexts, rows)


def measured(
    shape: AttentionShape,
    device: torch.device,
    clock: Clock = graph_seconds,
    tell: Callable[[str, Times, Obstacles], object] = lambda what, times, obstacles: None,
) -> Tunings:
    """The fastest sizes; `tell` hears of every race. What there is no memory for stays as it is; where nothing can be
    measured it is a RuntimeError that says why."""
    told: list[tuple[Times, Obstacles]] = []

    def held(what: str, race: Callable[[], Race]) -> Times:
        try:
            made = race()
            what, (times, obstacles) = made.what, made.run(clock)
        except torch.OutOfMemoryError as error:
            times, obstacles = {}, {"all": str(error).splitlines()[0]}
        told.append((times, obstacles))
        tell(what, times, obstacles)
        return times

    found = {}
    for rows in [rows for rows in ROWS if rows <= shape.rows]:
        race = partial(decode_race, shape, device, mixed(rows, shape.length))
        found[rows] = best([held(step(rows), race)], DECODE)
    prefills = [held(what, partial(prefill_race, shape, device, what)) for what in PROMPTS]
    if not any(times for times, _ in told):
        raise RuntimeError(next(iter(told[0][1].values())))
    return Tunings(found, best(prefills, PREFILL))


def best(races: Sequence[Mapping[object, float]], chosen: Tuning) -> Tuning:
    """What took least in all races, each counting the same; `chosen` where nothing is faster by MARGIN."""
    ran = [it for it in {**races[0]} if isinstance(it, Tuning) and all(it in times for times in races)]
    took = {it: sum(times[it] / min(times.values()) for times in races) for it in ran}
    if not took or took.get(chosen, float("inf")) <= min(took.values()) * (1 + MARGIN):
        return chosen
    return min(took, key=took.__getitem__)
