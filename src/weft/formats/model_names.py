"""Model names: the one place that resolves a user's name of a model to a path, an id on the hub, or `demo`."""

from __future__ import annotations

from pathlib import Path

from weft.formats import catalogue, gguf_reference, hub


def full_name(typed: str, *, folder: str | None = None) -> str:
    """Resolve a nickname to its id on the hub (`qwen3:8b` to `Qwen/Qwen3-8B`); any other name is returned unchanged.

    An existing path, an id with its owner, and a name that the hub's cache (`folder`, or HF_HOME) holds are no
    nicknames. An unknown name is returned unchanged too: the code that looks for the model suggests near names. One of
    Ollama's tags means the GGUF file that `weft pull` has fetched for it, if that is here.
    """
    tag = gguf_reference.parse_tag(typed)
    if tag is not None and not _exists(typed) and hub.cached_gguf(tag, folder) is not None:
        return str(tag)
    full = None if "/" in typed else catalogue.full_name(typed)
    return typed if full is None or _exists(typed) or hub.cached_repository(typed, folder) else full


def notice(typed: str, full: str) -> str:
    """Message that tells the model that a nickname was resolved to; "" if only the owner or the case differs."""
    return "" if typed == full or catalogue.same_name(typed, full) else f"{typed} is {full}"


def _exists(typed: str) -> bool:
    try:
        return Path(typed).expanduser().exists()
    except (OSError, RuntimeError):  # a name too long, the ~ of an unknown user
        return False
