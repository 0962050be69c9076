"""ctypes bindings of the CPU kernel library, with the argument types that native.cpp and tiles.cpp declare."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from weft.machine.native.structures import POINTER, REAL, SIZE


class Entries:
    """Functions of a loaded library for activations of `dtype`, one of CPP_TYPES.

    Arrays and structures are passed by address. `threads()` is called at each parallel call; its result, the most
    threads that the call may use, is passed as the last argument. `fixed_order` makes descriptors request
    batch-invariant sums.
    """

    def __init__(
        self, library: ctypes.CDLL, dtype: str, threads: Callable[[], int], *, fixed_order: bool = False
    ) -> None:
        self.dtype, self.fixed_order = dtype, fixed_order
        self._library, self._threads = library, threads
        self.norm = self._parallel("norm", *[POINTER] * 4, SIZE, SIZE, REAL)
        self.silu_mul = self._parallel("silu_mul", *[POINTER] * 2, SIZE, SIZE)
        self.rotate_and_store = self._parallel("rotate_and_store", *[POINTER] * 9, REAL, *[SIZE] * 5)
        self.attend = self._parallel("attend", *[POINTER] * 7, *[SIZE] * 7, REAL, *[POINTER] * 2, SIZE)
        self.attend_latents = self._parallel("attend_latents", *[POINTER] * 6, *[SIZE] * 6, REAL, POINTER)
        self.store_latents = self._parallel("store_latents", *[POINTER] * 7, REAL, *[SIZE] * 6)
        self.absorb = self._parallel("absorb", *[POINTER] * 2, SIZE, POINTER)
        self.latent_values = self._parallel("latent_values", *[POINTER] * 2, SIZE, POINTER)
        self.expand_latents = self._parallel("expand_latents", *[POINTER] * 2, *[SIZE] * 3, *[POINTER] * 2)
        self.pack_dense = self._parallel("pack_dense", *[POINTER] * 2, *[SIZE] * 2)
        self.stage = self._parallel("stage", POINTER, SIZE, *[POINTER] * 2)
        self.product = self._parallel("product", *[POINTER] * 2, SIZE, POINTER)
        self.wide_product = self._parallel("wide_product", *[POINTER] * 2, SIZE, POINTER)
        self.experts = self._parallel("experts", *[POINTER] * 4, *[SIZE] * 2, POINTER)
        self.choose_experts = self._entry("choose_experts", POINTER, *[SIZE] * 2, *[POINTER] * 3)
        self.panel_size = self._typed("panel_size", SIZE, result=SIZE)
        self.workspace_bytes = self._typed("workspace_bytes", POINTER, *[SIZE] * 4, result=SIZE)
        self.rows_of = self._typed("rows_of", *[POINTER] * 2, SIZE, POINTER)
        self.setting_names = self._entry("setting_names", result=ctypes.c_char_p)
        self.sample = self._with_threads(self._entry("sample", POINTER, *[SIZE] * 4, *[POINTER] * 3, SIZE))
        self.score = self._with_threads(self._entry("score", POINTER, *[SIZE] * 4, POINTER, SIZE, POINTER, SIZE))
        self.apply_masks = self._with_threads(
            self._entry("apply_masks", POINTER, *[SIZE] * 3, *[POINTER] * 2, *[SIZE] * 2)
        )
        self.pack_values = self._with_threads(self._entry("pack_values", *[POINTER] * 2, *[SIZE] * 4))
        self.pack_groups = self._entry("pack_groups", *[POINTER] * 2, *[SIZE] * 3)
        self.round_rows = self._entry("round_rows", *[POINTER] * 6)

    def _parallel(self, name: str, *arguments: Any) -> Callable[..., Any]:
        """An entry for this dtype that computes in parallel."""
        return self._with_threads(self._typed(name, *arguments, SIZE))

    def _typed(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        """An entry for this dtype."""
        return self._entry(f"{name}_{self.dtype}", *arguments, result=result)

    def _entry(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        """The entry of that name, which is the same for all dtypes. Raises AttributeError if there is none."""
        function = self._library[f"weft_{name}"]
        function.argtypes, function.restype = arguments, result
        return function

    def _with_threads(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which is told the number of threads as its last argument."""
        threads = self._threads
        return lambda *arguments: function(*arguments, threads())
