"""Lookup: what a user's name for a model stands for, without a byte of its weights."""

from __future__ import annotations

from pathlib import Path

from weft.architectures.model import Model
from weft.architectures.parameters import params
from weft.architectures.shape import ModelShape
from weft.errors import ModelError, error_reason
from weft.formats import catalogue, checkpoint, config_json, demo, gguf, gguf_shape, hub, model_names, safetensors
from weft.formats.gguf_types import FILE_TYPES
from weft.formats.precision import OF_DTYPE


def look_up(
    model: str,
    *,
    refresh: bool = False,
    revision: str | None = None,
    hf_token: str | None = None,
    patience: float = hub.PATIENCE,
) -> Model:
    """A directory, a .gguf file, a model of the catalogue (`demo` among them), or one on the hub, which is asked
    for at most `patience` seconds; with `refresh` or a `revision` it is asked even for those of the catalogue.

    Raises ModelError, in one line with the ways out.
    """
    try:
        path = checkpoint.local(model)
    except (OSError, RuntimeError) as error:  # a directory that may not be read, a name too long, the ~ of nobody
        raise ModelError(f"cannot read {model}: {error_reason(error)}") from error
    if path is not None:
        return _directory(model, path) if path.is_dir() else _gguf(model, path)
    model, asked = model_names.full_name(model), refresh or revision is not None
    known = catalogue.look_up(model)
    if not asked and not (known and catalogue.same_name(model, known.name)):
        kept = hub.cached(model)
        if kept is not None:
            return _directory(model, kept)
    if known is not None and (not asked or known.name == demo.NAME):  # the demo is on no hub
        return known
    if "/" not in model and known is None and not model.endswith(hub.FILES):
        return catalogue.find(model)  # a bare name of nobody's: the nearest that are known help more than the hub
    if not hub.is_name(model):
        raise ModelError(f"there is no file or directory {model}; {hub.ways_out(model)}")
    from weft.formats import hub_headers  # HTTP and TLS, which most questions do without

    afar = hub_headers.look(known.name if known else model, revision=revision, token=hf_token, patience=patience)
    shape = config_json.shape(afar.config, run=False)
    precision = config_json.precision(afar.config) or OF_DTYPE[shape.dtype]
    return _model(known.name if known else model, shape, precision, afar.config.where, afar.stored_bytes)


def _directory(model: str, folder: Path) -> Model:
    """From its config.json, and from the headers of its weights where those are there."""
    has_weights = any(folder.glob("*.safetensors"))
    index = safetensors.read_directory(folder) if has_weights else {}
    shape = checkpoint.described(config_json.read(folder, checkpoint.dtype(index), run=False), index)
    config = config_json.of(folder)
    stored = sum(info.nbytes for info in index.values()) if has_weights else None
    precision = shape.published.precision if shape.published else config_json.precision(config)
    return _model(model, shape, precision or OF_DTYPE[shape.dtype], config.where, stored)


def _gguf(model: str, path: Path) -> Model:
    """From a GGUF file's header."""
    header = gguf.read(path)
    kind = header.metadata.get("general.file_type")
    precision = FILE_TYPES.get(kind) if isinstance(kind, int) else None
    if precision is None:
        raise ModelError(f"{path} has the general.file_type {kind!r}, which Weft does not know; give --precision")
    stored = sum(info.nbytes for info in header.tensors.values())
    return _model(model, gguf_shape.shape(header, run=False), precision, str(path), stored)


def _model(name: str, shape: ModelShape, precision: str, source: str, stored: int | None) -> Model:
    return Model(name=name, shape=shape, params=params(shape), precision=precision, source=source, stored_bytes=stored)
