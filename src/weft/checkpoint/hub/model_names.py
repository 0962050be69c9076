"""Model names: the one place that resolves a user's name of a model to a path, an id on the hub, or `demo`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from weft.checkpoint.hub import hub
from weft.checkpoint.names import catalogue, gguf_reference
from weft.checkpoint.names.gguf_reference import GgufReference
from weft.errors import ModelError

LATEST = ":latest"


def full_name(typed: str, *, folder: str | None = None) -> str:
    """Resolve a nickname to its id on the hub (`Qwen3-8B` to `Qwen/Qwen3-8B`); any other name is returned unchanged.

    One of Ollama's tags (`qwen3:8b`) means the GGUF file that `weft pull` fetches for it, `hf.co/OWNER/REPO:QUANT`. An
    existing path, an id with its owner, and a name that the hub's cache (`folder`, or HF_HOME) holds are no nicknames.
    An unknown name is returned unchanged too: the code that looks for the model suggests near names. Raises ModelError
    for a tag of a kind of model that Weft has not.
    """
    if "/" in typed or _exists(typed):
        return typed
    full = catalogue.full_name(typed)
    tag = None if full is not None and catalogue.same_name(typed, full) else gguf_reference.parse_tag(typed)
    if tag is not None:
        return str(tag)
    if full is None:
        catalogue.check_kind(typed)
    return typed if full is None or hub.cached_repository(typed, folder) else full


def notice(typed: str, full: str) -> str:
    """Message that tells the model that a nickname was resolved to; "" if only the owner or the case differs."""
    if typed == full or catalogue.same_name(typed, full):
        return ""
    reference = gguf_reference.parse_address(full)
    if reference is None:
        in_bits = f"; Weft knows no GGUF file for this tag ({gguf_reference.FORM} names one)" if ":" in typed else ""
        return f"{typed} is {full}{in_bits}"
    whole = whole_model(reference)
    return f"{typed} is {full}, the file that weft pull fetches" + (f"; unquantised: {whole}" if whole else "")


def served_names(full: str) -> tuple[str, ...]:
    """Names by which clients may ask for a model: for a GGUF file that a tag means, the tag too."""
    reference = gguf_reference.parse_address(full)
    return (full,) if reference is None else tuple(dict.fromkeys((gguf_reference.short_name(reference), full)))


def whole_model(reference: GgufReference) -> str | None:
    """Id on the hub of the model whose quantised file a reference names; None for a repository that no tag means."""
    row = gguf_reference.row_of(reference)
    return None if row is None else row.model or catalogue.full_name(row.tag)


def check_runs(reference: GgufReference) -> None:
    """Raise ModelError, before anything is fetched, for the file of a model that the engine is known not to run."""
    whole = whole_model(reference)
    if whole is None:
        return
    try:
        catalogue.check_runs(whole)
    except ModelError as error:
        tag = gguf_reference.short_name(reference)
        raise ModelError(
            f"{tag} is {whole}, which Weft does not run, so nothing is fetched: {error}",
            code=error.code,
        ) from None


def _exists(typed: str) -> bool:
    try:
        return Path(typed).expanduser().exists()
    except (OSError, RuntimeError):  # a name too long, the ~ of an unknown user
        return False


def tagged(name: str) -> str:
    """Return a name with its tag, as Ollama shows it: without one it has LATEST."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def find_tagged(name: str, names: Iterable[str]) -> str | None:
    """Return the first of `names` that `name` means, with or without the tag LATEST; None if none is."""
    wanted = tagged(name)
    return next((own for own in names if tagged(own) == wanted), None)
