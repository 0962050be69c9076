"""Triton's interpreter without its repeated searches, which take a third of the time of a kernel in it.

For every launch, and for every call of a function inside of one, it lists all members of the language's modules to put
its own operations in their place, and for every operation it builds a table of number types. Here both are found once.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
from triton import language
from triton.runtime import interpreter

POINTER = np.dtype(np.uint64)


@cache
def builtins_of(package: Any) -> list[tuple[str, Any]]:
    """Names and operations of a module or class of Triton's language, as they are before any launch."""
    return [(name, member) for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """`_patch_builtin` of the interpreter: an operation that has been replaced already stays replaced."""
    for name, member in builtins_of(package):
        if getattr(package, name) is member:
            interpreter._patch_attr(package, name, member, builder, scope)


def remember_searches() -> None:
    """Make the interpreter quick in this process, before any kernel has run."""
    core = language.core
    for package in (language, core, language.tensor, core.tensor, language.math, core.tensor_descriptor_base):
        builtins_of(package)
    interpreter._patch_builtin = patch_builtin
    of_scalar = cache(interpreter._get_np_dtype)

    def numpy_type(given: Any) -> Any:
        scalar = given.element_ty if isinstance(given, core.block_type) else given
        return POINTER if isinstance(scalar, core.pointer_type) else of_scalar(scalar)

    interpreter._get_np_dtype = numpy_type
