"""Rows of [R, V] tensors: chunks of a good size for the device, selections, and copies of their numbers to it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

# Elements that are worked on at once. On a CPU, per thread: intermediate results stay in its cache, and in memory
# that the allocator has at hand, since fresh pages cost more than the arithmetic. On a GPU: enough to fill it, and
# at about 45 bytes each while top-p sorts them, little of its memory.
CPU_ELEMENTS = 2**18
GPU_ELEMENTS = 2**22


def row_chunks(rows: int, tensor: torch.Tensor) -> Iterator[slice]:
    """Cut `rows` rows of the width of `tensor` [R, V] into chunks of a good size for its device."""
    elements = CPU_ELEMENTS * torch.get_num_threads() if tensor.device.type == "cpu" else GPU_ELEMENTS
    step = max(1, elements // tensor.shape[1])
    return (slice(begin, begin + step) for begin in range(0, rows, step))


def pick_rows(tensor: torch.Tensor, rows: np.ndarray, on_device: torch.Tensor | None = None) -> torch.Tensor:
    """Select rows by their ascending numbers: a view if they are adjacent, else a copy.

    `on_device` are the same numbers on the tensor's device, if they are there already.
    """
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return tensor[first : last + 1]
    return tensor.index_select(0, copy_to_device(rows, tensor.device) if on_device is None else on_device)


def copy_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a single array to the device, on a GPU through torch's pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
