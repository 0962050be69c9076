"""Tokenisers that take long to make, kept ready to load in $XDG_CACHE_HOME/weft/tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from weft.cache import cache_path, write_cache_file
from weft.errors import ModelError
from weft.text.settings import Settings

FORMAT = 1  # to be raised when what is made from the same file changes


def cached(source: Path, make: Callable[[Path], tuple[Tokenizer, Settings]]) -> tuple[Tokenizer, Settings]:
    """make(source), or what it gave before for this very file. A cache that cannot be read or written is no error."""
    folder = _folder(source)
    if folder is None:
        return make(source)
    # tokenizers raises plain Exceptions for a file that it cannot read.
    with suppress(Exception):
        settings = msgspec.json.decode((folder / "settings.json").read_bytes(), type=Settings)
        return Tokenizer.from_file(str(folder / "tokenizer.json")), settings
    rust, settings = make(source)
    with suppress(OSError, ModelError):
        write_cache_file(folder / "tokenizer.json", rust.to_str().encode())
        # Last, so that it vouches for the other.
        write_cache_file(folder / "settings.json", msgspec.json.encode(settings))
    return rust, settings


def _folder(source: Path) -> Path | None:
    """One per state of a file: its path, where it lies on the disk, its size and when it was written."""
    try:
        root = cache_path()
        path = source.resolve()
        stat = path.stat()
    except (OSError, RuntimeError):
        return None
    identity = (FORMAT, str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return root / "tokenizers" / sha256(repr(identity).encode()).hexdigest()[:32]
