"""The lines of a batch's input file: checked when the batch begins, and read one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from weft.serving.batches.types import LINE, BatchError

MOST_LINES = 50_000  # as OpenAI's API
MOST_ERRORS = 100  # that are told


def check_lines(path: Path, endpoint: str) -> tuple[int, str | None, list[BatchError]]:
    """Number of the lines, the first one's model, and what is wrong with them; a batch with faults does not begin."""
    errors: list[BatchError] = []
    seen: set[str] = set()
    total, model = 0, None
    for total, text in numbered_lines(path):  # the last number is their count
        fault = _fault(text, endpoint, seen)
        if fault is not None:
            errors.append(_error(*fault, total))
            if len(errors) >= MOST_ERRORS:
                break
        elif total == 1:
            named = LINE.decode(text).body.get("model")
            model = named if isinstance(named, str) else None
        if total > MOST_LINES:
            errors.append(_error("too_many_lines", f"more than {MOST_LINES:,} lines; send several"))
            break
    if not total:
        errors.append(_error("empty_file", "the input file has no lines"))
    return total, model, errors


def _error(code: str, message: str, line: int | None = None) -> BatchError:
    return BatchError(code=code, message=message, line=line)


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1."""
    number = 0
    with path.open("rb") as file:
        for text in file:
            if text.strip():
                number += 1
                yield number, text


def _fault(text: bytes, endpoint: str, seen: set[str]) -> tuple[str, str] | None:
    """Code and message for a line that cannot be asked; None if it can."""
    try:
        line = LINE.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "invalid_json_line", f"the line is no request: {error}"
    if line.custom_id in seen:
        return "duplicate_custom_id", f"custom_id {line.custom_id!r:.100} is there twice"
    seen.add(line.custom_id)
    if line.method != "POST":
        return "invalid_method", f"method is {line.method!r:.20}; it must be 'POST'"
    if line.url != endpoint:
        return "invalid_url", f"url is {line.url!r:.100}; the batch's endpoint is {endpoint!r}"
    if line.body.get("stream"):
        return "invalid_request", "stream is not possible in a batch; leave it out"
    return None
