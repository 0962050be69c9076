"""The rows of an input file, JSONL or Parquet, as numbered JSON objects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from weft.api.batches.lines import LineLimits, numbered_lines
from weft.errors import ConfigError, RequestError, error_reason
from weft.formatting import extra_hint
from weft.regular_files import open_regular

CHUNK_ROWS = 1024  # rows of a Parquet file that are in memory at once
# A longer line is read no further; the engine's own lower limit gives the error.
LIMITS = LineLimits(nbytes=2**28, values=0)


class RowFile(msgspec.Struct, frozen=True):
    """An input file. `count` is its number of rows, `digest` the SHA-256 of its bytes.

    `is_requests` is True if its rows are requests as in OpenAI's batches, with `method`, `url` and `body`.
    """

    path: str
    count: int
    digest: str
    is_requests: bool
    model: str | None  # that the first row names

    @property
    def is_parquet(self) -> bool:
        return is_parquet(self.path)

    def rows(self) -> Iterator[tuple[int, bytes]]:
        """Number, from 1, and JSON text of each row. Lines of a JSONL file may be anything; blank ones do not count."""
        return read_rows(self.path)


def is_parquet(path: str) -> bool:
    return path.lower().endswith((".parquet", ".pq"))


def open_rows(path: str) -> RowFile:
    """Scan a file once. Raises ConfigError for a file that cannot be read or has no rows."""
    try:
        numbered = read_rows(path)
        count, first = next(numbered, (0, b""))
        count += sum(1 for _ in numbered)
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it has readinto
    except (OSError, RequestError) as error:
        raise ConfigError(f"cannot read {path}: {error_reason(error)}", code="cannot-read-batch") from None
    if not count:
        raise ConfigError(f"{path} has no rows", code="empty-batch")
    row = as_object(first) or {}
    is_requests = "url" in row and "body" in row
    body = row_body(row) if is_requests else row
    model = body.get("model")
    return RowFile(path, count, digest, is_requests, model if isinstance(model, str) else None)


def row_body(row: dict[str, Any]) -> dict[str, Any]:
    """The body of a request's row; in a Parquet file it may be JSON text. {} if it is neither."""
    body = row.get("body")
    if isinstance(body, str):
        body = as_object(body.encode())
    return body if isinstance(body, dict) else {}


def as_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object of a row; None if it is none."""
    try:
        row = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: str) -> Iterator[tuple[int, bytes]]:
    """Number and JSON text of each row. Raises OSError and ConfigError."""
    if not is_parquet(path):
        yield from numbered_lines(Path(path), LIMITS)
        return
    number = 0
    for batch in parquet_batches(path):
        for row in batch.to_pylist():
            number += 1
            yield number, msgspec.json.encode(row)


def parquet_batches(path: str) -> Iterator[Any]:
    """The rows of a Parquet file as pyarrow's record batches. Raises OSError and ConfigError."""
    arrow = import_arrow()
    try:
        with open_regular(path) as content, arrow.ParquetFile(content) as file:
            yield from file.iter_batches(CHUNK_ROWS)
    except arrow.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a Parquet file: {error_reason(error)}", code="not-parquet") from None


def import_arrow() -> Any:
    """The parts of pyarrow that are used, by name. Raises ConfigError if it is not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"Parquet files need pyarrow: {extra_hint('parquet')}", code="no-pyarrow") from None
    return SimpleNamespace(
        Table=pyarrow.Table,
        schema=pyarrow.schema,
        types={bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()},
        array=pyarrow.array,
        ArrowInvalid=pyarrow.ArrowInvalid,
        ArrowException=pyarrow.ArrowException,
        ParquetFile=parquet.ParquetFile,
        ParquetWriter=parquet.ParquetWriter,
    )
