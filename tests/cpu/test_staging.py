"""Staging, with copies that end as late as a GPU's may."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from weft.ranks.worker.request_slots import ALIGNMENT, Staging

Copy = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One whose copies from the host are done when somebody waits for the event after them, and not before."""
    there, begun = SimpleNamespace(type="late"), list[Copy]()

    class Event:
        def __init__(self) -> None:
            self.before: list[Copy] = []

        def record(self) -> None:
            self.before += begun
            begun.clear()

        def synchronize(self) -> None:
            for target, source in self.before:
                target.copy_(source)
            self.before.clear()

    def to(tensor: torch.Tensor, device: object, **_: object) -> torch.Tensor:
        assert device is there
        begun.append((torch.full_like(tensor, 255), tensor))
        return begun[-1][0]

    monkeypatch.setattr(Staging, "_allocate", lambda _, size: (torch.empty(size, dtype=torch.uint8), Event()))
    monkeypatch.setattr(torch.Tensor, "to", to)
    return there


def test_no_memory_is_filled_again_before_its_copy_has_ended(device: SimpleNamespace) -> None:
    """Whatever the arrays are, also where a larger step needs larger memory. They begin where Triton wants them to."""
    staging, generator, steps = Staging(device), np.random.default_rng(0), []
    for step in range(60):
        arrays = [
            (generator.random(dims) * 1000).astype(dtype)
            for dtype, dims in (
                (np.int64, generator.integers(0, 9 + step)),
                (np.int32, 3),
                (np.float64, (generator.integers(0, 3), 4)),
                (np.float32, generator.integers(0, 40)),
            )
        ]
        steps.append((arrays, staging.put(arrays)))
    for _, done in staging._buffers:
        done.synchronize()
    for arrays, tensors in steps:
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)
            assert tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0
