"""Contest of attention backends: the fastest one for a model's decode rows and prompts, measured on the GPU that runs
them.

The winner is kept in the cache: the next start does not import a library that has lost, and decides alike.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from weft._version import __version__
from weft.cache import cache_path, write_cache_file
from weft.errors import WeftError
from weft.logs import event_fields
from weft.ranks.kernels.attention import AttentionShape, PagedAttention
from weft.ranks.kernels.attention_inputs import AttentionInputs, decode_inputs, prompt_inputs
from weft.ranks.kernels.capture import capture_graph

logger = logging.getLogger("weft")

ROWS, CONTEXT = 32, 1024  # a batch whose KV cache, 134 MB with 8 heads of 128, is larger than the L2 of any GPU
PROMPTS, PROMPT = 2, 2048  # prompts of a step, and tokens of each
# Times a prompt's tokens, the context of the second one, which is the last part of a long prompt: backends that do not
# read KV blocks in place copy what came before.
LONG = 4
CALLS, REPEATS = 8, 7  # of a layer in a graph, and of the graph

# Measures one call of a function, in seconds.
Clock = Callable[[Callable[[], object]], float]


def graph_seconds(run: Callable[[], object]) -> float:
    """Seconds of one call on the current GPU, in a CUDA graph like decode steps: the median over REPEATS replays."""

    def calls() -> None:
        for _ in range(CALLS):
            run()

    run()
    graph = capture_graph(calls, torch.cuda.Stream())
    graph.replay()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return median(times)


def attention_seconds(
    attention: PagedAttention, shape: AttentionShape, inputs: AttentionInputs, clock: Clock = graph_seconds
) -> float:
    """Seconds of one layer's attention, with the first of the shape's windows."""
    q, cache, batch = inputs
    group, window = shape.group_windows[0]
    attention.prepare(batch)
    return clock(partial(attention.attend, q, cache, batch.of_group(group), shape.scale, window))


def winner_path(device: torch.device, shape: AttentionShape, *rivals: object) -> Path | None:
    """File that holds the winner for this GPU, these heads and these versions. `rivals` are the other library's version
    and our tile sizes. None if there is no home directory for a cache."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    key = repr((name, shape, rivals, torch.__version__, __version__))
    try:
        return cache_path() / f"attention-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    except RuntimeError:
        return None


def load_winner(path: Path | None, rivals: Sequence[str]) -> str | None:
    """The rival that is recorded as the fastest of the `rivals`, if any is."""
    try:
        name = path.read_text().strip() if path else ""
    except (OSError, ValueError):
        return None
    if name not in rivals:
        return None
    logger.info("Attention by %s, which was the faster one when it was measured (%s)", name, path)
    return name


def save_winner(path: Path | None, name: str | None) -> None:
    """Record the fastest backend for the next start, which measures again if the file cannot be written."""
    if path is None or name is None:
        return
    try:
        write_cache_file(path, name.encode())
    except (OSError, WeftError) as error:
        logger.debug("the faster attention backend cannot be recorded: %s", error)


def measure_fastest(
    candidates: Sequence[PagedAttention], device: torch.device, shape: AttentionShape, clock: Clock = graph_seconds
) -> str | None:
    """Name of the attention with the least sum of two ratios, or None if that cannot be measured. The ratios are the
    times of a layer's decode rows and of prompts, each divided by the shortest time of all candidates.

    Ranks may decide differently: each attends with its own heads, and all sum the same tensors either way.
    """
    rows, context = min(ROWS, shape.rows), min(CONTEXT, shape.length)
    prompt = min(PROMPT, shape.length, max(1, shape.tokens // PROMPTS))
    times: dict[str, tuple[float, float]] = {}
    try:
        decodes = decode_inputs(shape, device, [context] * rows)
        prompts = prompt_inputs(shape, device, [prompt] * PROMPTS, [prompt, min(LONG * prompt, shape.length)])
        for attention in candidates:
            # In this order: what a backend prepares for prompts takes the place of what it has prepared for rows.
            steps = [attention_seconds(attention, shape, inputs, clock) for inputs in (decodes, prompts)]
            times[attention.name] = steps[0], steps[1]
    except Exception as error:
        # Too little memory, or a kernel without code for this GPU: the other backend is only an option.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        logger.warning("Attention backends cannot be compared (%s): Triton's is used", lines[0][:200])
        return None
    shortest = [min(took) for took in zip(*times.values(), strict=True)]
    fastest = min(times, key=lambda name: sum(took / least for took, least in zip(times[name], shortest, strict=True)))
    figures = ", ".join(f"{name} {decode * 1e6:.0f} and {read * 1e6:.0f} us" for name, (decode, read) in times.items())
    logger.info(
        "Attention of %d rows over %d tokens, and of %d prompts of %d: %s: --attention-backend %s is used",
        rows,
        context,
        PROMPTS,
        prompt,
        figures,
        fastest,
        extra=event_fields(
            "attention-backends-compared", rows=rows, tokens=context, prompt=prompt, seconds=times, fastest=fastest
        ),
    )
    return fastest
