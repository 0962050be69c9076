"""The compiled library's entries, for one dtype of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.native import build
from weft.native.library import POINTER, REAL, SIZE


class Entries:
    """Functions take pointers, sizes and reals as native.cpp declares them; tensors go by `data_ptr`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._suffix = str(dtype).removeprefix("torch.")
        self._compiled = build.load_library(self._suffix)
        self.norm = self._threaded("norm", *[POINTER] * 4, SIZE, SIZE, REAL)
        self.silu_mul = self._threaded("silu_mul", *[POINTER] * 2, SIZE, SIZE)
        self.rotate_and_store = self._threaded("rotate_and_store", *[POINTER] * 9, REAL, *[SIZE] * 5)
        self.attend = self._threaded("attend", *[POINTER] * 7, *[SIZE] * 7, REAL)
        self.pack_dense = self._threaded("pack_dense", *[POINTER] * 2, *[SIZE] * 2)
        self.stage = self._threaded("stage", POINTER, SIZE, *[POINTER] * 2)
        self.product = self._threaded("product", *[POINTER] * 2, SIZE, POINTER)
        self.panel_size = self._entry("panel_size", SIZE, result=SIZE)
        self.workspace_bytes = self._entry("workspace_bytes", POINTER, *[SIZE] * 2, result=SIZE)
        self.rows_of = self._entry("rows_of", *[POINTER] * 2, SIZE, POINTER)
        self.choose = threaded(self._shared("choose", POINTER, *[SIZE] * 4, *[POINTER] * 3, SIZE))
        self.score = threaded(self._shared("score", POINTER, *[SIZE] * 4, POINTER, SIZE, POINTER, SIZE))
        self.pack_values = threaded(self._shared("pack_values", *[POINTER] * 2, *[SIZE] * 4))
        self.pack_groups = self._shared("pack_groups", *[POINTER] * 2, *[SIZE] * 3)
        self.round_rows = self._shared("round_rows", *[POINTER] * 6)

    def _threaded(self, name: str, *arguments: Any) -> Callable[..., Any]:
        return threaded(self._entry(name, *arguments, SIZE))

    def _entry(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        return self._shared(f"{name}_{self._suffix}", *arguments, result=result)

    def _shared(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        """One that is the same for every dtype."""
        function = getattr(self._compiled, f"weft_{name}")
        function.argtypes, function.restype = arguments, result
        return function


def threaded(function: Callable[..., Any]) -> Callable[..., Any]:
    """With as many threads as torch would take, which is what it asks for last."""
    return lambda *arguments: function(*arguments, torch.get_num_threads())
