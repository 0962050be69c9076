"""On-disk cache of tokenizers that are slow to create: $XDG_CACHE_HOME/weft/tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from weft.cache import cache_path, write_cache_file
from weft.engine.text.settings import TokenizerSettings
from weft.errors import ModelError

FORMAT = 2  # raise it when the tokenizer created from the same file changes


def load_cached(
    source: Path, create: Callable[[Path], tuple[Tokenizer, TokenizerSettings]]
) -> tuple[Tokenizer, TokenizerSettings]:
    """Return create(source), from the cache if this very file was loaded before.

    A cache that cannot be read or written is not an error.
    """
    folder = _folder(source)
    if folder is None:
        return create(source)
    # The tokenizers library raises plain Exceptions for a file that it cannot read.
    with suppress(Exception):
        settings = msgspec.json.decode((folder / "settings.json").read_bytes(), type=TokenizerSettings)
        return Tokenizer.from_file(str(folder / "tokenizer.json")), settings
    hf_tokenizer, settings = create(source)
    with suppress(OSError, ModelError):
        write_cache_file(folder / "tokenizer.json", hf_tokenizer.to_str().encode())
        # Written last: its presence shows that the other file is complete.
        write_cache_file(folder / "settings.json", msgspec.json.encode(settings))
    return hf_tokenizer, settings


def _folder(source: Path) -> Path | None:
    """Cache folder for one state of a file (path, inode, size, modification time); None without a cache."""
    try:
        root = cache_path()
        path = source.resolve()
        stat = path.stat()
    except (OSError, RuntimeError):
        return None
    identity = (FORMAT, str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return root / "tokenizers" / sha256(repr(identity).encode()).hexdigest()[:32]
