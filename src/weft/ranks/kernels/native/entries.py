"""Entries of the C++ library for tensors of a dtype, with as many threads as torch takes."""

from __future__ import annotations

import torch

from weft.machine.native import build
from weft.machine.native.entries import Entries
from weft.machine.native.prebuilt import BF16, TILES, WIDE_VECTORS, cpu_features

HEAD_UNIT = 16  # dims: what is left over of a head is summed in another order for other numbers of keys


def load_entries(dtype: torch.dtype, *, fixed_order: bool = False, head_dim: int = 0) -> Entries:
    """The entries for activations of `dtype`, from the library that is built if it is not in the cache. Raises what
    `build.load_library` raises. `fixed_order` as for `Entries`, with heads of `head_dim`."""
    name = str(dtype).removeprefix("torch.")
    library = build.load_library(name, True) if fixed_order and needs_narrow(head_dim) else build.load_library(name)
    return Entries(library, name, torch.get_num_threads, fixed_order=fixed_order)


def needs_narrow(head_dim: int) -> bool:
    """Return True if sums in a fixed order need a library for 256-bit vectors. The order of sums in AMX's tiles depends
    on the number of tokens; on CPUs with wider vectors it is only shown to be fixed if they multiply bf16 only."""
    features = cpu_features()
    if WIDE_VECTORS not in features:
        return False
    return TILES in features or not features >= BF16 or head_dim % HEAD_UNIT > 0
