"""The output files of a batch: the answered rows as JSONL or Parquet, the failed ones as JSONL, each written whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

import msgspec

from weft.api.offline.journal import Journal
from weft.api.offline.rows import CHUNK_ROWS, RowFile, as_object, import_arrow, is_parquet, parquet_batches

# Columns that answers add to plain rows in Parquet, and their types; values of other types are JSON text.
ADDED: dict[str, type] = {
    "generated_text": str,
    "finish_reason": str,
    "prompt_tokens": int,
    "completion_tokens": int,
    "reasoning": str,
    "tool_calls": str,
}
# Columns of answers to OpenAI's requests.
RESULT: dict[str, type] = {"id": str, "custom_id": str, "response": str, "error": str}

Row = dict[str, Any]


def failed_path(out: str) -> Path:
    """Path of the failed rows of an output file, in the same folder."""
    return Path(out).with_suffix(".failed.jsonl")


def write_outputs(rows: RowFile, journal: Journal, out: str) -> None:
    """Write the answered and the failed rows, in the order of the input. Without failed rows there is no file."""
    with whole_file(Path(out)) as file:
        if is_parquet(out):
            write_parquet(rows, journal, file)
        else:
            for row in answered_rows(rows, journal):
                file.write(msgspec.json.encode(row) + b"\n")
    failures = failed_path(out)
    if not journal.counts()[1]:
        failures.unlink(missing_ok=True)
        return
    with whole_file(failures) as file:
        for line in failed_lines(rows, journal):
            file.write(line + b"\n")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears at its path, synced to disk, when the block has ended. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def answered_rows(rows: RowFile, journal: Journal) -> Iterator[Row]:
    """The rows that have answers, with these."""
    for text, answer in _joined(rows, journal, failed=False):
        yield answer if rows.is_requests else {**(as_object(text) or {}), **answer}


def failed_lines(rows: RowFile, journal: Journal) -> Iterator[bytes]:
    """The rows that have errors, with these. A row that is no JSON object is the field `row`."""
    for text, answer in _joined(rows, journal, failed=True):
        row = as_object(text)
        plain = {"row": text.decode(errors="replace").rstrip("\r\n")} if row is None else row
        yield msgspec.json.encode(answer if rows.is_requests else {**plain, **answer})


def _joined(rows: RowFile, journal: Journal, *, failed: bool) -> Iterator[tuple[bytes, Row]]:
    """The text of each row that has an answer, or an error, together with it."""
    answers = journal.rows(failed=failed)
    number, answer = next(answers, (0, b""))
    for at, text in rows.rows():
        if at == number:
            yield text, msgspec.json.decode(answer)
            number, answer = next(answers, (0, b""))


def write_parquet(rows: RowFile, journal: Journal, file: IO[bytes]) -> None:
    """Write the answered rows as Parquet: with the types of the input's columns, if that is Parquet too."""
    if rows.is_parquet and not rows.is_requests:
        _write_tables(_extended_tables(rows, journal), file)
        return
    types = {**RESULT} if rows.is_requests else {**column_types(answered_rows(rows, journal)), **ADDED}
    _write_tables(_tables(answered_rows(rows, journal), types), file)


def _write_tables(tables: Iterator[Any], file: IO[bytes]) -> None:
    first = next(tables)
    with import_arrow().ParquetWriter(file, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)


def _tables(rows: Iterator[Row], types: dict[str, type]) -> Iterator[Any]:
    """The rows in tables of a few, at least one table."""
    arrow = import_arrow()
    schema = arrow.schema([(name, arrow.types[kind]) for name, kind in types.items()])
    chunk = list(islice(rows, CHUNK_ROWS))
    while True:
        values = [{name: cell(row.get(name), kind) for name, kind in types.items()} for row in chunk]
        yield arrow.Table.from_pylist(values, schema=schema)
        chunk = list(islice(rows, CHUNK_ROWS))
        if not chunk:
            return


def _extended_tables(rows: RowFile, journal: Journal) -> Iterator[Any]:
    """The input's tables without the failed rows, with the columns that the answers add."""
    arrow, answers = import_arrow(), journal.rows(failed=False)
    number, answer = next(answers, (0, b""))
    at = 0
    for batch in parquet_batches(rows.path):
        table = arrow.Table.from_batches([batch])
        table = table.drop_columns([name for name in ADDED if name in table.column_names])
        places, added = [], []
        for place in range(table.num_rows):
            at += 1
            if at == number:
                places.append(place)
                added.append(msgspec.json.decode(answer))
                number, answer = next(answers, (0, b""))
        table = table.take(arrow.array(places, arrow.types[int]))
        for name, kind in ADDED.items():
            values = [cell(row.get(name), kind) for row in added]
            table = table.append_column(name, arrow.array(values, arrow.types[kind]))
        yield table


def column_types(rows: Iterator[Row]) -> dict[str, type]:
    """The type of each field: bool, int, float, or str for all others."""
    types: dict[str, type] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                kind = type(value) if isinstance(value, bool | int | float) else str
                types[name] = _common(types.get(name, kind), kind)
            else:
                types.setdefault(name, str)
    return types


def _common(one: type, other: type) -> type:
    if one is other:
        return one
    return float if {one, other} == {int, float} else str


def cell(value: Any, kind: type) -> Any:
    """A value of a column: JSON text if it has another type than the column."""
    if value is None or type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    return msgspec.json.encode(value).decode()
