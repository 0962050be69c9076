"""Fixtures of several tests of the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def threads() -> Iterator[None]:
    """A test may set their number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
