"""Files from outside: files that a user, a model's folder or a configuration names.

Only regular files are opened. A pipe may never have a byte, a device may never end, and opening one may change it. Each
reader names the number of bytes that it reads at most, so that a file that is too large costs a line instead of memory.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

SETTINGS_BYTES = 16_000_000  # a file that a person or a program writes to configure something, usually some KB
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnfitFileError(OSError):
    """A file that is there and is not read. `strerror` is the reason, without the name of the file."""

    def __init__(self, reason: str, path: str | Path, *, code: str) -> None:
        super().__init__(errno.EINVAL, reason, str(path))
        self.code = code


def open_regular(path: str | Path, most: int | None = None) -> BinaryIO:
    """Open a regular file of at most `most` bytes for reading.

    Raises OSError: UnfitFileError for a pipe, a device or a socket ("not-a-regular-file"), and for a file that is
    larger ("file-too-large").
    """
    try:
        _check(os.stat(path), path, most)  # before it is opened: opening a device may already act on it
        # If another file has taken its place since, opening it does not wait for a pipe's writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:
        raise UnfitFileError("its name cannot be a file's", path, code="not-a-regular-file") from None
    file = os.fdopen(descriptor, "rb")
    try:
        _check(os.fstat(descriptor), path, most)
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: str | Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes. Raises OSError as `open_regular` does."""
    with open_regular(path, most) as file:
        content = file.read(most + 1)  # it may have grown, and those under /proc say that they have no bytes
    if len(content) > most:
        raise _too_large(path, len(content), most)
    return content


def read_regular_text(path: str | Path, most: int, *, encoding: str = "utf-8", errors: str = "strict") -> str:
    r"""Read the text in a regular file of at most `most` bytes; each line ends with "\n".

    Raises OSError as `open_regular` does, and UnicodeDecodeError.
    """
    return io.TextIOWrapper(io.BytesIO(read_regular(path, most)), encoding=encoding, errors=errors).read()


def _check(status: os.stat_result, path: str | Path, most: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise UnfitFileError(f"{kind}, and only regular files are read", path, code="not-a-regular-file")
    if most is not None and status.st_size > most:
        raise _too_large(path, status.st_size, most)


def _too_large(path: str | Path, size: int, most: int) -> UnfitFileError:
    return UnfitFileError(f"{size:,} bytes; at most {most:,} are read", path, code="file-too-large")
