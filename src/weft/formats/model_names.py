"""Model names: the one place that turns what people call a model into a path, an id on the hub, or `demo`."""

from __future__ import annotations

from pathlib import Path

from weft.formats import catalogue, hub


def full_name(typed: str, *, folder: str | None = None) -> str:
    """What `typed` stands for: a nickname's id on the hub, `Qwen/Qwen3-8B` for `qwen3:8b`; else `typed` itself.

    A path that is there, an id with its owner, and what the hub's cache (`folder`, or HF_HOME) holds under that very
    name go before nicknames. A name that nobody knows is returned as it is: whoever looks for it tells what is near.
    """
    full = None if "/" in typed else catalogue.full_name(typed)
    return typed if full is None or _is_here(typed) or hub.cached_repository(typed, folder) else full


def notice(typed: str, full: str) -> str:
    """The line that tells which model a nickname was taken for; "" if only the owner or the case was left out."""
    return "" if typed == full or catalogue.same_name(typed, full) else f"{typed} is {full}"


def _is_here(typed: str) -> bool:
    try:
        return Path(typed).expanduser().exists()
    except (OSError, RuntimeError):  # a name too long, the ~ of nobody
        return False
