"""The cache: files that Weft fetched or made, so that it need not do so again. Its folders belong to one user."""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

from weft.errors import ModelError

PRIVATE = 0o700  # the mode of folders that we make, whatever the umask
ROOT = 0  # the user id of the system's administrator, who could change our own code as well
WAY_OUT = "or let XDG_CACHE_HOME be a directory of your own"

logger = logging.getLogger("weft")


def cache_path() -> Path:
    """`$XDG_CACHE_HOME/weft`, by default `~/.cache/weft`. Raises RuntimeError where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "weft"


def cache_dir() -> Path:
    """`cache_path()`, made where it is not there yet."""
    folder = cache_path()
    try:
        make_private(folder)
    except OSError as error:
        raise ModelError(
            f"cannot make the cache directory {folder}: {error.strerror}; set XDG_CACHE_HOME to one that can be written"
        ) from error
    return folder


def make_private(folder: Path) -> None:
    """Make a folder and the folders above it, for this user alone; one that exists stays as it is. Raises OSError."""
    try:
        folder.mkdir(PRIVATE, exist_ok=True)
    except FileNotFoundError:
        make_private(folder.parent)
        folder.mkdir(PRIVATE, exist_ok=True)


def distrust_reason(path: Path) -> str | None:
    """Reason not to run code from the cache file `path`, which need not exist; None if only this user and root can have
    put it there.

    The file and its two folders (`weft/kernels`) must belong to this user or root and be closed to other writers. A
    folder further up may belong to somebody else, and to a group: homes are mounted so, and a folder of ours below it
    can be taken away but not forged. It may not be open to everybody unless its sticky bit is set, as that of /tmp.
    """
    ours = (path, path.parent, path.parent.parent)
    for place in (path, *path.parents):
        try:
            status = place.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{place} cannot be looked at ({error.strerror}); make it readable, {WAY_OUT}"
        if place in ours and status.st_uid not in (os.geteuid(), ROOT):
            return f"{place} belongs to user {status.st_uid}, whose code would be run; delete it, {WAY_OUT}"
        closed = stat.S_IWGRP | stat.S_IWOTH if place in ours else stat.S_IWOTH
        if status.st_mode & closed and (place in ours or not status.st_mode & stat.S_ISVTX):
            return (
                f"{place} can be written by other users (mode {stat.S_IMODE(status.st_mode):o}), whose code would be "
                f"run; empty it and `chmod go-w` it, {WAY_OUT}"
            )
    return None


@functools.cache
def warn_damaged(path: Path, why: str, way_out: str) -> None:
    """Say, once, that a file of the cache is ignored."""
    logger.warning("%s is damaged and ignored (%s); %s", path, why, way_out)


def write_cache_file(path: Path, content: bytes) -> None:
    """Write a file of the cache, whole or not at all, even if the machine stops. Raises OSError, and what `cache_dir`
    raises."""
    cache_dir()
    make_private(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        install_cache_file(Path(name), path)
    except BaseException:  # a full disk, Ctrl-C: what is half written must not stay
        Path(name).unlink(missing_ok=True)
        raise


def install_cache_file(made: Path, path: Path) -> None:
    """Move a whole file to its place in the cache, on the same disk: after a power cut the old file is there or the new
    one, never half of one. Raises OSError."""
    _flush(made)
    os.replace(made, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
