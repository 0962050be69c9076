"""The lines of a batch's input file: checked when the batch begins, and read one by one."""

from __future__ import annotations

import codecs
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from weft.api.batches.types import LINE, BatchError, BatchLine
from weft.engine.templates.limits import LIMITS
from weft.errors import RequestError
from weft.http.body import check_structure
from weft.regular_files import open_regular

MAX_LINES = 50_000  # lines of a file, as in OpenAI's API
MAX_ERRORS = 100  # errors that are reported
FEW = 64  # lines that are read without a pause for other threads


@dataclass(frozen=True)
class LineLimits:
    """The most bytes and JSON values of one line: the limits of a request over HTTP."""

    nbytes: int
    values: int


def check_lines(path: Path, endpoint: str, limits: LineLimits) -> tuple[int, str | None, list[BatchError]]:
    """Number of lines, the first line's model, and the faults of the lines; a batch with faults does not begin."""
    errors: list[BatchError] = []
    seen: set[str] = set()
    total, model = 0, None
    try:
        for total, text in numbered_lines(path, limits, most_blank=MAX_LINES):  # the last number is the number of lines
            fault = _fault(text, endpoint, limits, seen)
            if fault is not None:
                errors.append(batch_error(*fault, total))
                if len(errors) >= MAX_ERRORS:
                    break
            elif total == 1:
                named = decode_line(text, limits).body.get("model")
                model = named if isinstance(named, str) else None
            if total > MAX_LINES:
                errors.append(batch_error("too_many_lines", f"more than {MAX_LINES:,} lines; send several"))
                break
    except RequestError as error:
        errors.append(batch_error("too_many_lines" if error.code == "blank-lines" else "invalid_encoding", str(error)))
    if not total and not errors:
        errors.append(batch_error("empty_file", "the input file has no lines"))
    return total, model, errors


def batch_error(code: str, message: str, line: int | None = None) -> BatchError:
    """The error of a batch, or of one of its lines."""
    return BatchError(code=code, message=message, line=line)


def numbered_lines(path: Path, limits: LineLimits, most_blank: int | None = None) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1. A line that is too long is cut to a byte more than the limit.

    Raises OSError, and RequestError if more than `most_blank` are blank, or for a file that is not UTF-8. Every few
    lines other threads get Python's lock, for which an event loop would otherwise wait 5 ms each time.
    """
    number = blank = 0
    with open_text(path) as file:
        while text := file.readline(limits.nbytes + 1):
            part = text
            while not part.endswith(b"\n") and (part := file.readline(limits.nbytes + 1)):
                pass  # the rest of a line that is too long
            if text.strip():
                number += 1
                yield number, text
            else:
                blank += 1
                if most_blank is not None and blank > most_blank:
                    raise RequestError(f"more than {most_blank:,} blank lines; leave them out", code="blank-lines")
            if (number + blank) % FEW == 0:
                time.sleep(0)


def open_text(path: Path) -> BinaryIO:
    """Open a file of lines after its byte order mark, if it has any.

    Raises OSError, and RequestError for a text of 16 or 32 bits per character.
    """
    file = open_regular(path)
    start = file.read(4)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start:
        file.close()
        raise RequestError("the file is not in UTF-8 but in UTF-16 or UTF-32; convert it", code="not-utf8")
    file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
    return file


def decode_line(text: bytes, limits: LineLimits) -> BatchLine:
    """The request of a line. Raises RequestError for a line that is too long or is no request."""
    if len(text) > limits.nbytes:
        raise RequestError(
            f"the line is longer than {limits.nbytes:,} bytes; send less, or raise --max-body-bytes",
            code="line-too-long",
        )
    if len(text) > LIMITS.small_bytes:
        check_structure(text, limits.values)
    try:
        return LINE.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the line is not a request: {error}", code="line-not-request") from None


def _fault(text: bytes, endpoint: str, limits: LineLimits, seen: set[str]) -> tuple[str, str] | None:
    """Code and message for a line that cannot be sent; None if it can."""
    try:
        line = decode_line(text, limits)
    except RequestError as error:
        return "invalid_json_line", str(error)
    if line.custom_id in seen:
        return "duplicate_custom_id", f"custom_id {line.custom_id!r:.100} is there twice"
    seen.add(line.custom_id)
    return request_fault(line, (endpoint,))


def request_fault(line: BatchLine, endpoints: Collection[str]) -> tuple[str, str] | None:
    """Code and message for a request that no endpoint answers in a batch; None if an endpoint does."""
    if line.method != "POST":
        return "invalid_method", f"method is {line.method!r:.20}; it must be 'POST'"
    if line.url not in endpoints:
        known = repr(*endpoints) if len(endpoints) == 1 else f"one of {', '.join(endpoints)}"
        return "invalid_url", f"url is {line.url!r:.100}; the batch's endpoint is {known}"
    if line.body.get("stream"):
        return "invalid_request", "stream is not possible in a batch; leave it out"
    return None
