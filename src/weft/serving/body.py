"""Request bodies: read within a limit, decoded into their type, every fault a 400 that names the field."""

from __future__ import annotations

import logging
import re
from collections.abc import Set
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from weft.errors import RequestError
from weft.serving.errors import HttpError

log = logging.getLogger("weft.serving")

T = TypeVar("T", bound=msgspec.Struct)

FIELD = re.compile(r"`\$\.?([^`]*)`$|required field `([^`]+)`")
REMEMBERED = 1000  # names of unknown fields that were warned of: the wire must not fill our memory


async def read(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes; HttpError 413 as soon as it is known to be longer."""
    refusal = HttpError(
        413, f"the body is longer than {limit} bytes; send less, or raise --max-body-bytes", code="body_too_large"
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise refusal
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise refusal
        pieces.append(piece)
    return b"".join(pieces)


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        raw = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8: {error.reason} at byte {error.start} of a text") from None
    except RecursionError:
        raise RequestError("the body is not usable JSON: too deeply nested") from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise RequestError("the body must be a JSON object")
    return raw


def convert(raw: dict[str, Any], target: type[T]) -> T:
    """The object as `target`; RequestError with the path of the first field that does not fit."""
    try:
        return msgspec.convert(raw, target)
    except msgspec.ValidationError as error:
        found = FIELD.search(str(error))
        raise RequestError(str(error), param=(found[1] or found[2]) if found else None) from None


class Unknown:
    """Fields that nobody knows: ignored, and each is named in the log once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, raw: dict[str, Any], target: type[msgspec.Struct], known: Set[str]) -> None:
        names = [n for n in raw if n not in target.__struct_fields__ and n not in known and n not in self._seen]
        if names and len(self._seen) < REMEMBERED:
            self._seen.update(names)
            log.warning("ignored unknown request fields: %s", ", ".join(repr(n[:80]) for n in names))
