"""Contents: the bytes of the store's files, a file each, and the locks of its batches, in two folders."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, BinaryIO

from weft.cache import install_cache_file, make_private, try_lock
from weft.machine.sqlite_files import PRIVATE_FILE

PART = ".part"  # suffix of a content that is no file yet


class Contents:
    """The folders `contents` and `locks` in `folder`. Raises OSError, as its methods do."""

    def __init__(self, folder: Path) -> None:
        self._files, self._locks = folder / "contents", folder / "locks"
        for part in (folder, self._files, self._locks):
            make_private(part)

    def make_private(self) -> None:
        """Close contents of earlier versions to other users."""
        for entry in os.scandir(self._files):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if stat.S_IMODE(entry.stat().st_mode) != PRIVATE_FILE:
                    os.chmod(entry.path, PRIVATE_FILE)

    def path(self, id: str) -> Path:
        """Path of the bytes of a file."""
        return self._files / id

    @contextlib.contextmanager
    def new(self, id: str) -> Iterator[BinaryIO]:
        """A temporary file for the bytes of a new content. It is removed unless `install` keeps it."""
        path = self.path(f"{id}{PART}")
        try:
            with open(path, "x+b", opener=_private) as file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def install(self, content: BinaryIO, id: str) -> None:
        """Make a temporary file the bytes of a stored file, so that they survive a power failure."""
        install_cache_file(Path(content.name), self.path(id))

    def remove(self, id: str) -> None:
        self.path(id).unlink(missing_ok=True)

    def left(self, before: float) -> list[str]:
        """Names of the contents that were last written before a time."""
        return [entry.name for entry in os.scandir(self._files) if _written(entry) < before]

    # Locks of batches

    @contextlib.contextmanager
    def claim(self, batch: str) -> Iterator[bool]:
        """Lock a batch while the block runs: True, or False if another server has it. A killed server releases it."""
        path = self._locks / batch
        while True:
            with path.open("a") as lock:
                claimed = try_lock(lock)
                if claimed and not _is_at(lock, path):  # the file was removed: another server may have a new file
                    continue
                yield claimed
                return

    def locked(self) -> list[str]:
        """The batches that have lock files."""
        return [entry.name for entry in os.scandir(self._locks)]

    def remove_locks(self, batches: Iterable[str]) -> None:
        """Remove the lock files of batches, unless a server holds them."""
        for batch in batches:
            with contextlib.suppress(FileNotFoundError), (self._locks / batch).open("r") as lock:
                if try_lock(lock) and _is_at(lock, self._locks / batch):
                    (self._locks / batch).unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE)


def _written(entry: os.DirEntry[str]) -> float:
    """Time at which a file was last written; inf for a missing file."""
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _is_at(file: IO[str], path: Path) -> bool:
    """Return True if an open file is the file at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
