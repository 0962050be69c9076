"""Request traces from CSV and JSONL files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from math import isfinite
from typing import Any, TextIO

import msgspec

from weft.errors import ConfigError, error_reason
from weft.regular_files import open_regular
from weft.study.simulate.simulated_request import ContentIds, SimulatedRequest

MAX_ERROR_CHARS = 60  # characters of a value in an error message
MAX_TOKENS = 2**24  # tokens of a prompt or an answer; far above every model's length
MAX_S = 1e11  # largest time, in seconds: 3,000 years. A float does not hold the milliseconds of a larger one.


class TraceRow(msgspec.Struct, frozen=True):
    """A request of a trace; `at` is its arrival time, in seconds after the first request."""

    at: float
    request: SimulatedRequest


class TraceFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Column names of a kind of trace, in lower case; `unit_s` is the length of its time unit in seconds."""

    name: str
    time: str
    input_len: str
    output_len: str
    unit_s: float = 1.0
    hash_tokens: int = 0  # tokens that each of a prompt's hash_ids stands for


# Azure: AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024.md. Mooncake: the FAST25 traces, with times in
# milliseconds and 512 tokens per hash. BurstGPT: its README.
FORMATS = (
    TraceFormat(name="weft", time="time", input_len="input_len", output_len="output_len"),
    TraceFormat(name="azure", time="timestamp", input_len="contexttokens", output_len="generatedtokens"),
    TraceFormat(
        name="mooncake",
        time="timestamp",
        input_len="input_length",
        output_len="output_length",
        unit_s=1e-3,
        hash_tokens=512,
    ),
    TraceFormat(name="burstgpt", time="timestamp", input_len="request tokens", output_len="response tokens"),
)


def read_trace(path: str) -> tuple[TraceRow, ...]:
    """Read all requests of a trace, in the order of their times.

    The file is CSV with a line of column names, or has one JSON object per line. Weft's columns are `time` (seconds, or
    a date and time), `input_len` and `output_len`. Optional columns for shared prompts are `prefix_id`, with
    `prefix_len` (requests with the same id begin with the same `prefix_len` tokens), and `session_id` (a prompt
    continues the earlier text of its session). The columns of Azure's, Mooncake's and BurstGPT's traces are understood
    as well. Raises ConfigError with the number of the wrong line.
    """
    contents, rows = ContentIds(), []
    columns: TraceFormat | None = None
    for number, line in _lines(path):
        columns = columns or _trace_format(line, f"{path}, line {number}")
        rows.append(_row(line, columns, contents, f"{path}, line {number}"))
    if not rows:
        raise ConfigError(f"trace {path} has no requests", code="empty-trace")
    rows.sort(key=lambda row: row.at)
    start = rows[0].at
    return tuple(TraceRow(row.at - start, row.request) for row in rows)


def _lines(path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, columns) of each request; names of columns are in lower case."""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            first = next((line for line in file if line.strip()), "")
            file.seek(0)
            is_json = first.lstrip().startswith("{")
            yield from _json_lines(file, path) if is_json else _csv_lines(file, path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {path}: {error_reason(error)}", code="cannot-read-trace") from None


def _json_lines(file: TextIO, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Lines with one JSON object each."""
    for number, text in enumerate(file, 1):
        if text.strip():
            yield number, _object(text, f"{path}, line {number}")


