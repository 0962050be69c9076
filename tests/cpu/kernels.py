"""The compiled CPU kernels, for tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.kernels.native import NativeKernels
from weft.native.build import build_library


def built(dtype: str) -> Path:
    """Their library; a test is skipped where there is no compiler."""
    try:
        return build_library(dtype)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def native(dtype: torch.dtype) -> NativeKernels:
    built(str(dtype).removeprefix("torch."))
    return NativeKernels(dtype)
