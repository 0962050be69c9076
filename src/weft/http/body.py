"""Request bodies: received within limits and decoded; errors name the field."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Set
from functools import cache
from threading import Lock
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from weft.engine.templates.limits import LIMITS
from weft.errors import RequestError
from weft.http.errors import HttpError
from weft.logs import event_fields

log = logging.getLogger("weft.serving")

T = TypeVar("T", bound=msgspec.Struct)

FIELD = re.compile(r"`\$\.?([^`]*)`$|required field `([^`]+)`")
GOT_FLOAT = "got `float`"  # in msgspec's message


class BodyReceiver:
    """Receives bodies of at most `limit` bytes each, and of `LIMITS.bodies` times `limit` bytes together.

    `on_drop` is called when a large body is abandoned and its memory is free again.
    """

    def __init__(self, limit: int, on_drop: Callable[[], None]) -> None:
        self.limit = limit
        self._on_drop = on_drop
        self._held = 0

    async def receive(self, request: Request) -> bytes:
        """Receive the body.

        Raises HttpError 413 as soon as the body is known to exceed the limit, and 503 if it does not fit together with
        the bodies that are being received.
        """
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", ""):
            raise HttpError(
                415,
                f"the body has the Content-Encoding {encoding!r:.60}; send it as it is, without compression",
                code="unsupported-content-encoding",
            )
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.limit:
            raise self._too_long()
        pieces, size = [], 0
        try:
            async for piece in request.stream():
                size += len(piece)
                self._held += len(piece)
                if size > self.limit:
                    raise self._too_long()
                if self._held > self.limit * LIMITS.bodies:
                    raise HttpError(
                        503, "too many large bodies at once; try again later", code="overloaded", retry_after_s=5
                    )
                pieces.append(piece)
        except BaseException:
            if size > LIMITS.small_bytes:
                self._on_drop()
            raise
        finally:
            self._held -= size
        return b"".join(pieces)

    def _too_long(self) -> HttpError:
        return HttpError(
            413,
            f"the body is longer than {self.limit} bytes; send less, or raise --max-body-bytes",
            code="body-too-large",
        )


def check_structure(content: bytes, values: int) -> None:
    """Raise RequestError for JSON with more than `values` values, or with too many strings, lists and objects.

    The check runs before decoding: an empty list takes two bytes of JSON and 60 bytes of memory.
    """
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = plain.count(b'"') // 2
    _check_number("texts", texts, LIMITS.json_texts)
    outside = b"".join(plain.split(b'"')[::2])
    containers = outside.count(b"[") + outside.count(b"{")
    _check_number("lists and objects", containers, LIMITS.json_containers)
    _check_number("values", outside.count(b",") + containers, values)


def _check_number(items: str, number: int, limit: int) -> None:
    if number > limit:
        raise RequestError(
            f"the body has {number:,} {items}; the limit is {limit:,}: send several requests", code="too-many-items"
        )


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises RequestError for anything else."""
    try:
        raw = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("the body is not usable JSON: too deeply nested", code="json-nested-too-deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # which of the two depends on the version of msgspec
        _check_utf8(body)
        raise RequestError(f"the body is not valid JSON: {error}", code="body-not-json") from None
    if not isinstance(raw, dict):
        raise RequestError("the body must be a JSON object", code="body-not-object")
    _check_number("fields", len(raw), LIMITS.fields)
    return raw


def _check_utf8(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8: {error.reason} at byte {error.start}", code="body-not-utf8"
        ) from None


def convert_object(raw: dict[str, Any], target: type[T]) -> T:
    """Convert a decoded object to `target`. Raises RequestError with the path of the first field that does not fit."""
    if target not in _prepared:
        _prepare(target)
    try:
        try:
            return msgspec.convert(raw, target)
        except msgspec.ValidationError as error:
            if GOT_FLOAT not in str(error):
                raise
            return msgspec.convert(_whole_numbers(raw), target)
    except msgspec.ValidationError as error:
        field = FIELD.search(str(error))
        raise RequestError(str(error), param=(field[1] or field[2]) if field else None, code="invalid-field") from None


def _whole_numbers(raw: dict[str, Any]) -> dict[str, Any]:
    """Return an object with floats without a fraction as ints, also in nested objects: some clients send floats."""
    return {
        name: {key: _whole(part) for key, part in value.items()} if isinstance(value, dict) else _whole(value)
        for name, value in raw.items()
    }


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# The first use of a type reads its annotations, in Python code: with two threads in it, msgspec 0.22 crashes.
_prepared: set[type[msgspec.Struct]] = set()
_preparing = Lock()


def _prepare(target: type[msgspec.Struct]) -> None:
    """Have msgspec read a type's annotations in one thread."""
    with _preparing:
        if target not in _prepared:
            with contextlib.suppress(msgspec.ValidationError):
                msgspec.convert({}, target)
            _prepared.add(target)


@cache
def field_names(target: type[msgspec.Struct]) -> frozenset[str]:
    """Names of a type's fields."""
    return frozenset(target.__struct_fields__)


class SeenNames:
    """Names that have occurred, so that each is logged once.

    At most `LIMITS.unknown_names` are remembered, each cut to `LIMITS.unknown_name` characters.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._lock = Lock()

    def add(self, names: Iterable[str]) -> list[str]:
        """Remember names; return the new names."""
        cut = dict.fromkeys(name[: LIMITS.unknown_name] for name in names)
        with self._lock:
            new = [name for name in cut if name not in self._seen][: LIMITS.unknown_names - len(self._seen)]
            self._seen.update(new)
        return new


class Notes:
    """Log lines about requested features without effect. Each subject is logged once."""

    def __init__(self) -> None:
        self._subjects = SeenNames()

    def add(self, subject: str, text: str) -> None:
        """Log a text about a subject that is new."""
        for new in self._subjects.add([subject]):
            log.warning("%s", text, extra=event_fields("request-not-as-asked", subject=new))


class UnknownFields:
    """Log of unknown request fields, which are ignored. Each name appears once."""

    def __init__(self) -> None:
        self._names = SeenNames()

    def log_new(self, raw: dict[str, Any], target: type[msgspec.Struct], accepted: Set[str]) -> None:
        """Log the fields of `raw` that are neither fields of `target` nor `accepted`, if they are new."""
        fields = field_names(target)
        unknown = [name for name in raw if name not in fields and name not in accepted]
        names = self._names.add(unknown) if unknown else []
        if not names:
            return
        shown = ", ".join(map(repr, names[: LIMITS.unknown_names_per_line]))
        hidden = len(names) - LIMITS.unknown_names_per_line
        log.warning(
            "ignored unknown request fields: %s%s",
            shown,
            f" and {hidden} more" if hidden > 0 else "",
            extra=event_fields("unknown-fields", names=names),
        )
