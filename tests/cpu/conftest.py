"""Fixtures of several tests of the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cpu.shared_threads import threads_share_memory


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks that are threads exchange through shared memory, in C++ where layers are fused."""
    with threads_share_memory(monkeypatch):
        yield


@pytest.fixture
def threads() -> Iterator[None]:
    """A test may set their number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