def _csv_lines(file: TextIO, path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Lines of CSV below a line with the names of the columns."""
    reader = csv.reader(file, skipinitialspace=True)
    names = [name.strip().lower() for name in next(reader, [])]
    for fields in filter(any, reader):
        if len(fields) != len(names):
            raise ConfigError(
                f"{path}, line {reader.line_num}: {len(fields)} fields under {len(names)} columns",
                code="trace-line-of-other-length",
            )
        yield reader.line_num, dict(zip(names, fields, strict=True))


def _object(text: str, where: str) -> Mapping[str, Any]:
    try:
        decoded = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg}", code="trace-line-not-json") from None
    except (ValueError, RecursionError):
        raise ConfigError(
            f"{where}: has an integer of thousands of digits, or is nested too deeply", code="trace-line-not-json"
        ) from None
    if not isinstance(decoded, dict):
        raise ConfigError(
            f"{where}: {_short(decoded)} is no object with time, input_len and output_len", code="trace-line-not-object"
        )
    return {str(name).lower(): value for name, value in decoded.items()}


def _trace_format(line: Mapping[str, Any], where: str) -> TraceFormat:
    """The format whose columns a line has. Raises ConfigError for none."""
    for columns in FORMATS:
        if {columns.time, columns.input_len, columns.output_len} <= line.keys():
            return columns
    raise ConfigError(
        f"{where}: has {_short(', '.join(line))}; a trace has time, input_len and output_len, or the columns of "
        "Azure's, Mooncake's or BurstGPT's traces",
        code="unknown-trace-columns",
    )


def _row(line: Mapping[str, Any], columns: TraceFormat, contents: ContentIds, where: str) -> TraceRow:
    at = _time(line.get(columns.time), columns, where)
    input_len = _tokens(line.get(columns.input_len), columns.input_len, where)
    output_len = _tokens(line.get(columns.output_len), columns.output_len, where)
    shared = _shared(line, columns, contents, where)
    session = line.get("session_id")
    own = contents.id("session", session) if session not in (None, "") and not shared else contents.new()
    return TraceRow(at, SimulatedRequest(input_len, output_len, own, shared))


def _shared(
    line: Mapping[str, Any], columns: TraceFormat, contents: ContentIds, where: str
) -> tuple[tuple[int, int], ...]:
    """(content id, tokens) of the pieces that a prompt shares with others."""
    hashes, prefix = line.get("hash_ids"), line.get("prefix_id")
    if columns.hash_tokens and hashes is not None:
        if not isinstance(hashes, list):
            raise ConfigError(f"{where}: hash_ids is {_short(hashes)}; it must be a list", code="trace-hashes-not-list")
        return tuple((contents.id("hash", each), columns.hash_tokens) for each in hashes)
    if prefix not in (None, ""):
        return ((contents.id("prefix", prefix), _tokens(line.get("prefix_len"), "prefix_len", where)),)
    return ()


def _time(value: Any, columns: TraceFormat, where: str) -> float:
    """Seconds of a number in the format's unit, or of a date and time (UTC, unless it names a time zone)."""
    if isinstance(value, str) and not _is_number(value):
        try:
            date = datetime.fromisoformat(value.strip())
        except ValueError:
            raise _time_error(value, columns, where) from None
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if not _is_number(value) or not isfinite(float(value)):
        raise _time_error(value, columns, where)
    seconds = float(value) * columns.unit_s
    if abs(seconds) > MAX_S:
        raise ConfigError(
            f"{where}: {columns.time} is {_short(value)}, more than 3,000 years", code="trace-time-too-large"
        )
    return seconds


def _time_error(value: Any, columns: TraceFormat, where: str) -> ConfigError:
    return ConfigError(
        f"{where}: {columns.time} is {_short(value)}; it must be a number, or a date and time", code="bad-trace-time"
    )


def _tokens(value: Any, column: str, where: str) -> int:
    """A number of tokens, 1 or more."""
    number = float(value) if _is_number(value) else 0.0
    if not isfinite(number) or number < 1 or number != int(number):
        raise ConfigError(
            f"{where}: {column} is {_short(value)}; it must be a whole number of tokens, 1 or more",
            code="bad-trace-tokens",
        )
    if number > MAX_TOKENS:
        raise ConfigError(
            f"{where}: {column} is {_short(value)}; a simulated request has at most {MAX_TOKENS:,} tokens",
            code="too-many-trace-tokens",
        )
    return int(number)


def _is_number(value: Any) -> bool:
    """Return True for a number, or for a text that is one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False
    try:
        float(value)
    except (ValueError, OverflowError):  # an integer may be larger than any float
        return False
    return True


def _short(value: Any) -> str:
    """A value for an error message, cut to MAX_ERROR_CHARS."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.split())
    return repr(text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "...")
