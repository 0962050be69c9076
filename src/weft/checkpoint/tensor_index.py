"""Index of a checkpoint's tensors: the files' own names become the names in the table of parameters, and are
checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from weft.checkpoint import stacks
from weft.checkpoint.architectures.parameters import Part, model_parameters
from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.files import gguf, safetensors
from weft.checkpoint.files.tensor import ENCODINGS, TensorInfo
from weft.checkpoint.gguf import names as gguf_names
from weft.checkpoint.gguf import split_heads
from weft.checkpoint.quantised import registry
from weft.checkpoint.quantised.packed import Packed
from weft.checkpoint.quantised.stored_types import matrices, with_stored_types
from weft.errors import ModelError

FileFormat = Literal["safetensors", "gguf", "dummy", "sharded_state"]

# The matrix that joins a hidden state and the next token's embedding, in a layer that predicts a further token.
_DRAFTING = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")


def with_file_types(shape: ModelShape, index: dict[str, TensorInfo]) -> ModelShape:
    """Correct the shape's published quantisation by the tensors of safetensors files, as far as they are there."""
    return with_stored_types(shape, rename_tensors(index, shape))


def rename_tensors(index: dict[str, TensorInfo], shape: ModelShape) -> dict[str, TensorInfo]:
    """Tensors of safetensors files as the table of parameters names them.

    Names that only some files have are replaced, and a base model's names get their prefix. The tensors of each packed
    matrix are joined into one, stacks of experts are divided, and matrices that are stored as [inputs, outputs] are
    turned.
    """
    for pattern, name in find_architecture(shape.architecture).renamed:
        index = {re.sub(pattern, name, own): info for own, info in index.items()}
    names = find_architecture(shape.architecture).names
    index = _with_prefix(index, names.embed)
    if shape.published is not None:
        index = registry.join_matrices(index, shape.published)
    if names.transposed:
        index = _turn_matrices(index, shape)
    return stacks.unstack(index, shape, dict(expected_tensors(shape))) if names.stacks else index


def _with_prefix(index: dict[str, TensorInfo], embed: str) -> dict[str, TensorInfo]:
    """Add the prefix of the module `embed` to all names if the files are of the base model, which has no head: its
    names begin behind this prefix, as in Qwen3-Embedding."""
    prefix, _, own = embed.rpartition(".")
    if not prefix or own + ".weight" not in index:
        return index
    return {f"{prefix}.{name}": info for name, info in index.items()}


def _turn_matrices(index: dict[str, TensorInfo], shape: ModelShape) -> dict[str, TensorInfo]:
    """Give the matrices of the layers their dims [outputs, inputs]; packed ones have them already."""
    turned = {
        name: msgspec.structs.replace(index[name], dims=index[name].dims[::-1], transposed=True)
        for name, parameter in matrices(shape)
        if parameter.role == "linear" and name in index and not isinstance(index[name], Packed)
    }
    return index | turned


