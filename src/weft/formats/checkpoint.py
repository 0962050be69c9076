"""Checkpoint: the files behind a user's name of a model, checked to be complete."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from weft.architectures.axes import axis_length
from weft.architectures.parameters import Part, model_parameters
from weft.architectures.published import PublishedQuantization
from weft.architectures.registry import find_architecture
from weft.architectures.shape import DType, ModelShape
from weft.errors import ModelError, error_reason
from weft.formats import (
    bitsandbytes,
    config_json,
    demo,
    fp8,
    gguf,
    gguf_names,
    gguf_reference,
    gguf_shape,
    hub,
    model_names,
    packed,
    pooling,
    safetensors,
    sharded,
    signed,
    split_heads,
    stacks,
)
from weft.formats.tensor import ENCODINGS, TensorInfo

logger = logging.getLogger("weft")

FileFormat = Literal["safetensors", "gguf", "dummy", "sharded_state"]
# The matrix that joins a hidden state and the next token's embedding, in a layer that predicts a further token.
_DRAFTING = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")
DTYPES: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model's files and facts.

    - `model`: the name as the user typed it.
    - `path`: a directory or a GGUF file. With the format "dummy" the shape and the tokeniser are read from it, but no
      weights.
    - `generation`: the sampling that the model recommends, by generation_config.json's names.
    - `quantised`: types of the quantised tensors, by Hugging Face's names; for a dummy, the types in its config.
    - `sharded`: what the files hold if each is of one rank (format "sharded_state").
    - `pooling`: what the model makes of prompts as a whole, if it embeds or scores.
    """

    model: str
    path: str
    format: FileFormat
    shape: ModelShape
    generation: dict[str, float | int | bool]
    quantised: dict[str, str] = {}
    sharded: sharded.ShardedState | None = None
    pooling: pooling.PoolingSettings | None = None

    def tensors(self) -> dict[str, TensorInfo]:
        """Locate each tensor of the model; see `locate_tensors`."""
        return locate_tensors(self.path, self.format, self.shape)


class _Contents(NamedTuple):
    """Facts that the files of a checkpoint give. `tensors` is empty for a directory whose weights are not read."""

    shape: ModelShape
    generation: dict[str, float | int | bool]
    tensors: dict[str, TensorInfo]
    metadata: Mapping[str, Any] | None  # of a GGUF file


def resolve(
    model: str,
    *,
    revision: str | None = None,
    hf_token: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
    model_impl: str = "auto",
    task: pooling.PoolingTask = "auto",
) -> Checkpoint:
    """Find the checkpoint that `model` names, and fetch it if it is not here yet.

    The name is `demo`, a directory, a GGUF file, a repository on the Hugging Face hub, a nickname of one, or a GGUF
    file there as `hf.co/OWNER/REPO:QUANT`. With `load_format` "dummy" a config.json is enough. Raises ModelError, in
    one line with the ways out, for a model that is missing, damaged, incomplete, or of an unknown architecture.
    `model_impl` is EngineConfig's, `task` is that of `read_pooling`.
    """
    try:
        full = model_names.full_name(model, folder=download_dir)
        path = _locate(full, revision, hf_token, download_dir, weights=load_format != "dummy")
    except (OSError, RuntimeError) as error:  # an unreadable directory, a name too long, the ~ of an unknown user
        raise ModelError(f"cannot read {model}: {error_reason(error)}", code="cannot-read-model") from error
    if load_format in ("auto", "sharded_state") and path.is_dir() and sharded.is_sharded(path):
        return _sharded_checkpoint(model, path, model_impl, task)
    format = _file_format(path, load_format)
    dummy = load_format == "dummy"
    contents = _read_gguf(path, model_impl) if format == "gguf" else _read_directory(path, model_impl, dummy=dummy)
    _check_shape(contents.shape, str(path))
    shape, pooled = _with_pooling(path, contents, task)
    if dummy:
        format, quantised = "dummy", packed.stored_types(shape)
    else:
        shape, quantised = _with_stored_tensors(shape, contents.tensors, path, format)
    return Checkpoint(
        model=model,
        path=str(path),
        format=format,
        shape=shape,
        generation=contents.generation,
        quantised=quantised,
        pooling=pooled,
    )


def _file_format(path: Path, load_format: str) -> FileFormat:
    """The format of the files at `path`. Raises ModelError if it is not the one that was asked for."""
    format: FileFormat = "safetensors" if path.is_dir() else "gguf"
    if load_format not in ("auto", "dummy", format):
        raise ModelError(
            f"{path} is {format}, not {load_format}; leave --load-format out, or give another model",
            code="other-load-format",
        )
    return format


