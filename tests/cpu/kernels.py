"""The compiled CPU kernels, for tests."""

from __future__ import annotations

import pytest
import torch

from weft.compiled import build
from weft.kernels.native import NativeKernels


def native(dtype: torch.dtype) -> NativeKernels:
    try:
        build(str(dtype).removeprefix("torch."))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return NativeKernels(dtype)
