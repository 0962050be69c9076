"""Staging: a step's arrays on their way to the device, in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 16  # bytes: Triton compiles anew for a tensor that begins anywhere else
BUFFERS = 3  # one being filled, and one for each step that may be on its way


class Staging:
    """On a GPU, arrays pass through pinned memory that is allocated once, and the host does not wait for them. On a CPU
    they are where they should be."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def put(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """The arrays as tensors on the device, of the same dtypes and dims. Once per step: more would wait for steps
        that have not ended."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        buffer, done = self._buffer(ends[-1])
        bytes_ = buffer.numpy()
        begins = [0, *ends[:-1]]
        for array, begin in zip(arrays, begins, strict=True):
            bytes_[begin : begin + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        there = buffer[: ends[-1]].to(self._device, non_blocking=True)
        done.record()
        return [
            there[begin : begin + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for array, begin in zip(arrays, begins, strict=True)
        ]

    def _buffer(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Pinned memory that no copy reads any more."""
        self._turn = (self._turn + 1) % BUFFERS
        if len(self._buffers) <= self._turn:
            self._buffers += [self._made(size) for _ in range(BUFFERS)]
        buffer, done = self._buffers[self._turn]
        done.synchronize()
        if buffer.numel() < size:
            self._buffers[self._turn] = buffer, done = self._made(2 * size)
        return buffer, done

    def _made(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()


def sent(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """One array on its own, through pinned memory of torch's: on a GPU the host does not wait here either."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