def _read_gguf(path: Path, model_impl: str) -> _Contents:
    if model_impl == "transformers":
        raise ModelError(
            f"{path} is a GGUF file, and Transformers' classes run safetensors alone; leave --model-impl out",
            code="gguf-through-transformers",
        )
    header = gguf.read_gguf(path)
    shape, generation = gguf_shape.shape_from_gguf(header), gguf_shape.recommended_sampling(header)
    return _Contents(shape, generation, _translate_names(header, shape), header.metadata)


def _read_directory(path: Path, model_impl: str, *, dummy: bool) -> _Contents:
    index = {} if dummy else safetensors.read_directory(path)
    shape = config_json.read_shape(path, main_dtype(index), model_impl=model_impl)
    generation = config_json.recommended_sampling(path)
    return _Contents(shape, generation, _translate_layout(index, shape), None)


def _with_pooling(
    path: Path, contents: _Contents, task: pooling.PoolingTask
) -> tuple[ModelShape, pooling.PoolingSettings | None]:
    """The shape, and what the model makes of prompts as a whole; an embedding model may be without its head."""
    shape, pooled = contents.shape, pooling.read_pooling(path, contents.shape, task, contents.metadata)
    if pooled is not None and pooled.task == "embed" and contents.tensors:
        return _without_head(shape, pooled, contents.tensors)
    return shape, pooled


def _with_stored_tensors(
    shape: ModelShape, index: Mapping[str, TensorInfo], path: Path, format: FileFormat
) -> tuple[ModelShape, dict[str, str]]:
    """The shape with the types that its tensors are stored in, and the types of those that are quantised."""
    tensors = _select_tensors(index, shape, str(path), format)
    if find_architecture(shape.architecture).config.inner:
        unread = len(index) - len(tensors)
        logger.info("%s: its language model is read, %d tensors of its vision part are not", path, unread)
    for layer in drafting_layers(index, len(shape.layers)):
        logger.info("%s: layer %d, which predicts a further token (MTP), is not read", path, layer)
    quantised = {name: info.type for name, info in tensors.items() if _is_quantised(info)}
    return packed.with_stored_types(shape, tensors), quantised


def _without_head(
    shape: ModelShape, pooled: pooling.PoolingSettings, index: Mapping[str, TensorInfo]
) -> tuple[ModelShape, pooling.PoolingSettings]:
    """A shape and its settings for files that may lack the head: an embedding needs none, and the embedding's table
    takes its place."""
    head = find_architecture(shape.architecture).names.head + ".weight"
    if shape.tied or shape.library or head in index or _packed_name(index, head) is not None:
        return shape, pooled
    logger.info("the files have no head: the model embeds, and does not generate")
    return msgspec.structs.replace(shape, tied=True), msgspec.structs.replace(pooled, generates=False)


def _sharded_checkpoint(model: str, folder: Path, model_impl: str, task: pooling.PoolingTask) -> Checkpoint:
    """The checkpoint that `weft shard` wrote to a directory. Raises ModelError if it is for another `model_impl`."""
    state = sharded.read_state(folder)
    impl = "weft" if state.shape.library is None else "transformers"
    if model_impl not in ("auto", impl):
        raise ModelError(
            f"{folder} was cut for --model-impl {impl}, not {model_impl}: leave --model-impl out, or cut the whole "
            f"model again with weft shard --model-impl {model_impl}",
            code="shards-of-other-impl",
        )
    return Checkpoint(
        model=model,
        path=str(folder),
        format="sharded_state",
        shape=state.shape,
        generation=state.generation,
        quantised=state.quantised,
        sharded=state,
        pooling=pooling.read_pooling(folder, state.shape, task),
    )


def _is_quantised(info: TensorInfo) -> bool:
    return isinstance(info, packed.Packed) or ENCODINGS[info.type].elements > 1


def with_file_types(shape: ModelShape, index: dict[str, TensorInfo]) -> ModelShape:
    """Correct the shape's published quantisation by the tensors of safetensors files, as far as they are there."""
    return packed.with_stored_types(shape, _translate_layout(index, shape))


def _translate_layout(index: dict[str, TensorInfo], shape: ModelShape) -> dict[str, TensorInfo]:
    """Tensors of safetensors files as the table of parameters names them.

    Names that only some files have are replaced, those of a base model's files get their prefix, the tensors of each
    packed matrix are joined into one, stacks of experts are divided, and matrices that are stored as [inputs, outputs]
    are turned.
    """
    for pattern, name in find_architecture(shape.architecture).renamed:
        index = {re.sub(pattern, name, own): info for own, info in index.items()}
    names = find_architecture(shape.architecture).names
    index = _with_prefix(index, names.embed)
    if shape.published is not None:
        index = _join_matrices(index, shape.published)
    if names.transposed:
        index = _turn_matrices(index, shape)
    return stacks.unstack(index, shape, dict(expected_tensors(shape))) if names.stacks else index


