"""CUDA graph capture, one at a time in a process.

torch allows one capture per process. During a capture, no thread may wait for a whole device or release the
allocator's memory: either ends the capture, and torch refuses both from then on. Each of the three therefore holds one
lock. Steps of other threads, each on its own stream, go on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_exclusive = threading.Lock()


def capture_graph(run: Callable[[], object], stream: torch.cuda.Stream, pool: object = None) -> torch.cuda.CUDAGraph:
    """Record the launches of `run` on `stream`, with memory from `pool`, the handle of an earlier graph's pool.

    `torch.cuda.graph` is not used because it releases the allocator's memory, which the next prompt would take again.
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
    """Wait for all work of `device`."""
    with _exclusive:
        torch.cuda.synchronize(device)


def release_cached_memory() -> None:
    """Release the allocator's unused memory on all devices."""
    with _exclusive:
        torch.cuda.empty_cache()
