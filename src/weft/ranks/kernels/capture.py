"""CUDA graph capture, one at a time in a process.

torch allows one capture per process. During a capture, no thread may wait for a whole device or release the allocator's
memory: either ends the capture, and torch refuses both from then on. Each of the three therefore holds one lock. Steps
of other threads go on during a capture: ranks that are threads share the device's default stream, on which nothing is
captured.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

# Bytes that cuBLAS takes for each stream of a thread, at most: torch's default on Hopper and, from 2.12 on, Blackwell;
# 8 MiB on other GPUs.
WORKSPACE_BYTES = 32 << 20

_exclusive = threading.Lock()
_computing: weakref.WeakSet[object] = weakref.WeakSet()  # users of cuBLAS's workspaces


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


def use_workspaces(user: object) -> None:
    """Note that `user`, a rank, computes on a GPU, so that no other rank of this process gives its workspaces back."""
    with _exclusive:
        _computing.add(user)


def release_workspaces(user: object) -> None:
    """Give cuBLAS's workspaces of all streams back to the allocator if no rank of this process computes any more.

    torch keeps a workspace for each stream of a thread, and `empty_cache` does not free it. Graphs hold its address:
    the graphs of `user` have been dropped.
    """
    with _exclusive:
        _computing.discard(user)
        if not _computing:
            # Not public: https://github.com/pytorch/pytorch/issues/184084
            torch._C._cuda_clearCublasWorkspaces()


def release_cached_memory() -> None:
    """Release the allocator's unused memory on all devices."""
    with _exclusive:
        torch.cuda.empty_cache()


def release_pinned_memory() -> None:
    """Release the host's pinned memory that no tensor holds any more."""
    with _exclusive:
        torch._C._host_emptyCache()  # no public function before torch 2.12
