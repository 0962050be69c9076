"""Stacks of experts: tensors that hold a parameter of all experts of a layer, divided into a tensor per expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from weft.checkpoint.architectures.architecture import Names, Stack
from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.files.tensor import DENSE, TensorInfo
from weft.checkpoint.quantised.packed import Packed
from weft.errors import ModelError


def unstack(
    index: Mapping[str, TensorInfo], shape: ModelShape, expected: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorInfo]:
    """Replace each stack of the architecture's `Names.stacks` by the parameters of all experts.

    `expected` has the dims of each parameter. Raises ModelError for a stack of other dims.
    """
    names, divided = find_architecture(shape.architecture).names, dict(index)
    for layer in range(len(shape.layers)) if names.stacks else ():
        for stack in names.stacks:
            name = names.layer.format(layer=layer) + stack.name
            members = [_members(names, stack, layer, expert) for expert in range(_count(shape))]
            # A layer without experts has no such stack: what it lacks is named later.
            if name in divided and members[0][0] in expected:
                info = divided.pop(name)
                check_dims(info, name, _stack_dims(stack, info, len(members), expected[members[0][0]]))
                divided |= _views(stack, info, members)
    return divided


def unstack_one(
    own: str, name: str, info: TensorInfo, count: int, dims: Sequence[int]
) -> Iterator[tuple[str, TensorInfo]]:
    """Yield (name, tensor) of each of the `count` experts in a stack of tensors of these dims.

    `name` has {expert} for the expert's number; the file names the stack `own`. Raises ModelError for a stack of other
    dims.
    """
    check_dims(info, own, (count, *dims))
    for expert, block in enumerate(_blocks(info)):
        yield name.format(expert=expert), block


def stack_of(name: str, shape: ModelShape, dims: Sequence[int]) -> tuple[str, tuple[int, ...]] | None:
    """Name and dims of the stack in which a checkpoint that is not quantised stores a parameter, of these dims, of an
    expert.

    None if the parameter has a tensor of its own.
    """
    names = find_architecture(shape.architecture).names
    for layer in range(len(shape.layers)):
        for stack in names.stacks:
            if any(name in _members(names, stack, layer, expert) for expert in range(_count(shape))):
                return names.layer.format(layer=layer) + stack.name, _stack_dims(stack, None, _count(shape), dims)
    return None


def check_dims(info: TensorInfo, name: str, dims: Sequence[int]) -> None:
    """Raise ModelError if a tensor has other dims than the model's shape asks for; the error has the dims in the
    file."""
    if info.dims != tuple(dims):
        order = -1 if info.transposed else 1
        raise ModelError(
            f"{info.file}: tensor {name} is {list(info.dims[::order])}; the model's shape asks for "
            f"{list(dims[::order])}",
            code="tensor-of-other-dims",
        )


def _count(shape: ModelShape) -> int:
    return shape.experts.count if shape.experts else 0


def _members(names: Names, stack: Stack, layer: int, expert: int) -> list[str]:
    """Names of the parameters of one expert in a stack."""
    prefix = names.layer.format(layer=layer) + names.expert.format(expert=expert)
    return [prefix + parameter for parameter in stack.parameters]


def _is_transposed(stack: Stack, info: TensorInfo | None) -> bool:
    return stack.transposed and (info is None or info.type in DENSE)


def _stack_dims(stack: Stack, info: TensorInfo | None, count: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Dims of a stack whose parameters have `dims`, as the file stores them; `info` None: not quantised."""
    block = (dims[0] * len(stack.parameters), *dims[1:])
    return (count, *(block[::-1] if _is_transposed(stack, info) else block))


def _views(stack: Stack, info: TensorInfo, members: Sequence[Sequence[str]]) -> Iterator[tuple[str, TensorInfo]]:
    """Yield (name, tensor) of each parameter in a stack; `members` has the names for each expert."""
    transposed, turns = _is_transposed(stack, info), len(stack.parameters)
    for names, block in zip(members, _blocks(info), strict=True):
        rows, *cols = block.dims[::-1] if transposed else block.dims
        for turn, name in enumerate(names):
            yield name, replace(block, dims=(rows // turns, *cols), transposed=transposed, first=turn, step=turns)


def _blocks(info: TensorInfo) -> Iterator[TensorInfo]:
    """Yield each block of a stack [experts, ...], whose blocks lie one after the other in the file."""
    count, *dims = info.dims
    if isinstance(info, Packed):
        for values, scales in zip(_blocks(info.values), _blocks(info.scales), strict=True):
            nbytes = values.nbytes + scales.nbytes
            yield replace(info, dims=tuple(dims), offset=values.offset, nbytes=nbytes, values=values, scales=scales)
        return
    nbytes = info.nbytes // count
    for index in range(count):
        yield replace(info, dims=tuple(dims), offset=info.offset + index * nbytes, nbytes=nbytes)