def expected_tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (Hugging Face's name, dims) of each tensor that a checkpoint of this shape has, stacks divided."""
    for parameter, layer in model_parameters(shape):
        # Parts that share a tensor come one after the other: the last one has the rows of all parts before it.
        last = {part.source: part for part in parameter.parts}
        count = shape.experts.count if parameter.role == "expert" and shape.experts else None
        for source, part in last.items():
            dims = _tensor_dims(part)
            for expert in (None,) if count is None else range(count):
                yield source.format(layer=layer, expert=expert), dims


def _tensor_dims(part: Part) -> tuple[int, ...]:
    """Dims of the tensor whose last part this is."""
    rows = sum(axis.length for axis in (*part.after, part.rows))
    return (rows,) if part.cols is None else (rows, part.cols.length)


def locate_tensors(path: str, format: FileFormat, shape: ModelShape) -> dict[str, TensorInfo]:
    """Locate each tensor of a model of this shape, by Hugging Face's names, and no other tensor; {} for a dummy and for
    sharded state.

    Raises ModelError, naming the tensor, if one is missing, has other dims, or is stored in a way that Weft does not
    read.
    """
    if format in ("dummy", "sharded_state"):
        return {}
    if format == "gguf":
        return select_tensors(rename_gguf_tensors(gguf.read_gguf(path), shape), shape, path, format)
    return select_tensors(rename_tensors(safetensors.read_directory(Path(path)), shape), shape, path, format)


def select_tensors(
    index: Mapping[str, TensorInfo], shape: ModelShape, path: str, format: FileFormat
) -> dict[str, TensorInfo]:
    """The tensors of `index` that the shape needs. Raises ModelError as `locate_tensors` does."""
    tensors, expected = {}, dict(expected_tensors(shape))
    for name, dims in expected.items():
        info = index.get(name)
        if info is None:
            raise _missing_tensor(index, *_stored_name(name, dims, shape, format), path)
        _check_tensor(info, name, dims)
        tensors[name] = info
    count = len(shape.layers)
    extra = next((name for name in index if name.startswith(f"model.layers.{count}.")), None)
    if extra is not None and not drafting_layers(index, count):
        raise ModelError(
            f"{path} holds tensor {extra}, but its config says {count} layers; give the config of these weights",
            code="more-layers-than-config",
        )
    return tensors


def drafting_layers(index: Mapping[str, TensorInfo], layers: int) -> list[int]:
    """Numbers of the layers after the model's own that predict a further token (DeepSeek-V3's MTP)."""
    joins = (_DRAFTING.fullmatch(name) for name in index)
    return sorted(int(match[1]) for match in joins if match and int(match[1]) >= layers)


def _stored_name(
    name: str, dims: tuple[int, ...], shape: ModelShape, format: FileFormat
) -> tuple[str, tuple[int, ...]]:
    """Name and dims, in a file of this format, of the tensor or the stack that holds a parameter."""
    if format == "safetensors":
        return stacks.stack_of(name, shape, dims) or (name, dims)
    own = gguf_names.ggml_name(name, find_architecture(shape.architecture).names, len(shape.layers))
    return own, (shape.experts.count, *dims) if shape.experts and "_exps." in own else dims


def _check_tensor(info: TensorInfo, name: str, dims: Sequence[int]) -> None:
    stacks.check_dims(info, name, dims)
    if info.type not in ENCODINGS and not isinstance(info, Packed):
        raise ModelError(
            f"{info.file}: tensor {name} is {info.type}; Weft reads {', '.join(ENCODINGS)}", code="tensor-type-not-read"
        )


def _missing_tensor(index: Mapping[str, TensorInfo], name: str, dims: Sequence[int], path: str) -> ModelError:
    packed_name = registry.find_packed_name(index, name)
    if packed_name is None:
        return ModelError(
            f"{path} lacks tensor {name} of {list(dims)}; fetch it again, or give a whole model", code="missing-tensor"
        )
    return ModelError(
        f"{path} holds {packed_name} in the place of {name}: its weights are quantised, but not as its config.json "
        "says (quantization_config); fetch it again",
        code="tensor-packed-differently",
    )


def rename_gguf_tensors(header: gguf.Gguf, shape: ModelShape) -> dict[str, TensorInfo]:
    """A GGUF file's tensors by Hugging Face's names, with their `interleaved` set. Raises ModelError for others."""
    known, index = find_architecture(shape.architecture), dict[str, TensorInfo]()
    expected = dict(expected_tensors(shape))
    for ggml_name, info in header.tensors.items():
        name = gguf_names.hugging_face(ggml_name, known.names)
        if name is None:
            if gguf_names.is_unused(ggml_name):
                continue
            raise ModelError(
                f"{info.file}: tensor {ggml_name!r:.80} is no part of a {shape.architecture}; Weft cannot run this "
                "model",
                code="foreign-tensor",
            )
        interleaved = 0
        layer = gguf_names.interleaved_layer(ggml_name) if known.gguf_interleaved else None
        if layer is not None and layer < len(shape.layers):
            interleaved = shape.layers[layer].mixer.head_dim
        if "{expert}" in name:
            count = shape.experts.count if shape.experts else 0
            index |= stacks.unstack_one(ggml_name, name, info, count, expected.get(name.format(expert=0), ()))
        elif expected.get(name) == (1, *info.dims):
            # The converter drops the first dim of a matrix of one row.
            index[name] = msgspec.structs.replace(info, dims=expected[name])
        else:
            index[name] = msgspec.structs.replace(info, interleaved=interleaved)
    return split_heads.join_heads(index) if shape.has_latents else index
