"""Checkpoint: the files behind a user's name of a model, checked to be complete."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import DType, ModelShape
from weft.checkpoint.config import config_json, pooling
from weft.checkpoint.files import gguf, safetensors, sharded
from weft.checkpoint.files.model_file import file_error
from weft.checkpoint.files.tensor import DENSE, ENCODINGS, TensorInfo
from weft.checkpoint.gguf import shape as gguf_shape
from weft.checkpoint.hub import demo, hub, model_names
from weft.checkpoint.names import gguf_reference
from weft.checkpoint.quantised.packed import Packed
from weft.checkpoint.quantised.registry import find_packed_name
from weft.checkpoint.quantised.stored_types import stored_types, with_stored_types
from weft.checkpoint.tensor_index import (
    FileFormat,
    drafting_layers,
    locate_tensors,
    rename_gguf_tensors,
    rename_tensors,
    select_tensors,
)
from weft.checkpoint.unread import describe_names, unread_parts
from weft.errors import ModelError, error_reason
from weft.logs import event_fields
from weft.regular_files import open_regular

logger = logging.getLogger("weft")

DTYPES: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
CHUNK = 1 << 20  # bytes that are compared at once


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
    strict: bool = False,
) -> Checkpoint:
    """Find the checkpoint that `model` names, and fetch it if it is not here yet.

    The name is `demo`, a directory, a GGUF file, a repository on the Hugging Face hub, a nickname of a repository, or a
    GGUF file there as `hf.co/OWNER/REPO:QUANT`. With `load_format` "dummy" a config.json is enough. Raises ModelError,
    in one line with the ways out, for a model that is missing, damaged, incomplete, or of an unknown architecture.
    `model_impl` is EngineConfig's, `task` is as in `read_pooling`. Tensors that nothing reads are a warning; with
    `strict` they are an error.
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
        format, quantised = "dummy", stored_types(shape)
    else:
        shape, quantised = _with_stored_tensors(shape, contents.tensors, path, format, strict=strict)
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
    """The format of the files at `path`. Raises ModelError if another format was asked for."""
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
    if not generation and path.name == demo.FILE:
        generation = dict(demo.GENERATION)
    return _Contents(shape, generation, rename_gguf_tensors(header, shape), header.metadata)


def _read_directory(path: Path, model_impl: str, *, dummy: bool) -> _Contents:
    index = {} if dummy else safetensors.read_directory(path)
    shape = config_json.read_shape(path, main_dtype(index), model_impl=model_impl)
    generation = config_json.recommended_sampling(path)
    tensors = rename_tensors(index, shape)
    return _Contents(with_own_head(shape, tensors, str(path)), generation, tensors, None)


def _with_pooling(
    path: Path, contents: _Contents, task: pooling.PoolingTask
) -> tuple[ModelShape, pooling.PoolingSettings | None]:
    """The shape, and what the model makes of prompts as a whole; an embedding model may be without its head."""
    shape, pooled = contents.shape, pooling.read_pooling(path, contents.shape, task, contents.metadata)
    if pooled is not None and pooled.task == "embed" and contents.tensors:
        return _without_head(shape, pooled, contents.tensors)
    return shape, pooled


def _with_stored_tensors(
    shape: ModelShape, index: Mapping[str, TensorInfo], path: Path, format: FileFormat, *, strict: bool
) -> tuple[ModelShape, dict[str, str]]:
    """The shape with the types that its tensors are stored in, and the types of the quantised tensors."""
    tensors = select_tensors(index, shape, str(path), format)
    _report_unread(index, tensors, shape, path, strict=strict)
    quantised = {name: info.type for name, info in tensors.items() if _is_quantised(info)}
    return with_stored_types(shape, tensors), quantised


