"""AccessLog: one line of JSON for each request."""

from __future__ import annotations

import sys
from typing import Any, TextIO

import msgspec

from weft.errors import ConfigError, error_reason


class AccessLog:
    """Appends to a file; `-` is standard output. Raises ConfigError if the file cannot be opened."""

    def __init__(self, path: str) -> None:
        try:
            self._file: TextIO = sys.stdout if path == "-" else open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"cannot write the access log {path}: {error_reason(error)}", code="cannot-write-access-log"
            ) from None

    def write_row(self, row: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(row).decode() + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not sys.stdout:
            self._file.close()
