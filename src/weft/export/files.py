"""Files: what an export consists of, told on standard output or written into a directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from weft.errors import ConfigError, error_reason

SCRIPT, PRIVATE = 0o755, 0o600  # modes of what is run, and of what will hold a key


class File(msgspec.Struct, frozen=True):
    """One file of an export: its name, its whole text, its permissions."""

    name: str
    text: str
    mode: int = 0o644


def joined(files: Sequence[File]) -> str:
    """For standard output: a single file as it is, several each below a line with its name."""
    if len(files) == 1:
        return files[0].text
    return "\n".join(f"# ======== {file.name} ========\n{file.text}" for file in files)


def write(files: Sequence[File], folder: Path, *, force: bool = False) -> list[Path]:
    """Into `folder`, which is made; the paths. Raises ConfigError, before anything is written, where one of them is
    there already (unless `force`), or where it cannot be written."""
    paths = [folder / file.name for file in files]
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise ConfigError(f"{', '.join(map(str, there))} exists; --force overwrites, or give another --emit-to")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, file in zip(paths, files, strict=True):
            path.touch(mode=file.mode)
            path.chmod(file.mode)  # also of one that was there
            path.write_text(file.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error_reason(error)}") from None
    return paths