def _report_unread(
    index: Mapping[str, TensorInfo], tensors: Mapping[str, TensorInfo], shape: ModelShape, path: Path, *, strict: bool
) -> None:
    """Log which tensors of the files nothing reads. Raises ModelError for them if `strict`, unless they belong to parts
    that are left out on purpose."""
    for layer in drafting_layers(index, len(shape.layers)):
        logger.info(
            "%s: layer %d, which predicts a further token (MTP), is not read",
            path,
            layer,
            extra=event_fields("layer-not-read", path=str(path), layer=layer),
        )
    left_out, others = unread_parts(index, tensors, shape)
    for part, count in left_out.items():
        logger.info("%s: %d tensors of %s are not read", path, count, part)
    if not others:
        return
    names = describe_names(others)
    if strict:
        raise ModelError(
            f"{path}: nothing reads {len(others)} of its tensors: {names}; give a checkpoint of a "
            f"{shape.architecture} alone, or leave --strict-checkpoint out",
            code="unread-tensors",
        )
    logger.warning(
        "%s: nothing reads %d of its tensors: %s; if they belong to the model, it answers otherwise than it should "
        "(--strict-checkpoint refuses such files)",
        path,
        len(others),
        names,
        extra=event_fields("unread-tensors", path=str(path), tensors=len(others)),
    )


def _without_head(
    shape: ModelShape, pooled: pooling.PoolingSettings, index: Mapping[str, TensorInfo]
) -> tuple[ModelShape, pooling.PoolingSettings]:
    """A shape and its settings for files that may lack the head: an embedding needs none, and the embedding's table
    takes its place."""
    head = find_architecture(shape.architecture).names.head + ".weight"
    if shape.tied or shape.library or head in index or find_packed_name(index, head) is not None:
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
    return isinstance(info, Packed) or ENCODINGS[info.type].elements > 1


def _locate(model: str, revision: str | None, token: str | None, folder: str | None, *, weights: bool) -> Path:
    """The directory with a config.json, or the GGUF file, of a model's name; fetched if it is not here."""
    if model == demo.NAME:
        return demo.fetch_demo()
    path = local_path(model)
    if path is not None:
        return path
    reference = gguf_reference.parse_address(model)
    if reference is not None:
        if hub.cached_gguf(reference, folder) is None:
            model_names.check_runs(reference)
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
        raise file_error(path, error) from error
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
    for mixer in shape.mixers:
        if mixer.heads % mixer.kv_heads:
            raise ModelError(
                f"{where}: {mixer.heads} query heads are no multiple of {mixer.kv_heads} KV heads",
                code="uneven-kv-heads",
            )
        if mixer.head_dim % 2:
            raise ModelError(
                f"{where}: head_dim is {mixer.head_dim}; rotary position embedding needs an even one",
                code="odd-head-dim",
            )
    for token in (*shape.eos, *(() if shape.bos is None else (shape.bos,))):
        if token >= shape.vocab:
            raise ModelError(
                f"{where}: token id {token} is beyond the vocabulary of {shape.vocab}", code="token-beyond-vocabulary"
            )


def with_own_head(shape: ModelShape, index: Mapping[str, TensorInfo], path: str) -> ModelShape:
    """A shape that is not tied if the files have a head that is not the embedding, as Transformers 5 has it.

    A head that is equal to the embedding is left out: the model needs half the memory for both.
    """
    if not shape.tied or shape.library:
        return shape
    names = find_architecture(shape.architecture).names
    head, embedding = index.get(names.head + ".weight"), index.get(names.embed + ".weight")
    if head is None or embedding is None or not _can_be_head(head, embedding) or _is_same(head, embedding):
        return shape
    logger.warning(
        "%s: the config ties the head to the embedding, and the files have another; theirs is used",
        path,
        extra=event_fields("own-head", path=path),
    )
    return msgspec.structs.replace(shape, tied=False)


def _can_be_head(head: TensorInfo, embedding: TensorInfo) -> bool:
    """Return True for a head that is not quantised, and has a row for each token."""
    return head.type in DENSE and head.dims == embedding.dims and not (head.transposed or embedding.transposed)


def _is_same(head: TensorInfo, embedding: TensorInfo) -> bool:
    """Return True if two tensors have the same bytes."""
    if head.type != embedding.type or head.nbytes != embedding.nbytes:
        return False
    with open_regular(head.file) as first, open_regular(embedding.file) as second:
        first.seek(head.offset)
        second.seek(embedding.offset)
        for start in range(0, head.nbytes, CHUNK):
            size = min(CHUNK, head.nbytes - start)
            if first.read(size) != second.read(size):
                return False
    return True
