"""Chunks: rows of a [R, V] tensor, some at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from weft.worker.staging import sent

# Figures that are worked on at once. On a CPU, per thread: what is made of them stays in its cache, and in memory
# that the allocator has at hand, since fresh pages cost more than the arithmetic. On a GPU: enough to fill it, and
# at about 45 bytes each while top-p sorts them, little of its memory.
CPU_FIGURES = 2**18
GPU_FIGURES = 2**22


def chunks(rows: int, tensor: torch.Tensor) -> Iterator[slice]:
    """Cut `rows` rows of the width of `tensor` [R, V] into pieces of a good size for its device."""
    figures = CPU_FIGURES * torch.get_num_threads() if tensor.device.type == "cpu" else GPU_FIGURES
    step = max(1, figures // tensor.shape[1])
    return (slice(begin, begin + step) for begin in range(0, rows, step))


def pick(tensor: torch.Tensor, rows: np.ndarray, there: torch.Tensor | None = None) -> torch.Tensor:
    """Rows by their ascending numbers, which may be `there` on the device: a view where they lie together, else a
    copy."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return tensor[first : last + 1]
    return tensor.index_select(0, sent(rows, tensor.device) if there is None else there)
