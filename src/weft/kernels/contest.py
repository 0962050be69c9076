"""A contest: which of two kernels attends faster to a model's decode rows, measured where they will run.

The outcome is kept for the next start, which then imports no library that has lost, and answers as this one does.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from weft import __version__
from weft.cache import cache_path, write
from weft.errors import WeftError
from weft.kernels.attention_inputs import AttentionInputs, decode_inputs
from weft.kernels.base import AttentionShape, Kernels
from weft.kernels.capture import capture_graph
from weft.plan.backends import GPU_BACKENDS

logger = logging.getLogger("weft")

ROWS, CONTEXT = 32, 1024  # a batch whose cache, 134 MB with 8 heads of 128, is beyond the L2 of any GPU
CALLS, REPEATS = 8, 7  # of a layer in a graph, and of the graph

# Seconds that one call of a function takes.
Clock = Callable[[Callable[[], object]], float]


def graph_seconds(run: Callable[[], object]) -> float:
    """Of a call on the current GPU, in a graph, as decode steps run: the median over REPEATS replays."""

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
    kernels: Kernels, shape: AttentionShape, given: AttentionInputs, clock: Clock = graph_seconds
) -> float:
    """Seconds of a layer's attention, of the first kind of window."""
    kernels.prepare(given[2])
    return clock(partial(kernels.attend, *given, shape.scale, shape.windows[0]))


def winner_path(device: torch.device, shape: AttentionShape, *rivals: object) -> Path | None:
    """Where the winner is kept for this GPU, these heads and these versions; `rivals` are the other library's and our
    sizes. None where there is no home for a cache."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    told = repr((name, shape, rivals, torch.__version__, __version__))
    try:
        return cache_path() / f"attention-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    except RuntimeError:
        return None


def load_winner(at: Path | None) -> str | None:
    """Who won before."""
    try:
        found = at.read_text().strip() if at else ""
    except (OSError, ValueError):
        return None
    if found not in GPU_BACKENDS:
        return None
    logger.info("Attention by %s, which was the faster one when it was measured (%s)", found, at)
    return found


def save_winner(at: Path | None, found: str | None) -> None:
    """Have it known at the next start; where it cannot be written it is measured again."""
    if at is None or found is None:
        return
    try:
        write(at, found.encode())
    except (OSError, WeftError) as error:
        logger.debug("the faster attention cannot be kept: %s", error)


def measure_fastest(
    both: Sequence[Kernels], device: torch.device, shape: AttentionShape, clock: Clock = graph_seconds
) -> str | None:
    """Which takes the least time for a layer's decode rows, None where that cannot be measured. Ranks need not agree:
    each attends with its own heads, and what they sum is the same number of tensors either way."""
    rows, context = min(ROWS, shape.rows), min(CONTEXT, shape.length)
    try:
        given = decode_inputs(shape, device, [context] * rows)
        times = {kernels.name: attention_seconds(kernels, shape, given, clock) for kernels in both}
    except Exception as error:
        # Memory that is not there, a kernel that this GPU has no code for: it is only an offer.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        logger.warning("Which attention is faster cannot be measured (%s): Triton's is used", lines[0][:200])
        return None
    found = min(times, key=times.__getitem__)
    told = ", ".join(f"{name} {took * 1e6:.0f} us" for name, took in times.items())
    logger.info("Attention of %d rows over %d tokens: %s: --attention-backend %s is used", rows, context, told, found)
    return found
