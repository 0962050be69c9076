"""Where Weft keeps what it fetched or made, so that it need not do so again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from weft.errors import ModelError


def cache_path() -> Path:
    """`$XDG_CACHE_HOME/weft`, by default `~/.cache/weft`. Raises RuntimeError where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "weft"


def cache_dir() -> Path:
    """`cache_path()`, made where it is not there yet."""
    folder = cache_path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot make the cache directory {folder}: {error.strerror}; set XDG_CACHE_HOME to one that can be written"
        ) from error
    return folder


def write(path: Path, content: bytes) -> None:
    """Write a file of the cache, whole or not at all. Raises OSError, and what `cache_dir` raises."""
    with tempfile.NamedTemporaryFile(dir=cache_dir(), prefix=path.stem, suffix=".part", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
