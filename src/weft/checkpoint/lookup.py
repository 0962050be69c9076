"""Lookup of a model by the name that a user gives, for the planner: its shape and size, without reading weights."""

from __future__ import annotations

from pathlib import Path

import msgspec

from weft.checkpoint import checkpoint, tensor_index
from weft.checkpoint.architectures.model import Model
from weft.checkpoint.architectures.parameters import parameter_count
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.config import config_json
from weft.checkpoint.files import gguf, safetensors, sharded
from weft.checkpoint.files.gguf_types import FILE_TYPES
from weft.checkpoint.gguf import shape as gguf_shape
from weft.checkpoint.hub import demo, hub, model_names
from weft.checkpoint.names import catalogue, gguf_reference
from weft.checkpoint.quantised.precision import OF_DTYPE, canonical, is_precision
from weft.errors import ModelError, error_reason


def look_up(
    model: str,
    *,
    refresh: bool = False,
    revision: str | None = None,
    hf_token: str | None = None,
    patience: float = hub.PATIENCE,
) -> Model:
    """Look up a directory, a .gguf file, a model of the catalogue (`demo` among them), or one on the hub.

    The hub is asked for at most `patience` seconds; with `refresh` or a `revision`, also about models of the catalogue.
    Raises ModelError, in one line with the ways out.
    """
    try:
        path = checkpoint.local_path(model)
    except (OSError, RuntimeError) as error:  # an unreadable directory, a name too long, the ~ of an unknown user
        raise ModelError(f"cannot read {model}: {error_reason(error)}", code="cannot-read-model") from error
    if path is not None:
        return _from_directory(model, path) if path.is_dir() else _from_gguf(model, path)
    model, ask_hub = model_names.full_name(model), refresh or revision is not None
    reference = gguf_reference.parse_address(model)
    if reference is not None:
        return _from_reference(model, reference)
    known = catalogue.find_known(model)
    found_here = _without_hub(model, known, ask_hub=ask_hub)
    if found_here is not None:
        return found_here
    _check_hub_name(model, known)
    return _from_hub(known.name if known else model, revision, hf_token, patience)


def _check_hub_name(model: str, known: Model | None) -> None:
    """Raise ModelError for a name that the hub need not be asked about; `known` is the catalogue's model."""
    if "/" not in model and known is None and not model.endswith(hub.FILES):
        catalogue.find(model)  # raises: for an unknown bare name, near names help more than the hub does
    if not hub.is_name(model):
        raise ModelError(f"there is no file or directory {model}; {hub.ways_out(model)}", code="no-such-model")


def _from_reference(model: str, reference: gguf_reference.GgufReference) -> Model:
    """The model in a GGUF file of the hub: from the file, or for a tag whose file is not cached, from the catalogue.

    Raises ModelError for any other file that is not in the hub's cache.
    """
    path, whole = hub.cached_gguf(reference), model_names.whole_model(reference)
    known = catalogue.find_known(whole) if whole else None
    if path is not None:
        file = _from_gguf(model, path)
    else:
        precision = gguf_reference.precision_of(reference)
        if known is None or not is_precision(precision):
            raise ModelError(f"{reference} is not here; fetch it with `weft pull {reference}`", code="gguf-not-fetched")
        file = msgspec.structs.replace(known, name=model, precision=canonical(precision))
    if known is None or known.precision not in OF_DTYPE.values():
        return file
    note = f"this is the GGUF file that `weft pull` fetches; for 16 bits give --precision bf16, or {whole}"
    return msgspec.structs.replace(file, note=note)


def _without_hub(model: str, known: Model | None, *, ask_hub: bool) -> Model | None:
    """The model as the hub's cache or the catalogue has it; None if the hub has to be asked."""
    if ask_hub:
        return known if known is not None and known.name == demo.NAME else None  # the demo is not on the hub
    if known is None or not catalogue.same_name(model, known.name):
        cached = hub.cached_repository(model)
        if cached is not None:
            return _from_directory(model, cached)
    return known


def _from_hub(name: str, revision: str | None, token: str | None, patience: float) -> Model:
    """The model as its repository on the hub describes it."""
    # Here: it imports HTTP and TLS, which most look-ups do without.
    from weft.checkpoint.hub import headers as hub_headers

    description = hub_headers.describe_repository(name, revision=revision, token=token, patience=patience)
    shape = config_json.shape_from_config(description.config, run=False)
    precision = config_json.precision(description.config) or OF_DTYPE[shape.dtype]
    return _model(name, shape, precision, description.config.where, description.stored_bytes)


def _from_directory(model: str, folder: Path) -> Model:
    """The model as its config.json describes it, and the headers of its weights if they are there."""
    if sharded.is_sharded(folder):
        state = sharded.read_state(folder)
        return _model(model, state.shape, state.precision, str(folder / sharded.file_name(0)), None)
    has_weights = any(folder.glob("*.safetensors"))
    index = safetensors.read_directory(folder) if has_weights else {}
    shape = config_json.read_shape(folder, checkpoint.main_dtype(index), run=False)
    shape = tensor_index.with_file_types(shape, index)
    config = config_json.load_config(folder)
    stored = sum(info.nbytes for info in index.values()) if has_weights else None
    precision = shape.published.precision if shape.published else config_json.precision(config)
    return _model(model, shape, precision or OF_DTYPE[shape.dtype], config.where, stored)


def _from_gguf(model: str, path: Path) -> Model:
    """The model as a GGUF file's header describes it."""
    header = gguf.read_gguf(path)
    shape = gguf_shape.shape_from_gguf(header, run=False)
    kind = header.metadata.get("general.file_type")
    precision = FILE_TYPES.get(kind) if isinstance(kind, int) else None
    if precision is None:
        raise ModelError(
            f"{path} has the general.file_type {kind!r:.80}, which Weft does not know; give --precision",
            code="unknown-gguf-file-type",
        )
    stored = sum(info.nbytes for info in header.tensors.values())
    return _model(model, shape, precision, str(path), stored)


def _model(name: str, shape: ModelShape, precision: str, source: str, stored: int | None) -> Model:
    return Model(
        name=name,
        shape=shape,
        params=parameter_count(shape),
        precision=precision,
        source=source,
        stored_bytes=stored,
    )
