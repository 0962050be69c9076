"""Kernel launches that are recorded instead of made, and compiled for any GPU without one.

Needs a process without TRITON_INTERPRET, which Triton reads when it is imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from weft.ranks.kernels.triton import (
    attention,
    experts,
    grouped,
    latents,
    pointwise,
    products,
    rounding,
    router,
    routing,
    sampling,
    staged,
)

MODULES = (
    *(attention, latents, staged, pointwise, products, rounding, sampling),
    *(router, routing, experts, grouped),
)


@dataclass(frozen=True)
class Launch:
    """A launch as the calling code makes it: positional arguments, then constants and options by name."""

    kernel: JITFunction
    given: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def arguments(self) -> dict[str, Any]:
        """All of them by the kernel's own names."""
        return dict(zip(self.kernel.arg_names, self.given, strict=False)) | self.named

    def compile_for(self, capability: int) -> CompiledKernel:
        """The variant that Triton compiles for this launch on compute capability `capability`, 90 for 9.0; with float16
        in the place of bfloat16 below 8.0, whose tensor cores do not multiply this."""
        target = GPUTarget("cuda", capability, 32)
        backend = make_backend(target)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, kinds, options = bind(*self.given, **self.named)
        constants = {(i,): value for i, value in enumerate(bound.values()) if kinds[i][0] == "constexpr"}
        attributes = {
            (i,): backend.parse_attr(attribute)
            for i, (kind, attribute) in enumerate(kinds)
            if kind != "constexpr" and isinstance(attribute, str)
        }
        signature = {name: kind for name, (kind, _) in zip(bound, kinds, strict=True)}
        if capability < 80:
            signature = {name: kind.replace("bf16", "fp16") for name, kind in signature.items()}
        source = ASTSource(self.kernel, signature, constexprs=constants, attrs=attributes)
        with warnings.catch_warnings():
            # Triton 3.9 announces a default of 3.10, once in each process.
            warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
            return triton.compile(source, target=target, options=options)


@dataclass(frozen=True)
class Recorder:
    """Takes the place of one kernel."""

    kernel: JITFunction
    launches: list[Launch] = field(repr=False)

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *given: Any, **named: Any) -> None:
        self.launches.append(Launch(self.kernel, given, named))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """All launches of Weft's Triton kernels inside the block, in their order; none of them runs. They compile after
    the block: until then recorders are in the place of the functions that kernels call, too."""
    launches: list[Launch] = []
    kernels = [
        (module, name, kernel)
        for module in MODULES
        for name, kernel in vars(module).items()
        if isinstance(kernel, JITFunction)
    ]
    for module, name, kernel in kernels:
        setattr(module, name, Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)
