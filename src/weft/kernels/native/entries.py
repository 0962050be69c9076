"""Entries of the C++ library for tensors of a dtype, with as many threads as torch takes."""

from __future__ import annotations

import torch

from weft.native import build
from weft.native.entries import Entries


def load_entries(dtype: torch.dtype) -> Entries:
    """The entries for activations of `dtype`, from the library that is built if it is not in the cache. Raises what
    `build.load_library` raises."""
    name = str(dtype).removeprefix("torch.")
    return Entries(build.load_library(name), name, torch.get_num_threads)
