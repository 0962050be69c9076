"""Traces: requests as they came, from a CSV or JSONL file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

import msgspec

from weft.errors import ConfigError, error_reason
from weft.simulate.ask import Ask, Contents

MOST_ERROR_CHARS = 60


class Row(msgspec.Struct, frozen=True):
    """A request of a trace, and when it came, in seconds from the first one."""

    at: float
    ask: Ask


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """What a kind of trace calls its columns, in lower case; `unit_s` is the second of its times."""

    name: str
    time: str
    input_len: str
    output_len: str
    unit_s: float = 1.0
    hash_tokens: int = 0  # for which each of a prompt's hash_ids stands


# Azure: AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024.md. Mooncake: its FAST25 traces; milliseconds, and
# 512 tokens for a hash. BurstGPT: its README.
DIALECTS = (
    Dialect(name="weft", time="time", input_len="input_len", output_len="output_len"),
    Dialect(name="azure", time="timestamp", input_len="contexttokens", output_len="generatedtokens"),
    Dialect(
        name="mooncake",
        time="timestamp",
        input_len="input_length",
        output_len="output_length",
        unit_s=1e-3,
        hash_tokens=512,
    ),
    Dialect(name="burstgpt", time="timestamp", input_len="request tokens", output_len="response tokens"),
)


def read_trace(path: str) -> tuple[Row, ...]:
    """All requests of a trace, in the order of their times.

    CSV with a line of column names, or one JSON object per line. Ours are `time` (seconds, or a date and time),
    `input_len`, `output_len`, and where prompts share something: `prefix_id` with `prefix_len` (requests with one id
    begin with the same so many tokens) or `session_id` (a prompt continues what the session has said before). Azure's,
    Mooncake's and BurstGPT's own columns are understood as they are. Raises ConfigError with the line that is wrong.
    """
    contents, rows = Contents(), []
    dialect: Dialect | None = None
    for number, line in _lines(path):
        dialect = dialect or _dialect(line, f"{path}, line {number}")
        rows.append(_row(line, dialect, contents, f"{path}, line {number}"))
    if not rows:
        raise ConfigError(f"trace {path} has no requests")
    rows.sort(key=lambda row: row.at)
    start = rows[0].at
    return tuple(Row(row.at - start, row.ask) for row in rows)


def _lines(path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each request's columns, their names in lower case, with the number of its line."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            first = next((line for line in file if line.strip()), "")
            file.seek(0)
            yield from (_objects if first.lstrip().startswith("{") else _table)(file, path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {path}: {error_reason(error)}") from None


def _objects(file: TextIO, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """One JSON object a line."""
    for number, text in enumerate(file, 1):
        if text.strip():
            yield number, _object(text, f"{path}, line {number}")


def _table(file: TextIO, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """CSV under a line of names."""
    reader = csv.reader(file, skipinitialspace=True)
    names = [name.strip().lower() for name in next(reader, [])]
    for fields in filter(any, reader):
        if len(fields) != len(names):
            raise ConfigError(f"{path}, line {reader.line_num}: {len(fields)} fields under {len(names)} columns")
        yield reader.line_num, dict(zip(names, fields, strict=True))


def _object(text: str, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: {_short(found)} is no object with time, input_len and output_len")
    return {str(name).lower(): value for name, value in found.items()}


def _dialect(line: Mapping[str, Any], where: str) -> Dialect:
    for dialect in DIALECTS:
        if {dialect.time, dialect.input_len, dialect.output_len} <= line.keys():
            return dialect
    raise ConfigError(
        f"{where}: has {_short(', '.join(line))}; a trace has time, input_len and output_len, or the columns of "
        "Azure's, Mooncake's or BurstGPT's traces"
    )


def _row(line: Mapping[str, Any], dialect: Dialect, contents: Contents, where: str) -> Row:
    at = _time(line.get(dialect.time), dialect, where)
    input_len = _tokens(line.get(dialect.input_len), dialect.input_len, where)
    output_len = _tokens(line.get(dialect.output_len), dialect.output_len, where)
    shared: tuple[tuple[int, int], ...] = ()
    hashes, prefix, session = line.get("hash_ids"), line.get("prefix_id"), line.get("session_id")
    if dialect.hash_tokens and hashes is not None:
        if not isinstance(hashes, list):
            raise ConfigError(f"{where}: hash_ids is {_short(hashes)}; it must be a list")
        shared = tuple((contents.id("hash", each), dialect.hash_tokens) for each in hashes)
    elif prefix not in (None, ""):
        shared = ((contents.id("prefix", prefix), _tokens(line.get("prefix_len"), "prefix_len", where)),)
    own = contents.id("session", session) if session not in (None, "") and not shared else contents.new()
    return Row(at, Ask(input_len, output_len, own, shared))


def _time(value: Any, dialect: Dialect, where: str) -> float:
    if isinstance(value, str) and not _is_number(value):
        try:
            found = datetime.fromisoformat(value.strip())
        except ValueError:
            raise ConfigError(
                f"{where}: {dialect.time} is {_short(value)}; it must be a number, or a date and time"
            ) from None
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float | str) or not isfinite(float(value)):
        raise ConfigError(f"{where}: {dialect.time} is {_short(value)}; it must be a number, or a date and time")
    return float(value) * dialect.unit_s


def _tokens(value: Any, column: str, where: str) -> int:
    number = float(value) if isinstance(value, int | float) or (isinstance(value, str) and _is_number(value)) else 0.0
    if isinstance(value, bool) or not isfinite(number) or number < 1 or number != int(number):
        raise ConfigError(f"{where}: {column} is {_short(value)}; it must be a whole number of tokens, 1 or more")
    return int(number)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.split())
    return repr(text if len(text) <= MOST_ERROR_CHARS else text[:MOST_ERROR_CHARS] + "...")