def _with_prefix(index: dict[str, TensorInfo], embed: str) -> dict[str, TensorInfo]:
    """Add the prefix of the module `embed` to all names if the files are of the base model, which has no head: its
    names begin behind this prefix, as those of Qwen3-Embedding do."""
    prefix, _, own = embed.rpartition(".")
    if not prefix or own + ".weight" not in index:
        return index
    return {f"{prefix}.{name}": info for name, info in index.items()}


def _join_matrices(index: dict[str, TensorInfo], published: PublishedQuantization) -> dict[str, TensorInfo]:
    """Join the tensors of each quantised matrix into one."""
    if published.floating:
        return fp8.join_fp8(index, published)
    if published.wide == "signed":
        return signed.join_signed(index, published)
    return (bitsandbytes.join_tables if published.wide else packed.join_packed)(index, published)


def _turn_matrices(index: dict[str, TensorInfo], shape: ModelShape) -> dict[str, TensorInfo]:
    """Give the matrices of the layers their dims [outputs, inputs]; packed ones have them already."""
    turned = {
        name: msgspec.structs.replace(index[name], dims=index[name].dims[::-1], transposed=True)
        for name, parameter in packed.matrices(shape)
        if parameter.role == "linear" and name in index and not isinstance(index[name], packed.Packed)
    }
    return index | turned


def _locate(model: str, revision: str | None, token: str | None, folder: str | None, *, weights: bool) -> Path:
    """The directory with a config.json, or the GGUF file, of a model's name; fetched if it is not here."""
    if model == demo.NAME:
        return demo.fetch_demo()
    path = local_path(model)
    if path is not None:
        return path
    reference = gguf_reference.parse_address(model)
    if reference is not None:
        return hub.fetch_gguf(reference, revision=revision, token=token, folder=folder)
    if not hub.is_name(model):
        raise ModelError(f"there is no file or directory {model}; {hub.ways_out(model)}", code="no-such-model")
    return _in_directory(hub.fetch_repository(model, revision=revision, token=token, folder=folder, weights=weights))


def local_path(model: str) -> Path | None:
    """The directory with a config.json, or the GGUF file, at a path; None if nothing is there. Raises ModelError."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_directory(path)
    return _from_file(path) if path.is_file() else None


def _in_directory(folder: Path) -> Path:
    if (folder / config_json.CONFIG).is_file() or sharded.is_sharded(folder):
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1 or (files and "-00001-of-" in files[0].name):
        return files[0]
    if files:
        raise ModelError(
            f"{folder} holds {len(files)} GGUF files; give one of them: {files[0]}", code="several-gguf-files"
        )
    raise ModelError(
        f"{folder} holds no model: neither {config_json.CONFIG} nor a .gguf file; {hub.WAYS_OUT}",
        code="directory-without-model",
    )


def _from_file(path: Path) -> Path:
    if path.name == config_json.CONFIG or path.suffix == ".safetensors":
        return _in_directory(path.parent)
    if path.suffix in safetensors.PICKLED:
        raise ModelError(
            f"{path} is a pickled file, which can run code when it is read; give a directory with safetensors "
            "or a .gguf file",
            code="pickled-file",
        )
    try:
        if gguf.is_gguf(path):
            return path
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error_reason(error)}", code="cannot-read-model") from error
    raise ModelError(
        f"{path} is no model: it does not begin as a GGUF file does; give a directory or a .gguf file",
        code="not-a-gguf-file",
    )


def main_dtype(index: Mapping[str, TensorInfo]) -> DType:
    """The dtype of most bytes of the weights, bfloat16 if there are none."""
    nbytes: dict[DType, int] = {}
    for info in index.values():
        if info.type in DTYPES:
            nbytes[DTYPES[info.type]] = nbytes.get(DTYPES[info.type], 0) + info.nbytes
    return max(nbytes, key=lambda name: nbytes[name], default="bfloat16")


def _check_shape(shape: ModelShape, where: str) -> None:
    if shape.q_heads % shape.kv_heads:
        raise ModelError(
            f"{where}: {shape.q_heads} query heads are no multiple of {shape.kv_heads} KV heads", code="uneven-kv-heads"
        )
    if shape.head_dim % 2:
        raise ModelError(
            f"{where}: head_dim is {shape.head_dim}; rotary position embedding needs an even one", code="odd-head-dim"
        )
    for token in (*shape.eos, *(() if shape.bos is None else (shape.bos,))):
        if token >= shape.vocab:
            raise ModelError(
                f"{where}: token id {token} is beyond the vocabulary of {shape.vocab}", code="token-beyond-vocabulary"
            )


def expected_tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (Hugging Face's name, dims) of each tensor that a checkpoint of this shape has, stacks divided."""
    for parameter, layer in model_parameters(shape):
        # Parts that share a tensor come one after the other: the last one has the rows of all parts before it.
        last = {part.source: part for part in parameter.parts}
        count = shape.experts.count if parameter.role == "expert" and shape.experts else None
        for source, part in last.items():
            dims = _tensor_dims(shape, part)
            for expert in (None,) if count is None else range(count):
                yield source.format(layer=layer, expert=expert), dims


