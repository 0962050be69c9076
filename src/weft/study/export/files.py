"""Files of an export: printed on standard output, or written into a directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from weft.errors import ConfigError, error_reason

SCRIPT, PRIVATE = 0o755, 0o600  # modes of executables, and of files that will hold a key


class ExportFile(msgspec.Struct, frozen=True):
    """One file of an export: its name, its whole text, its permissions."""

    name: str
    text: str
    mode: int = 0o644


def joined_text(files: Sequence[ExportFile]) -> str:
    """Text for standard output: one file as it is, several files each below a line with its name."""
    if len(files) == 1:
        return files[0].text
    return "\n".join(f"# ======== {file.name} ========\n{file.text}" for file in files)


def write_files(files: Sequence[ExportFile], folder: Path, *, force: bool = False) -> list[Path]:
    """Write the files into `folder`, which is created if missing; return their paths.

    Raises ConfigError before anything is written if one exists already (unless `force`), and if writing fails.
    """
    paths = [folder / file.name for file in files]
    existing = [path for path in paths if path.exists()]
    if existing and not force:
        raise ConfigError(
            f"{', '.join(map(str, existing))} exists; --force overwrites, or give another --emit-to",
            code="export-file-exists",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, file in zip(paths, files, strict=True):
            path.touch(mode=file.mode)
            path.chmod(file.mode)  # also for a file that existed
            path.write_text(file.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error_reason(error)}", code="cannot-write-export") from None
    return paths
