"""Transfer of a step's arrays to the device, in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 16  # bytes: Triton compiles another kernel for a tensor that begins anywhere else
BUFFERS = 3  # one that is filled, and two steps in flight; with more of them `put` waits for the oldest copy


class Staging:
    """Copies the arrays of each step to the device.

    On a GPU they pass through pinned memory that is allocated once, and the host does not wait for the copy. On a CPU
    they stay where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def put(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Copy the arrays to the device, as tensors of the same dtypes and dims.

        On a CPU the tensors share the arrays' memory. To be called once per step: each call takes the next buffer, and
        waits for that buffer's last copy.
        """
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        buffer, copied = self._next_buffer(ends[-1])
        bytes_ = buffer.numpy()
        begins = [0, *ends[:-1]]
        for array, begin in zip(arrays, begins, strict=True):
            bytes_[begin : begin + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        on_device = buffer[: ends[-1]].to(self._device, non_blocking=True)
        copied.record()
        return [
            on_device[begin : begin + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for array, begin in zip(arrays, begins, strict=True)
        ]

    def _next_buffer(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Pinned memory of `size` bytes at least that no copy reads any more, and the event for its next copy."""
        self._turn = (self._turn + 1) % BUFFERS
        if len(self._buffers) <= self._turn:
            self._buffers += [self._allocate(size) for _ in range(BUFFERS)]
        buffer, copied = self._buffers[self._turn]
        copied.synchronize()
        if buffer.numel() < size:
            self._buffers[self._turn] = buffer, copied = self._allocate(2 * size)
        return buffer, copied

    def _allocate(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
