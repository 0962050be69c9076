"""Triton's interpreter without what takes most of the time of a kernel in it, and changes no number.

For every launch, and for every call of a function inside of one, it puts its own operations in the place of those of
the language, one by one, and takes them out again; for every operation it builds a table of number types, types of the
sizes, and copies of tensors that have the shape already. After every sum of integers it computes whether that
overflowed, for an assertion that it leaves out. It copies every storage back from the CPU, where all lie here. Here the
operations are replaced once and stay, for nothing is compiled in such a process, and the rest is found once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from threading import RLock
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

POINTER = np.dtype(np.uint64)
broadcast = TritonSemantic.broadcast_impl_value
check_block = core.block_type.__init__


class Nothing:
    """A scope that restores nothing at the end of a launch."""

    def restore(self) -> None:
        pass


def patch_operation(owner: Any, name: str, operation: Any, builder: Any, scope: Any) -> None:
    """`_patch_attr` of the interpreter, which copies the named arguments of every call."""

    def interpreted(*given: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return operation(*given, **named)

    scope.set_attr(owner, name, interpreted)


@cache
def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's `shape` and `numel`."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(prod(sizes))


def create_tensor(tensor: Any, handle: Any, type: Any) -> None:
    """`tensor.__init__`."""
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.shape, tensor.numel = shape_of(sizes_of(tensor))


@cache
def block_of(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
    """`shape`, `numel` and the text of the shape of a `block_type`, which checks that the sizes are powers of two."""
    block = object.__new__(core.block_type)
    check_block(block, core.int1, list(sizes))
    return block.shape, block.numel, str(block.shape)


def create_block(block: Any, element: Any, shape: Any) -> None:
    """`block_type.__init__`."""
    sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
    block.element_ty = element
    block.shape, block.numel, text = block_of(sizes)
    block.name = f"<{text}, {element}>"


def sizes_of(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.type.shape) if tensor.type.is_block() else ()


def broadcast_shapes(semantic: Any, left: Any, right: Any) -> Any:
    """`broadcast_impl_value`, which copies a tensor that has the shape already."""
    return (left, right) if sizes_of(left) == sizes_of(right) else broadcast(semantic, left, right)


def remember_searches() -> None:
    """Make the interpreter quick in this process, before any kernel has run."""
    patch_language = interpreter._patch_lang
    interpreter._patch_attr = patch_operation
    nothing = Nothing()

    @cache
    def patch_once() -> None:
        patch_language(SimpleNamespace(__globals__={"language": language, "core": core}))

    def patched(_: Any) -> Nothing:
        patch_once()
        return nothing

    interpreter._patch_lang = patched
    of_scalar = cache(interpreter._get_np_dtype)

    def numpy_type(given: Any) -> Any:
        scalar = given.element_ty if isinstance(given, core.block_type) else given
        return POINTER if isinstance(scalar, core.pointer_type) else of_scalar(scalar)

    interpreter._get_np_dtype = numpy_type
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "its assertions would tell of overflows"
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.GridExecutor._init_args_hst = lambda _, given, named: (given, named)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    rewrite, parsing = interpreter.InterpretedFunction.rewrite, RLock()

    def rewrite_alone(function: Any) -> Any:
        # Python 3.11 counts the depth of syntax trees that several threads parse as that of one.
        with parsing:
            return rewrite(function)

    interpreter.InterpretedFunction.rewrite = rewrite_alone
    core.tensor.__init__ = create_tensor
    core.block_type.__init__ = create_block
    TritonSemantic.broadcast_impl_value = broadcast_shapes
