"""Kernels that are not run but written down, each launch as the variant that Triton would compile for a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from weft.ranks.kernels.triton import (
    attention,
    experts,
    latents,
    pointwise,
    products,
    router,
    routing,
    sampling,
    staged,
)

MODULES: tuple[ModuleType, ...] = (
    *(attention, latents, staged, pointwise, products, sampling),
    *(router, routing, experts),
)
TARGET = GPUTarget("cuda", 90, 32)


class Launches:
    """All variants that were launched, in their order, in the place of every kernel of MODULES."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.variants: dict[str, None] = {}
        for module in MODULES:
            for name, kernel in list(vars(module).items()):
                if isinstance(kernel, InterpretedFunction):
                    monkeypatch.setattr(module, name, Written(kernel, self.variants))

    def of(self, kernel: str) -> list[str]:
        return [variant for variant in self.variants if variant.startswith(f"{kernel}(")]


class Written:
    def __init__(self, kernel: InterpretedFunction, variants: dict[str, None]) -> None:
        self._kernel = JITFunction(kernel.fn, **kernel.kwargs)
        self._bind = create_function_from_signature(self._kernel.signature, self._kernel.params, make_backend(TARGET))
        self._variants = variants

    def __getitem__(self, grid: tuple[int, ...]) -> Written:
        assert all(0 < size < 2**31 for size in grid) and max((0, *grid[1:])) < 2**16, grid
        return self

    def __call__(self, *given: Any, **named: Any) -> None:
        bound, kinds, options = self._bind(*given, **named)
        told = ", ".join(f"{name} {kind}" for name, kind in zip(bound, kinds, strict=True))
        self._variants[f"{self._kernel.__name__}({told}) {sorted(options.items())}"] = None
        if "chosen" in bound:
            bound["chosen"].zero_()  # tokens that are in the vocabulary