def _tensor_dims(shape: ModelShape, part: Part) -> tuple[int, ...]:
    """Dims of the tensor whose last part this is."""
    rows = sum(axis_length(shape, axis) for axis in (*part.after, part.rows))
    return (rows,) if part.cols is None else (rows, axis_length(shape, part.cols))


def locate_tensors(path: str, format: FileFormat, shape: ModelShape) -> dict[str, TensorInfo]:
    """Locate each tensor of a model of this shape, by Hugging Face's names, and no other tensor; {} for a dummy and for
    sharded state.

    Raises ModelError, naming the tensor, if one is missing, has other dims, or is stored in a way that Weft does not
    read.
    """
    if format in ("dummy", "sharded_state"):
        return {}
    if format == "gguf":
        return _select_tensors(_translate_names(gguf.read_gguf(path), shape), shape, path, format)
    return _select_tensors(_translate_layout(safetensors.read_directory(Path(path)), shape), shape, path, format)


def _select_tensors(
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
    if info.type not in ENCODINGS and not isinstance(info, packed.Packed):
        raise ModelError(
            f"{info.file}: tensor {name} is {info.type}; Weft reads {', '.join(ENCODINGS)}", code="tensor-type-not-read"
        )


def _missing_tensor(index: Mapping[str, TensorInfo], name: str, dims: Sequence[int], path: str) -> ModelError:
    packed_name = _packed_name(index, name)
    if packed_name is None:
        return ModelError(
            f"{path} lacks tensor {name} of {list(dims)}; fetch it again, or give a whole model", code="missing-tensor"
        )
    return ModelError(
        f"{path} holds {packed_name} in the place of {name}: its weights are quantised, but not as its config.json "
        "says (quantization_config); fetch it again",
        code="tensor-packed-differently",
    )


def _packed_name(index: Mapping[str, TensorInfo], name: str) -> str | None:
    """Name of the tensor with the packed numbers of the matrix `name`; None if the index has none."""
    layer = name.removesuffix("weight")
    if name + packed.MXFP4_PARTS[0] in index:
        return name + packed.MXFP4_PARTS[0]
    return next((layer + names[0] for names in packed.PART_NAMES.values() if layer + names[0] in index), None)


def _translate_names(header: gguf.Gguf, shape: ModelShape) -> dict[str, TensorInfo]:
    """A GGUF file's tensors by Hugging Face's names, with their `interleaved` set. Raises ModelError for others."""
    reordered = shape.architecture in gguf_names.INTERLEAVED_ARCHITECTURES
    names, index = find_architecture(shape.architecture).names, dict[str, TensorInfo]()
    expected = dict(expected_tensors(shape))
    for ggml_name, info in header.tensors.items():
        name = gguf_names.hugging_face(ggml_name, names)
        if name is None:
            if gguf_names.is_unused(ggml_name):
                continue
            raise ModelError(
                f"{info.file}: tensor {ggml_name!r:.80} is no part of a {shape.architecture}; Weft cannot run this "
                "model",
                code="foreign-tensor",
            )
        interleaved = shape.head_dim if reordered and gguf_names.is_interleaved(ggml_name) else 0
        if "{expert}" in name:
            count = shape.experts.count if shape.experts else 0
            index |= stacks.unstack_one(ggml_name, name, info, count, expected.get(name.format(expert=0), ()))
        elif expected.get(name) == (1, *info.dims):
            # The converter drops the first dim of a matrix of one row.
            index[name] = msgspec.structs.replace(info, dims=expected[name])
        else:
            index[name] = msgspec.structs.replace(info, interleaved=interleaved)
    return split_heads.join_heads(index) if shape.latent else index
