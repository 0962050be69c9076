"""The cache folder: downloaded and generated files, kept for the next time, in folders that belong to one user."""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import IO

from weft.errors import ModelError

PRIVATE = 0o700  # mode of the folders that we create, whatever the umask
ROOT = 0  # the user id of the system's administrator, who could change our own code as well
WAY_OUT = "or let XDG_CACHE_HOME be a directory of your own"

logger = logging.getLogger("weft")


def cache_path() -> Path:
    """Return `$XDG_CACHE_HOME/weft`, by default `~/.cache/weft`. Raises RuntimeError if there is no home directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "weft"


def cache_dir() -> Path:
    """Return `cache_path()`, which is created if needed. Raises ModelError."""
    folder = cache_path()
    try:
        make_private(folder)
    except OSError as error:
        raise ModelError(
            f"cannot make the cache directory {folder}: {error.strerror}; "
            "set XDG_CACHE_HOME to one that can be written",
            code="cannot-write-cache",
        ) from error
    return folder


def make_private(folder: Path) -> None:
    """Create a folder and its parents for this user alone. Existing folders stay as they are. Raises OSError."""
    try:
        folder.mkdir(PRIVATE, exist_ok=True)
    except FileNotFoundError:
        make_private(folder.parent)
        folder.mkdir(PRIVATE, exist_ok=True)


def distrust_reason(path: Path) -> str | None:
    """Return a reason not to run code from the cache file `path`; None if only this user and root can have written it.

    The file need not exist. The file and its two folders (`weft/kernels`) must belong to this user or root and be
    closed to other writers. A folder further up may belong to another user, and to a group: homes are often mounted so,
    and a folder of ours below it can be taken away but not forged. It may not be writable by everybody unless its
    sticky bit is set, as for /tmp.
    """
    ours = (path, path.parent, path.parent.parent)
    for place in (path, *path.parents):
        if reason := _distrust_place(place, is_ours=place in ours):
            return reason
    return None


def _distrust_place(place: Path, *, is_ours: bool) -> str | None:
    """Return a reason not to trust one file or folder on the path of a cache file; a missing one is trusted."""
    try:
        status = place.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{place} cannot be looked at ({error.strerror}); make it readable, {WAY_OUT}"
    if is_ours and status.st_uid not in (os.geteuid(), ROOT):
        return f"{place} belongs to user {status.st_uid}, whose code would be run; delete it, {WAY_OUT}"
    forbidden = stat.S_IWGRP | stat.S_IWOTH if is_ours else stat.S_IWOTH
    if status.st_mode & forbidden and (is_ours or not status.st_mode & stat.S_ISVTX):
        return (
            f"{place} can be written by other users (mode {stat.S_IMODE(status.st_mode):o}), whose code would be "
            f"run; empty it and `chmod go-w` it, {WAY_OUT}"
        )
    return None


@functools.cache
def warn_damaged(path: Path, why: str, way_out: str) -> None:
    """Warn once that a damaged file of the cache is ignored."""
    logger.warning("%s is damaged and ignored (%s); %s", path, why, way_out)


def write_cache_file(path: Path, content: bytes) -> None:
    """Write a file of the cache, whole or not at all, even if the machine stops. Raises OSError and ModelError."""
    cache_dir()
    make_private(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        install_cache_file(Path(name), path)
    except BaseException:  # a full disk, Ctrl-C: a partly written file must not stay
        Path(name).unlink(missing_ok=True)
        raise


def install_cache_file(source: Path, path: Path) -> None:
    """Move a complete file to its place in the cache, on the same disk. Raises OSError.

    After a power cut either the old file or the new file is there, complete.
    """
    _flush(source)
    os.replace(source, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's directory entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def try_lock(file: IO[str] | int) -> bool:
    """Take the lock on an open file, for as long as it is open; return False if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
