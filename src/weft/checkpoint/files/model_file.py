"""A model's files, opened and read with errors that name the file."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from weft.checkpoint.files.tensor import TensorInfo
from weft.errors import ModelError, error_reason
from weft.regular_files import UnfitFileError, open_regular, read_regular

CANNOT_READ = "cannot-read-model"


def open_model_file(path: str | Path) -> BinaryIO:
    """Open a regular file, for example with weights. Raises ModelError."""
    try:
        return open_regular(path)
    except OSError as error:
        raise file_error(path, error) from error


def read_model_file(path: Path, most: int, *, code: str = CANNOT_READ) -> bytes:
    """Read a regular file of at most `most` bytes. Raises ModelError, with `code` if the system refuses to read it."""
    try:
        return read_regular(path, most)
    except OSError as error:
        raise file_error(path, error, code) from error


def read_tensor(info: TensorInfo) -> bytes:
    """Read the bytes of a small tensor. Raises ModelError."""
    with open_model_file(info.file) as file:
        try:
            file.seek(info.offset)
            return file.read(info.nbytes)
        except OSError as error:
            raise file_error(info.file, error) from error


def file_error(path: str | Path, error: OSError, code: str = CANNOT_READ) -> ModelError:
    """The error for a file that cannot be read, with `code` unless the file is unfit to be read at all."""
    reason = f"cannot read {path}: {error_reason(error)}"
    if isinstance(error, UnfitFileError):
        return ModelError(f"{reason}; fetch the model again", code=error.code)
    return ModelError(reason, code=code)
