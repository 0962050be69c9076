"""Checkpoint: what a model that a user named is, where it lies, and that it is whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from weft.architectures.axes import axis_length
from weft.architectures.parameters import layers_of, parameters
from weft.architectures.shape import DType, ModelShape
from weft.errors import ConfigError, ModelError, error_reason
from weft.formats import config_json, demo, gguf, gguf_names, gguf_shape, hub, model_names, packed, safetensors
from weft.formats.tensor import ENCODINGS, TensorInfo

Format = Literal["safetensors", "gguf", "dummy"]
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """`model` is as the user typed it; `path` a directory, or a GGUF file. With the format "dummy" that path
    holds the shape, and the tokeniser where there is one, but no weights are read from it.

    `generation` is the sampling that the model recommends, in generation_config.json's words; `quantised` are the types
    of the tensors that are stored so, under Hugging Face's names; of a dummy those that its config promises.
    """

    model: str
    path: str
    format: Format
    shape: ModelShape
    generation: dict[str, float | int | bool]
    quantised: dict[str, str] = {}

    def tensors(self) -> dict[str, TensorInfo]:
        """Where each tensor of the model lies, under Hugging Face's names; {} for a dummy."""
        return tensors(self.path, self.format, self.shape)


def resolve(
    model: str,
    *,
    revision: str | None = None,
    hf_token: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
) -> Checkpoint:
    """What `model` names: `demo`, a directory, a GGUF file, a repository on the Hugging Face hub, or a nickname of one.

    Fetches what is not here yet. With `load_format` "dummy" a config.json is enough. Raises ModelError, in one
    line with the ways out, where the model is missing, damaged, of an unknown architecture, or not whole.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format is {load_format!r}; it must be one of {', '.join(LOAD_FORMATS)}")
    try:
        full = model_names.full_name(model, folder=download_dir)
        path = _locate(full, revision, hf_token, download_dir, weights=load_format != "dummy")
    except (OSError, RuntimeError) as error:  # a directory that may not be read, a name too long, the ~ of nobody
        raise ModelError(f"cannot read {model}: {error_reason(error)}") from error
    found: Format = "safetensors" if path.is_dir() else "gguf"
    if load_format not in ("auto", "dummy", found):
        raise ModelError(f"{path} is {found}, not {load_format}; leave --load-format out, or give another model")
    dummy = load_format == "dummy"
    if found == "gguf":
        header = gguf.read(path)
        shape, generation = gguf_shape.shape(header), gguf_shape.sampling(header)
        index = _translated(header, shape)
    else:
        index = {} if dummy else safetensors.read_directory(path)
        shape, generation = config_json.read(path, dtype(index)), config_json.sampling(path)
        index = _joined(index, shape)
    _check_shape(shape, str(path))
    stored = {} if dummy else _whole(index, shape, str(path))
    shape = shape if dummy else packed.described(shape, stored)
    return Checkpoint(
        model=model,
        path=str(path),
        format="dummy" if dummy else found,
        shape=shape,
        generation=generation,
        quantised=packed.stored(shape) if dummy else {name: it.type for name, it in stored.items() if _quantised(it)},
    )


def _quantised(info: TensorInfo) -> bool:
    return isinstance(info, packed.Packed) or ENCODINGS[info.type].elements > 1


def described(shape: ModelShape, index: dict[str, TensorInfo]) -> ModelShape:
    """The shape with what the weights of safetensors files are really stored in, as far as they are there."""
    return packed.described(shape, _joined(index, shape))


def _joined(index: dict[str, TensorInfo], shape: ModelShape) -> dict[str, TensorInfo]:
    """The tensors of safetensors files, with packed matrices as one."""
    return index if shape.published is None else packed.joined(index, shape.published)


def _locate(model: str, revision: str | None, token: str | None, folder: str | None, *, weights: bool) -> Path:
    """The directory with a config.json, or the GGUF file, that a model's name stands for."""
    if model == demo.NAME:
        return demo.fetch()
    path = local(model)
    if path is not None:
        return path
    if not hub.is_name(model):
        raise ModelError(f"there is no file or directory {model}; {hub.ways_out(model)}")
    return _in_directory(hub.fetch(model, revision=revision, token=token, folder=folder, weights=weights))


