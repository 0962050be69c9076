"""CUDA graph capture, one at a time in a process.

Torch knows one capture per process. While it is underway, no thread may wait for a whole device, nor give the
allocator's memory back: either ends the capture, and torch refuses both from then on. So whoever does one of the three
holds one lock. Steps of other threads, each on a stream of its own, go on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_exclusive = threading.Lock()


def capture_graph(run: Callable[[], object], stream: torch.cuda.Stream, pool: object = None) -> torch.cuda.CUDAGraph:
    """Record what `run` launches, on `stream`, with memory from `pool`, the handle of an earlier graph's.

    Not `torch.cuda.graph`, which gives the allocator's memory back: the next prompt would have to take it again.
    """
    graph = torch.cuda.CUDAGraph()
    with _exclusive:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                run()
            finally:
                graph.capture_end()
    return graph


def synchronize_device(device: torch.device) -> None:
    """Wait for all that `device` has to do."""
    with _exclusive:
        torch.cuda.synchronize(device)


def release_cached_memory() -> None:
    """Give back what the allocator holds for later, on all devices."""
    with _exclusive:
        torch.cuda.empty_cache()
