"""Models in the hub's cache on this machine: their list, and their removal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from weft.checkpoint.hub import demo, hub
from weft.checkpoint.names import gguf_reference
from weft.checkpoint.names.gguf_reference import GgufReference
from weft.errors import ModelError


class LocalModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that needs no download.

    - `name`: what to give to `weft serve`: one of Ollama's tags, `hf.co/OWNER/REPO:QUANT`, or the id on the hub.
    - `files`: its weights, each a link into the cache or a file; `nbytes` is the sum of their sizes.
    - `digest`: the commit of the repository, or the hash of the file.
    - `modified_s`: when its newest file came, in seconds since 1970.
    """

    name: str
    repository: str
    path: str
    files: tuple[str, ...]
    nbytes: int
    digest: str
    modified_s: float
    quantization: str = ""

    @property
    def format(self) -> str:
        return "gguf" if self.quantization else "safetensors"


def list_models(folder: str | None = None) -> list[LocalModel]:
    """All models of the hub's cache (`folder`, or HF_HOME), and the demo; the newest first."""
    from huggingface_hub import constants

    cache = Path(folder or constants.HF_HUB_CACHE).expanduser()
    models = [model for place in sorted(cache.glob("models--*")) for model in _models_in(place)]
    demo_model = _demo()
    if demo_model is not None:
        models.append(demo_model)
    return sorted(models, key=lambda model: -model.modified_s)


def find_model(name: str, folder: str | None = None) -> LocalModel | None:
    """The model of the cache that a name means, in any of its spellings; None if it is not here. Raises ModelError."""
    reference = gguf_reference.parse_name(name.removesuffix(":latest")) or gguf_reference.parse_name(name)
    wanted = {name, name.removesuffix(":latest")} | ({gguf_reference.short_name(reference)} if reference else set())
    return next((model for model in list_models(folder) if model.name in wanted), None)


def holds_checkpoint(model: LocalModel, checkpoint: str) -> bool:
    """Return True if removing a model would remove a checkpoint, or a part of it."""
    place, used = Path(model.path).resolve(), Path(checkpoint).resolve()
    if used in {Path(file).resolve() for file in model.files}:
        return True
    if not model.repository or not used.is_relative_to(place):
        return False
    # A file of another quantisation stays, unless the repository goes as a whole.
    return not model.quantization or used.is_dir() or len(_models_in(Path(model.path))) <= 1


def remove_model(model: LocalModel) -> None:
    """Remove the files of a model; a repository whose last model it was goes as a whole. Raises ModelError."""
    try:
        place = Path(model.path) if model.repository else None
        if place is not None and len(_models_in(place)) <= 1:
            shutil.rmtree(place)
            return
        for file in map(Path, model.files):
            content = file.resolve()
            file.unlink()
            if place is None or not _is_linked(place, content):
                content.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"cannot remove {model.name}: {error.strerror or error}", code="cannot-remove-model") from None


def _models_in(place: Path) -> list[LocalModel]:
    """The models of one repository's folder in the cache."""
    repository = place.name.removeprefix("models--").replace("--", "/")
    snapshot = hub.cached_repository(repository, str(place.parent))
    if snapshot is None:
        return []
    names = [path.relative_to(snapshot).as_posix() for path in sorted(snapshot.rglob("*")) if path.is_file()]
    return [*_gguf_models(repository, place, snapshot, names), *_whole_models(repository, place, snapshot, names)]


def _gguf_models(repository: str, place: Path, snapshot: Path, names: list[str]) -> Iterator[LocalModel]:
    for quantization in sorted(set().union(*map(gguf_reference.quantizations, names))):
        reference = GgufReference(repository, quantization)
        try:
            files = gguf_reference.choose_files(names, reference)
        except ModelError:
            continue  # some parts are missing
        name = gguf_reference.short_name(reference)
        yield _model(name, repository, place, snapshot, files, quantization)


def _whole_models(repository: str, place: Path, snapshot: Path, names: list[str]) -> Iterator[LocalModel]:
    files = [name for name in names if name.endswith(".safetensors")]
    if files and "config.json" in names:
        yield _model(repository, repository, place, snapshot, files, "")


def _model(name: str, repository: str, place: Path, snapshot: Path, files: list[str], quantization: str) -> LocalModel:
    paths = [snapshot / file for file in files]
    return LocalModel(
        name=name,
        repository=repository,
        path=str(place),
        files=tuple(map(str, paths)),
        nbytes=sum(path.stat().st_size for path in paths),
        digest=snapshot.name,
        modified_s=max(path.stat().st_mtime for path in paths),
        quantization=quantization,
    )


def _demo() -> LocalModel | None:
    """The demo, if it has been fetched."""
    path = demo.cached_demo()
    if path is None:
        return None
    status = path.stat()
    return LocalModel(
        name=demo.NAME,
        repository="",
        path=str(path),
        files=(str(path),),
        nbytes=status.st_size,
        digest=demo.GGUF_SHA256,
        modified_s=status.st_mtime,
        quantization="Q4_1",
    )


def _is_linked(place: Path, content: Path) -> bool:
    """Return True if a file of any commit still leads to `content`."""
    links = (path for path in (place / "snapshots").rglob("*") if path.is_symlink())
    return any(path.resolve() == content for path in links)