def local(model: str) -> Path | None:
    """The directory with a config.json, or the GGUF file, that a path stands for; None where nothing is there."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_directory(path)
    return _file(path) if path.is_file() else None


def _in_directory(folder: Path) -> Path:
    if (folder / config_json.CONFIG).is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1 or (files and "-00001-of-" in files[0].name):
        return files[0]
    if files:
        raise ModelError(f"{folder} holds {len(files)} GGUF files; give one of them: {files[0]}")
    raise ModelError(f"{folder} holds no model: neither {config_json.CONFIG} nor a .gguf file; {hub.WAYS_OUT}")


def _file(path: Path) -> Path:
    if path.name == config_json.CONFIG or path.suffix == ".safetensors":
        return _in_directory(path.parent)
    if path.suffix in safetensors.PICKLED:
        raise ModelError(
            f"{path} is a pickled file, which can run code when it is read; give a directory with safetensors "
            "or a .gguf file"
        )
    try:
        if gguf.is_gguf(path):
            return path
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error_reason(error)}") from error
    raise ModelError(f"{path} is no model: it does not begin as a GGUF file does; give a directory or a .gguf file")


def dtype(index: Mapping[str, TensorInfo]) -> DType:
    """The dtype of most of the weights."""
    nbytes: dict[DType, int] = {}
    for info in index.values():
        if info.type in DTYPES:
            nbytes[DTYPES[info.type]] = nbytes.get(DTYPES[info.type], 0) + info.nbytes
    return max(nbytes, key=lambda name: nbytes[name], default="bfloat16")


def _check_shape(shape: ModelShape, where: str) -> None:
    if shape.q_heads % shape.kv_heads:
        raise ModelError(f"{where}: {shape.q_heads} query heads are no multiple of {shape.kv_heads} KV heads")
    if shape.head_dim % 2:
        raise ModelError(f"{where}: head_dim is {shape.head_dim}; rotary position embedding needs an even one")
    for token in (*shape.eos, *(() if shape.bos is None else (shape.bos,))):
        if token >= shape.vocab:
            raise ModelError(f"{where}: token id {token} is beyond the vocabulary of {shape.vocab}")


def sources(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each tensor that a checkpoint of this shape has, under Hugging Face's name, with its dims."""
    for parameter in parameters(shape):
        # Parts that share a tensor come one after the other: the last one says how long it is.
        last = {part.source: part for part in parameter.parts}
        count = shape.experts.count if parameter.role == "expert" and shape.experts else None
        for layer in layers_of(shape, parameter):
            for source, part in last.items():
                rows = sum(axis_length(shape, axis) for axis in (*part.after, part.rows))
                dims = (rows,) if part.cols is None else (rows, axis_length(shape, part.cols))
                dims = dims[::-1] if part.transposed else dims
                if count is None:
                    yield source.format(layer=layer), dims
                elif "{expert}" not in source:
                    yield source.format(layer=layer), (count, *dims)
                else:
                    for expert in range(count):
                        yield source.format(layer=layer, expert=expert), dims


def tensors(path: str, format: Format, shape: ModelShape) -> dict[str, TensorInfo]:
    """Where each tensor of `shape` lies, under Hugging Face's names, and nothing else; {} for a dummy.

    Raises ModelError, naming the tensor, where one is missing, of other dims, or stored in a way that Weft does
    not read.
    """
    if format == "dummy":
        return {}
    if format == "gguf":
        return _whole(_translated(gguf.read(path), shape), shape, path)
    return _whole(_joined(safetensors.read_directory(Path(path)), shape), shape, path)


def _whole(index: Mapping[str, TensorInfo], shape: ModelShape, path: str) -> dict[str, TensorInfo]:
    """The part of `index` that the shape asks for; raises ModelError where it does not match."""
    tensors = {}
    for name, dims in sources(shape):
        info = index.get(name)
        if info is None:
            if packed_as := _packed_parts(index, name):
                raise ModelError(
                    f"{path} holds {packed_as} in the place of {name}: its weights are quantised, but not as its "
                    "config.json says (quantization_config); fetch it again"
                )
            raise ModelError(f"{path} lacks tensor {name} of {list(dims)}; fetch it again, or give a whole model")
        if info.dims != dims:
            raise ModelError(
                f"{info.file}: tensor {name} is {list(info.dims)}; the model's shape asks for {list(dims)}"
            )
        if info.type not in ENCODINGS and not isinstance(info, packed.Packed):
            raise ModelError(f"{info.file}: tensor {name} is {info.type}; Weft reads {', '.join(ENCODINGS)}")
        tensors[name] = info
    extra = f"model.layers.{shape.layers}."
    if more := next((name for name in index if name.startswith(extra)), None):
        raise ModelError(
            f"{path} holds tensor {more}, but its config says {shape.layers} layers; give the config of these weights"
        )
    return tensors


def _packed_parts(index: Mapping[str, TensorInfo], name: str) -> str | None:
    """A tensor that holds the numbers of another one, packed."""
    layer = name.removesuffix("weight")
    return next((layer + names[0] for names in packed.NAMES.values() if layer + names[0] in index), None)


def _translated(header: gguf.Gguf, shape: ModelShape) -> dict[str, TensorInfo]:
    """A GGUF file's tensors under Hugging Face's names, with the order of their rows noted."""
    reordered = shape.architecture in gguf_names.INTERLEAVED_ARCHITECTURES
    index = {}
    for own, info in header.tensors.items():
        name = gguf_names.hugging_face(own)
        if name is None:
            if own == gguf_names.ROPE_FACTORS or gguf_names.is_unused(own):
                continue
            raise ModelError(
                f"{info.file}: tensor {own!r:.80} is no part of a {shape.architecture}; Weft cannot run this model"
            )
        interleaved = shape.head_dim if reordered and gguf_names.is_interleaved(own) else 0
        index[name] = msgspec.structs.replace(info, interleaved=interleaved)
    return index
