"""The compiled library's entries, for one dtype of activations."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from weft.kernels.native.build import build

NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}

POINTER, SIZE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Entries:
    """Functions take pointers, sizes and reals as native.cpp declares them; tensors go by `data_ptr`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._compiled, self._suffix = ctypes.CDLL(str(build(NAMES[dtype]))), NAMES[dtype]
        self.norm = self._entry("norm", *[POINTER] * 4, SIZE, SIZE, REAL)
        self.silu_mul = self._entry("silu_mul", *[POINTER] * 2, SIZE, SIZE)
        self.rotate_and_store = self._entry("rotate_and_store", *[POINTER] * 9, REAL, *[SIZE] * 5)
        self.attend = self._entry("attend", *[POINTER] * 7, *[SIZE] * 7, REAL)
        self.panel_size = self._entry("panel_size", SIZE, result=SIZE)
        self.pack_dense = self._entry("pack_dense", *[POINTER] * 2, *[SIZE] * 2)
        self.workspace_bytes = self._entry("workspace_bytes", POINTER, *[SIZE] * 2, result=SIZE)
        self.stage = self._entry("stage", POINTER, SIZE, *[POINTER] * 2)
        self.pack_values = self._shared("pack_values", *[POINTER] * 2, *[SIZE] * 3)
        self.pack_groups = self._shared("pack_groups", *[POINTER] * 2, *[SIZE] * 3)
        self.rows_of = self._entry("rows_of", *[POINTER] * 2, SIZE, POINTER)
        self.product = self._entry("product", *[POINTER] * 2, SIZE, POINTER)

    def _entry(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        return self._shared(f"{name}_{self._suffix}", *arguments, result=result)

    def _shared(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        """One that is the same for every dtype."""
        function = getattr(self._compiled, f"weft_{name}")
        function.argtypes, function.restype = arguments, result
        return function
